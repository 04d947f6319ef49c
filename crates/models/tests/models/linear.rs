//! States of linear attention, which are of one size for every text and can't be taken back.

use crate::common::{distance, reference_in};
use candle_core::{DType, Device, Tensor};
use candle_quant::{Checkpoint, VarBuilder};
use candle_quant_models::{Config, Model, NormKind};
use std::path::PathBuf;

const FAMILIES: [&str; 3] = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"];

fn folder(family: &str, container: &str) -> PathBuf {
    let families = PathBuf::from(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures/families");
    families.join(family).join(container)
}

fn load(family: &str, container: &str, dtype: DType) -> (Model, Tensor, Tensor) {
    let folder = folder(family, container);
    let (tokens, expected) = reference_in(&folder.join("refs.safetensors"));
    let model = Model::load(&Checkpoint::open(&folder).unwrap(), dtype, &Device::Cpu).unwrap();
    (model, tokens, expected)
}

#[test]
fn a_text_is_forgotten_as_a_whole() {
    for family in FAMILIES {
        let (mut model, tokens, expected) = load(family, "mlx-affine4", DType::F32);
        let part = |from: usize, len: usize| tokens.narrow(1, from, len).unwrap();
        model.forward(&part(0, 20), 0).unwrap();
        assert_eq!((model.cached_tokens(), model.truncate_kv_cache(20)), (20, 20));
        let held = model.cache_size_in_bytes();
        assert_eq!((model.truncate_kv_cache(19), model.cached_tokens()), (0, 0));
        assert_eq!(model.cache_size_in_bytes(), held, "memory stays for the next text");
        model.forward(&part(0, 20), 0).unwrap();
        let found = model.forward(&part(20, 4), 20).unwrap();
        assert!(distance(&found, &expected.narrow(0, 20, 4).unwrap()).max < 3e-4, "{family}");
        model.clear_kv_cache();
        assert_eq!(model.cached_tokens(), 0);
        let found = model.forward(&tokens, 0).unwrap();
        assert!(distance(&found, &expected).max < 3e-4, "{family}");
    }
}

#[test]
fn texts_of_a_batch_have_states_of_their_own() {
    for family in FAMILIES {
        let (mut model, tokens, _) = load(family, "mlx-mxfp4", DType::F32);
        let other: Vec<u32> = (0..24).map(|i| (i * 31 + 7) % 96).collect();
        let other = Tensor::new(other, &Device::Cpu).unwrap().unsqueeze(0).unwrap();
        let mut alone = |ids: &Tensor| {
            model.clear_kv_cache();
            model.forward(ids, 0).unwrap()
        };
        let alone = Tensor::cat(&[alone(&tokens), alone(&other)], 0).unwrap();
        let both = Tensor::cat(&[&tokens, &other], 0).unwrap();
        model.clear_kv_cache();
        let parts = [(0, 9), (9, 1), (10, 14)];
        let parts =
            parts.map(|(from, len)| model.forward(&both.narrow(1, from, len).unwrap(), from).unwrap());
        let together = Tensor::cat(&parts, 1).unwrap();
        assert!(distance(&together, &alone).max < 1e-4, "{family}");
        // One text does not go on two; nothing is left then.
        let error = model.forward(&tokens.narrow(1, 0, 1).unwrap(), 24).unwrap_err().to_string();
        assert!(error.contains("batch"), "{error}");
        assert_eq!(model.cached_tokens(), 0);
        assert!(distance(&model.forward(&both, 0).unwrap(), &alone).max < 1e-4, "{family}");
    }
}

/// Nothing but the shape of a convolution tells that mlx-lm has added one to the norms.
#[test]
fn norms_are_those_of_the_file() {
    for family in FAMILIES {
        for (container, kind) in [("hf", NormKind::RmsOnePlus), ("mlx-affine4", NormKind::Rms)] {
            let checkpoint = Checkpoint::open(folder(family, container)).unwrap();
            let config = Config::from_checkpoint(&checkpoint).unwrap();
            assert_eq!((config.norm, config.qk_norm.unwrap().kind), (kind, kind), "{family} {container}");
            let of_text = Config::from_json(checkpoint.config()).unwrap();
            assert_eq!(of_text.norm, NormKind::RmsOnePlus);
            // A model looks at its file itself.
            let (tokens, expected) = reference_in(&folder(family, container).join("refs.safetensors"));
            let vb = VarBuilder::from_checkpoint(&checkpoint, DType::F32, &Device::Cpu);
            let logits = Model::new(&of_text, vb).unwrap().forward(&tokens, 0).unwrap();
            assert!(distance(&logits, &expected).max < 3e-4, "{family} {container}");
        }
    }
}

#[test]
fn half_precision_is_near() {
    for family in FAMILIES {
        for (dtype, bound) in crate::HALF_BOUNDS {
            let (mut model, tokens, expected) = load(family, "mlx-affine4", dtype);
            let logits = model.forward(&tokens, 0).unwrap();
            assert_eq!(logits.dtype(), dtype);
            let distance = distance(&logits.to_dtype(DType::F32).unwrap(), &expected);
            // Routers of random models choose otherwise for some tokens.
            assert!(distance.rms < 2. * bound, "{family} {dtype:?}: {distance:?}");
        }
    }
}

#[test]
fn senseless_sizes_are_refused() {
    let checkpoint = Checkpoint::open(folder("qwen3_5_text", "hf")).unwrap();
    for (key, value, what) in [
        ("linear_num_value_heads", 3, "multiple"),
        ("linear_key_head_dim", 1 << 20, "elements"),
        ("linear_conv_kernel_dim", 1, "linear_conv_kernel_dim"),
        ("linear_num_key_heads", 0, "linear_num_key_heads"),
        ("num_hidden_layers", 2, "layer_types"),
    ] {
        let mut config = checkpoint.config().clone();
        config[key] = value.into();
        let error = Config::from_json(&config).unwrap_err().to_string();
        assert!(error.contains(what), "{key}: {error}");
    }
}

/// Where blocks go across heads, inputs have another order than the adapters that were trained with published models.
#[test]
fn output_projections_in_tiles_take_no_adapters() {
    let temporary = tempfile::tempdir().unwrap();
    let tiled = temporary.path().join("tiled.gguf");
    crate::tiled::with_blocks_of_two_heads(&folder("qwen3_5_text", "gguf/model.gguf"), &tiled);
    for (path, takes) in [(tiled, false), (folder("qwen3_5_text", "gguf/model.gguf"), true)] {
        let checkpoint = Checkpoint::open(&path).unwrap();
        let model = Model::load(&checkpoint, DType::F32, &Device::Cpu).unwrap();
        let has = |end: &str| model.adapters().slots().iter().any(|slot| slot.module().ends_with(end));
        assert!(has("linear_attn.in_proj_z"), "{}", path.display());
        assert_eq!(has("linear_attn.out_proj"), takes, "{}", path.display());
    }
}
