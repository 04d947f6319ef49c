//! Models against the logits of mlx-lm, and against themselves in other orders of work.

use crate::common::{bundled, distance, open, reference_in, FIXTURES};
use crate::drop_in::weights_on;
use crate::{device, HALF_BOUNDS, HALF_FIXTURES};
use candle_core::{DType, Device, Tensor};
use candle_nn::VarMap;
use candle_quant::{QuantFormat, VarBuilder};
use candle_quant_models::{Config, Model, ModelOptions};
use serde_json::json;

fn load(name: &str, dtype: DType, device: &Device) -> Model {
    Model::load(&open(name), dtype, device).unwrap()
}

#[test]
fn logits_are_those_of_mlx_lm() {
    let Some(device) = device() else { return };
    for name in FIXTURES {
        let (tokens, expected) = reference(name, &device);
        let distance = distance(&load(name, DType::F32, &device).forward(&tokens, 0).unwrap(), &expected);
        assert!(distance.max <= 3e-4 && distance.other_argmax == 0, "{name}: {distance:?}");
    }
}

/// In f32: rounding to 16 bits makes some tokens choose other experts.
#[test]
fn logits_of_experts_are_those_of_mlx_lm() {
    let Some(device) = device() else { return };
    for name in ["qwen3moe-affine-b4-g64", "qwen3moe-nvfp4-global_scale"] {
        let (tokens, expected) = reference(name, &device);
        let distance = distance(&load(name, DType::F32, &device).forward(&tokens, 0).unwrap(), &expected);
        assert!(distance.max <= 3e-4 && distance.other_argmax == 0, "{name}: {distance:?}");
    }
}

#[test]
fn the_bundled_model_is_the_one_that_mlx_lm_ran() {
    let Some(device) = device() else { return };
    let path = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/tests/fixtures/tiny_logits.safetensors");
    let (tokens, expected) = reference_in(path.as_ref());
    let tokens = tokens.to_device(&device).unwrap();
    let mut model = Model::load(&bundled("tiny"), DType::F32, &device).unwrap();
    let logits = model.forward(&tokens, 0).unwrap();
    let distance_to_mlx = distance(&logits, &expected);
    assert!(distance_to_mlx.max <= 3e-4 && distance_to_mlx.other_argmax == 0, "{distance_to_mlx:?}");

    // Quantizing its source while loading makes the same model.
    let source = bundled("tiny-bf16");
    let vb = VarBuilder::from_checkpoint(&source, DType::F32, &device)
        .quantize_to(QuantFormat::affine(4, 64).unwrap());
    let mut model = Model::new(&Config::from_json(source.config()).unwrap(), vb).unwrap();
    assert_eq!(distance(&model.forward(&tokens, 0).unwrap(), &logits).max, 0.);
}

/// In one piece, and the second half token by token.
#[test]
fn half_precision_activations_stay_close() {
    let Some(device) = device() else { return };
    for name in HALF_FIXTURES {
        let (tokens, expected) = reference(name, &device);
        for (dtype, bound) in HALF_BOUNDS {
            let mut model = load(name, dtype, &device);
            let whole = model.forward(&tokens, 0).unwrap();
            assert_eq!(whole.dtype(), dtype);
            model.clear_kv_cache();
            let len = tokens.dim(1).unwrap();
            let mut pieces = vec![model.forward(&tokens.narrow(1, 0, len / 2).unwrap(), 0).unwrap()];
            for offset in len / 2..len {
                pieces.push(model.forward(&tokens.narrow(1, offset, 1).unwrap(), offset).unwrap());
            }
            for logits in [whole, Tensor::cat(&pieces, 1).unwrap()] {
                let distance = distance(&logits, &expected);
                assert!(distance.rms <= bound, "{name} {dtype:?}: {distance:?}");
            }
        }
    }
}

/// The reference of a fixture, its tokens on `device`.
fn reference(name: &str, device: &Device) -> (Tensor, Tensor) {
    let (tokens, expected) = crate::common::reference(name);
    (tokens.to_device(device).unwrap(), expected)
}

/// The logits of `tokens` `[B, T]` fed in pieces of `len` tokens.
fn in_pieces(model: &mut Model, tokens: &Tensor, len: usize) -> Tensor {
    model.clear_kv_cache();
    let total = tokens.dim(1).unwrap();
    let pieces: Vec<_> = (0..total)
        .step_by(len)
        .map(|offset| {
            let piece = tokens.narrow(1, offset, len.min(total - offset)).unwrap();
            model.forward(&piece, offset).unwrap()
        })
        .collect();
    assert_eq!(model.cached_tokens(), total);
    Tensor::cat(&pieces, 1).unwrap()
}

#[test]
fn a_text_in_pieces_gives_the_logits_of_the_whole() {
    let Some(device) = device() else { return };
    for name in ["qwen3-affine-b4-g64", "llama-mixed-custom"] {
        let (tokens, _) = reference(name, &device);
        let mut model = load(name, DType::F32, &device);
        let whole = model.forward(&tokens, 0).unwrap();
        for len in [1, 3, 16, 39] {
            let pieces = in_pieces(&mut model, &tokens, len);
            let distance = distance(&pieces, &whole);
            assert!(distance.max < 2e-5, "{name} by {len}: {distance:?}");
        }
    }
}

#[test]
fn the_cache_grows_beyond_its_first_allocation() {
    let Some(device) = device() else { return };
    let (tokens, _) = reference("qwen3-affine-b4-g64", &device);
    let long = tokens.repeat((1, 15)).unwrap(); // 600 tokens: it grows twice
    let checkpoint = open("qwen3-affine-b4-g64");
    let vb = VarBuilder::from_checkpoint(&checkpoint, DType::F32, &device);
    // It is made for 512.
    let options = ModelOptions { context: Some(600), ..Default::default() };
    let mut model = Model::with_options(&Config::from_checkpoint(&checkpoint).unwrap(), vb, options).unwrap();
    let whole = model.forward(&long, 0).unwrap();
    let distance = distance(&in_pieces(&mut model, &long, 250), &whole);
    assert!(distance.max < 2e-5, "{distance:?}");
}

#[test]
fn a_batch_gives_the_logits_of_its_texts() {
    let Some(device) = device() else { return };
    let (tokens, _) = reference("llama-untied-mxfp4", &device);
    let mut model = load("llama-untied-mxfp4", DType::F32, &device);
    let texts = [tokens.narrow(1, 0, 20).unwrap(), tokens.narrow(1, 20, 20).unwrap()];
    let alone = texts.each_ref().map(|text| in_pieces(&mut model, text, 20));
    let batch = Tensor::cat(&texts, 0).unwrap();
    for len in [20, 7, 1] {
        let distance = distance(&in_pieces(&mut model, &batch, len), &Tensor::cat(&alone, 0).unwrap());
        assert!(distance.max < 2e-5, "by {len}: {distance:?}");
    }
}

#[test]
fn the_last_token_alone_has_the_last_logits() {
    let Some(device) = device() else { return };
    let (tokens, _) = reference("qwen3-nvfp4", &device);
    let mut model = load("qwen3-nvfp4", DType::F32, &device);
    let whole = model.forward(&tokens, 0).unwrap();
    model.clear_kv_cache();
    let last = model.forward_last(&tokens, 0).unwrap();
    assert_eq!(last.dims(), [1, 256]);
    let distance = distance(&last, &whole.narrow(1, 39, 1).unwrap());
    assert!(distance.max < 2e-5, "{distance:?}");
}

#[test]
fn misuse_is_an_error_and_leaves_a_usable_model() {
    let Some(device) = device() else { return };
    let (tokens, _) = reference("qwen3-mxfp8", &device);
    let mut model = load("qwen3-mxfp8", DType::F32, &device);
    let first = model.forward(&tokens, 0).unwrap();
    let error = model.forward(&tokens, 7).unwrap_err().to_string();
    assert!(error.contains("expected 40") && error.contains("found 7"), "{error}");
    assert_eq!(model.cached_tokens(), 40);
    model.clear_kv_cache();
    let outside = Tensor::new(&[[1u32, 256]], &device).unwrap();
    match model.forward(&outside, 0) {
        Err(_) => assert!(device.is_cpu()),
        // A device's ids are not read back. The token is NaN, and so is all that attention multiplies it with, even by 0.
        Ok(logits) => {
            assert!(!device.is_cpu());
            let logits = logits.to_device(&Device::Cpu).unwrap().flatten_all().unwrap();
            assert!(logits.to_vec1::<f32>().unwrap().iter().all(|x| x.is_nan()));
            model.clear_kv_cache();
        }
    }
    let mut other_batch = || {
        model.forward(&tokens, 0)?;
        model.forward(&Tensor::cat(&[&tokens, &tokens], 0)?, 40)
    };
    assert!(other_batch().is_err());
    assert_eq!(model.cached_tokens(), 0);
    let none = tokens.narrow(1, 0, 0).unwrap();
    assert!(model.forward_last(&none, 0).is_err());
    assert!(model.forward(&none, 0).unwrap_err().to_string().contains("at least one token"));
    assert_eq!(distance(&model.forward(&tokens, 0).unwrap(), &first).max, 0.);
    assert!(Model::load(&open("qwen3-mxfp8"), DType::U32, &device).is_err());
}

#[test]
fn a_tied_head_counts_once_in_the_summary() {
    let Some(device) = device() else { return };
    let tied = load("qwen3-affine-b4-g64", DType::F32, &device).summary();
    let [(format, share)] = tied.formats().collect::<Vec<_>>()[..] else { panic!("{tied}") };
    assert_eq!((format, share.count), ("affine 4-bit g64", 15)); // 7 in each of 2 layers, 1 embedding
    assert_eq!(tied.bits_per_weight(), 4.5);
    let mixed = load("llama-mixed-custom", DType::F32, &device).summary();
    assert_eq!(mixed.formats().map(|(_, share)| share.count).sum::<usize>(), 16);
    assert!(mixed.formats().any(|(format, share)| format == "F32" && share.count == 2));
}

/// A small dense model with random weights.
fn random(changes: serde_json::Value, device: &Device) -> Model {
    let mut config = json!({"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "tie_word_embeddings": true});
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    let varmap = VarMap::new();
    let config = Config::from_json(&config).unwrap();
    let vb = candle_nn::VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    Model::new(&config, VarBuilder::from(vb)).unwrap();
    Model::new(&config, weights_on(device, &varmap)).unwrap()
}

#[test]
fn a_sliding_window_hides_what_is_behind_it() {
    let Some(device) = device() else { return };
    let tokens = Tensor::arange(0u32, 24, &device).unwrap().unsqueeze(0).unwrap();
    // Through two layers a window of 4 reaches 6 tokens back, so the first token can't matter at 7.
    let other =
        Tensor::cat(&[&Tensor::new(&[[63u32]], &device).unwrap(), &tokens.narrow(1, 1, 23).unwrap()], 1)
            .unwrap();
    for len in [24, 5, 1] {
        let mut model = random(json!({"model_type": "mistral", "sliding_window": 4}), &device);
        let logits = in_pieces(&mut model, &tokens, len);
        let changed = in_pieces(&mut model, &other, len);
        let behind = distance(&changed.narrow(1, 7, 17).unwrap(), &logits.narrow(1, 7, 17).unwrap());
        assert_eq!(behind.max, 0., "by {len}");
        let before = distance(&changed.narrow(1, 0, 7).unwrap(), &logits.narrow(1, 0, 7).unwrap());
        assert!(before.max > 1e-3, "by {len}: {before:?}");
        let whole = in_pieces(&mut model, &tokens, 24);
        assert!(distance(&logits, &whole).max < 2e-5, "by {len}");
    }
}

#[test]
fn a_bias_that_the_config_denies_is_an_error() {
    let Some(device) = device() else { return };
    let checkpoint = open("llama-untied-bias-b4-g64-f16");
    let mut config = checkpoint.config().clone();
    config["attention_bias"] = false.into();
    let vb = VarBuilder::from_checkpoint(&checkpoint, DType::F32, &device);
    let error = Model::new(&Config::from_json(&config).unwrap(), vb).unwrap_err().to_string();
    assert!(error.contains("model.layers.0.self_attn.q_proj.bias"), "{error}");
}

#[test]
fn a_model_of_zeros_has_zero_logits() {
    let Some(device) = device() else { return };
    let config = json!({"model_type": "qwen3", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "tie_word_embeddings": true});
    let vb = candle_nn::VarBuilder::zeros(DType::F32, &device);
    let mut model = Model::new(&Config::from_json(&config).unwrap(), VarBuilder::from(vb)).unwrap();
    let logits = model.forward(&Tensor::new(&[[1u32, 2]], &device).unwrap(), 0).unwrap();
    assert_eq!(logits.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap(), 0.);
}
