//! Models with adapters from files, as PEFT and mlx-lm wrote them, against the logits of these tools.

use crate::common::{bundled, distance, open};
use candle_core::{DType, Device, Tensor};
use candle_quant::checkpoint::{AdapterFile, AdapterFormat, Checkpoint};
use candle_quant::nn::Lora;
use candle_quant_models::Model;
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

const FOLDER: &str = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/tests/fixtures/adapters");

fn folder(name: &str) -> PathBuf {
    Path::new(FOLDER).join(name)
}

fn adapter(name: &str) -> AdapterFile {
    AdapterFile::open(folder(name)).unwrap()
}

fn expected() -> HashMap<String, Tensor> {
    candle_core::safetensors::load(folder("expected.safetensors"), &Device::Cpu).unwrap()
}

/// The model of a case, and its tokens.
fn model_of(case: &str) -> (Model, Tensor) {
    let tokens = expected()["tokens"].to_dtype(DType::I64).unwrap().unsqueeze(0).unwrap();
    let load = |checkpoint: Checkpoint| Model::load(&checkpoint, DType::F32, &Device::Cpu).unwrap();
    match case {
        "mlx-experts" => {
            let ids: Vec<i64> = tokens.flatten_all().unwrap().to_vec1().unwrap();
            let ids: Vec<i64> = ids.into_iter().map(|id| id % 256).collect();
            (
                load(open("qwen3moe-affine-b4-g64")),
                Tensor::new(ids, &Device::Cpu).unwrap().unsqueeze(0).unwrap(),
            )
        }
        _ => (load(bundled("tiny")), tokens),
    }
}

fn cases() -> Vec<String> {
    let mut cases: Vec<_> = expected().into_keys().filter(|name| name != "tokens").collect();
    cases.sort();
    assert_eq!(cases.len(), 9);
    cases
}

fn last(model: &mut Model, tokens: &Tensor) -> Tensor {
    model.clear_kv_cache();
    model.forward_last(tokens, 0).unwrap()
}

#[test]
fn logits_are_those_of_peft_and_mlx_lm() {
    for case in cases() {
        let (mut model, tokens) = model_of(&case);
        let alone = last(&mut model, &tokens);
        for name in case.split('+') {
            model.adapters().load(name, &adapter(name)).unwrap();
        }
        let wanted = expected()[&case].clone();
        let found = distance(&last(&mut model, &tokens), &wanted);
        println!("{case}: {found:?}");
        assert!(found.max <= 3e-4 && found.other_argmax == 0, "{case}: {found:?}");
        assert!(distance(&alone, &wanted).max > 0.05, "{case} changes something");
        // Token by token, as in generation.
        model.clear_kv_cache();
        let mut logits = None;
        for at in 0..tokens.dim(1).unwrap() {
            logits = Some(model.forward(&tokens.narrow(1, at, 1).unwrap(), at).unwrap());
        }
        let found = distance(&logits.unwrap(), &wanted);
        assert!(found.max <= 3e-4, "{case} token by token: {found:?}");

        // Switched off, and taken away.
        for name in case.split('+') {
            assert!(model.adapters().set_active(name, false));
        }
        assert!(!model.adapters().is_active());
        assert_eq!(distance(&last(&mut model, &tokens), &alone).max, 0., "{case}");
        for name in case.split('+') {
            assert!(model.adapters().set_active(name, true));
            assert!(model.adapters().remove(name));
            assert!(!model.adapters().remove(name));
        }
        assert_eq!(distance(&last(&mut model, &tokens), &alone).max, 0., "{case}");
    }
}

/// Saved in both formats and loaded again. With `CANDLE_QUANT_KEEP_ADAPTERS` the folder is kept, for
/// `tests/peers/peft_adapter.py --check`.
#[test]
fn what_is_saved_is_loaded_again() {
    let temporary = tempfile::tempdir().unwrap();
    let kept = std::env::var_os("CANDLE_QUANT_KEEP_ADAPTERS").map(PathBuf::from);
    let out = kept.unwrap_or_else(|| temporary.path().to_owned());
    for case in cases().iter().filter(|case| !case.contains('+')) {
        let (mut model, tokens) = model_of(case);
        model.adapters().load("one", &adapter(case)).unwrap();
        let logits = last(&mut model, &tokens);
        for format in [AdapterFormat::Peft, AdapterFormat::MlxLm] {
            let dir = out.join(format!("{case}-as-{format}"));
            model.adapters().save("one", &dir, format).unwrap();
            let (mut again, _) = model_of(case);
            let file = AdapterFile::open(&dir).unwrap();
            assert_eq!(file.format(), format);
            again.adapters().load("other", &file).unwrap();
            let found = distance(&last(&mut again, &tokens), &logits);
            assert!(found.max <= 1e-5, "{case} as {format}: {found:?}");
            // PEFT knows no experts that are modules, since transformers has them in stacks.
            if (case.as_str(), format) != ("mlx-experts", AdapterFormat::Peft) {
                again.clear_kv_cache();
                let all = again.forward(&tokens, 0).unwrap().squeeze(0).unwrap();
                let tokens = tokens.squeeze(0).unwrap().to_dtype(DType::U32).unwrap();
                let tensors = HashMap::from([("tokens", tokens), ("logits_f32", all)]);
                candle_core::safetensors::save(&tensors, dir.join("logits.safetensors")).unwrap();
            }
        }
        let error = model.adapters().save("none", &out, AdapterFormat::Peft).unwrap_err().to_string();
        assert_eq!(error, "adapter to save: expected the name of one, found `none`");
    }
}

/// Files that name experts one by one, and stacks that have gate and up together.
#[test]
fn experts_are_found_by_other_names() {
    let case = "mlx-experts";
    let (mut model, tokens) = model_of(case);
    model.adapters().load("one", &adapter(case)).unwrap();
    let logits = model.forward(&tokens, 0).unwrap();
    let dir = tempfile::tempdir().unwrap();
    model.adapters().save("one", dir.path(), AdapterFormat::Peft).unwrap();
    let file = AdapterFile::open(dir.path()).unwrap();
    assert!(file.loras().contains_key("model.layers.1.mlp.experts.7.down_proj"));
    assert!(model.adapters().remove("one"));

    // Without an expert, which is then as it was.
    let tensors =
        candle_core::safetensors::load(dir.path().join("adapter_model.safetensors"), &Device::Cpu).unwrap();
    let fewer: HashMap<_, _> = tensors.into_iter().filter(|(name, _)| !name.contains("experts.0.")).collect();
    candle_core::safetensors::save(&fewer, dir.path().join("adapter_model.safetensors")).unwrap();
    model.adapters().load("one", &AdapterFile::open(dir.path()).unwrap()).unwrap();
    let slot = model.adapters().slot("model.layers.1.mlp.switch_mlp.down_proj").unwrap();
    let of_expert = |lora: &Lora, expert| {
        let b = lora.b.get(expert).unwrap().abs().unwrap();
        b.max_all().unwrap().to_scalar::<f32>().unwrap()
    };
    let lora = slot.get("one").unwrap();
    assert!(of_expert(&lora, 0) == 0. && of_expert(&lora, 1) > 0.);
    model.clear_kv_cache();
    let found = distance(&model.forward(&tokens, 0).unwrap(), &logits);
    assert!(found.max > 0. && found.max < 2., "{found:?}");
}

#[test]
fn modules_that_the_model_lacks_are_named() {
    let (model, _) = model_of("mlx-experts");
    let error = model.adapters().load("one", &adapter("peft-rslora")).unwrap_err().to_string();
    // The sizes are others.
    assert!(error.contains("expected an adapter of a weight [64, 128], found one of [128, 256]"), "{error}");
    assert!(model.adapters().slots().iter().all(|slot| slot.names().is_empty()));

    let (model, _) = model_of("peft-lora");
    let error = model.adapters().load("one", &adapter("mlx-experts")).unwrap_err().to_string();
    let named = "it has adapters of `model.layers.1.mlp.gate`, `model.layers.1.mlp.switch_mlp.down_proj`";
    assert!(error.contains(named) && error.contains("such as `lm_head`"), "{error}");
    model.adapters().load("one", &adapter("peft-lora")).unwrap();
    let error = model.adapters().load("one", &adapter("peft-lora")).unwrap_err().to_string();
    assert_eq!(error, "adapter: expected a name that is not taken, found `one` again");
}

/// Of a tied head, which has no weight of its own.
#[test]
fn a_tied_head_has_adapters_of_its_own() {
    let (mut model, tokens) = model_of("peft-lora");
    let slot = model.adapters().slot("lm_head").unwrap();
    assert_eq!(slot.dims(), [640, 256]);
    let alone = last(&mut model, &tokens);
    let tensor = |dims: (usize, usize)| Tensor::randn(0f32, 0.1, dims, &Device::Cpu).unwrap();
    let (a, b) = (tensor((2, 256)), tensor((640, 2)));
    slot.add("head", Lora { a, b, scale: 1., magnitude: None }).unwrap();
    assert!(distance(&last(&mut model, &tokens), &alone).max > 0.01);
    let dir = tempfile::tempdir().unwrap();
    model.adapters().save("head", dir.path(), AdapterFormat::Peft).unwrap();
    assert!(fs::read_to_string(dir.path().join("adapter_config.json")).unwrap().contains("\"lm_head\""));
}
