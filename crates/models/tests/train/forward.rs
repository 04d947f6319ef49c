//! Logits of whole texts are those of inference.

use crate::common::{bundled, distance, FIXTURES};
use crate::models::{ids, load, texts, with_adapters, FAMILIES};
use candle_core::{DType, Device, Tensor};
use candle_quant_models::Model;

fn check(name: &str, model: &mut Model) {
    let texts = texts(3, 22);
    for batch in [&texts[..1], &texts[..]] {
        let ids = ids(batch);
        let whole = model.forward_whole(&ids).unwrap();
        model.clear_kv_cache();
        let expected = model.forward(&ids, 0).unwrap();
        assert_eq!(whole.dims(), expected.dims());
        let distance = distance(&whole.detach(), &expected.detach());
        assert!(distance.max < 2e-5 && distance.other_argmax == 0, "{name}: {distance:?}");
    }
    // Each text by itself: what is behind it does not matter.
    let padded = model.forward_whole(&ids(&texts)).unwrap().detach();
    for (index, text) in texts.iter().enumerate() {
        let alone = model.forward_whole(&ids(std::slice::from_ref(text))).unwrap().detach();
        let row = padded.get(index).unwrap().narrow(0, 0, text.tokens().len()).unwrap();
        let distance = distance(&row, &alone.squeeze(0).unwrap());
        assert!(distance.max < 2e-5, "{name}, text {index}: {distance:?}");
    }
}

#[test]
fn logits_are_those_of_inference() {
    for name in FIXTURES.into_iter().chain(FAMILIES) {
        check(name, &mut load(name));
    }
    check("tiny", &mut Model::load(&bundled("tiny"), DType::F32, &Device::Cpu).unwrap());
}

#[test]
fn adapters_apply_alike() {
    for name in FAMILIES {
        let mut model = load(name);
        let before = model.forward_whole(&ids(&texts(1, 20))).unwrap();
        with_adapters(&model);
        check(name, &mut model);
        let after = model.forward_whole(&ids(&texts(1, 20))).unwrap().detach();
        assert!(distance(&after, &before).max > 1e-3, "{name}: the adapters do nothing");
        model.adapters().set_active("test", false);
        let off = model.forward_whole(&ids(&texts(1, 20))).unwrap();
        assert_eq!(distance(&off, &before).max, 0., "{name}");
    }
}

#[test]
fn the_cache_does_not_matter() {
    let mut model = load("qwen3-nvfp4");
    let ids = ids(&texts(1, 20));
    let first = model.forward(&ids, 0).unwrap();
    let cached = model.cached_tokens();
    let whole = model.forward_whole(&ids).unwrap();
    assert!(distance(&whole, &first).max < 2e-5);
    assert_eq!(model.cached_tokens(), cached);
}

#[test]
fn half_precision_is_close() {
    for (dtype, bound) in [(DType::F16, 0.003), (DType::BF16, 0.025)] {
        let model = Model::load(&bundled("tiny"), dtype, &Device::Cpu).unwrap();
        let exact = Model::load(&bundled("tiny"), DType::F32, &Device::Cpu).unwrap();
        let ids = ids(&texts(2, 24));
        let found = model.forward_whole(&ids).unwrap();
        assert_eq!(found.dtype(), dtype);
        let distance = distance(&found, &exact.forward_whole(&ids).unwrap());
        assert!(distance.rms < bound, "{dtype:?}: {distance:?}");
    }
}

#[test]
fn misuse_is_an_error() {
    let model = load("qwen3-nvfp4");
    let long = Tensor::zeros((1, model.context() + 1), DType::U32, &Device::Cpu).unwrap();
    assert!(model.forward_whole(&long).unwrap_err().to_string().contains("made for texts of at most"));
    let none = Tensor::zeros((1, 0), DType::U32, &Device::Cpu).unwrap();
    assert!(model.forward_whole(&none).is_err());
    assert!(model.forward_whole(&Tensor::new(&[[256u32]], &Device::Cpu).unwrap()).is_err());
}
