//! Whole models from UQFF files, against unmodified candle-transformers models in dense f32 on the dequantized weights.

use crate::checkpoint::folder_of;
use crate::common::{distance, Distance};
use crate::uqff::{fixture, open};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Module, Tensor};
use candle_quant::checkpoint::{Checkpoint, GgmlKernels, OpenOptions, Weight};
use candle_quant::{linear_no_bias, VarBuilder};
use candle_quant_models::Model;
use candle_transformers::models::{llama, qwen2, qwen3, qwen3_moe};
use std::collections::HashMap;
use std::fs;

/// 48 tokens, all different.
fn tokens() -> Tensor {
    let ids: Vec<u32> = (0..48).map(|i| i * 37 % 320).collect();
    Tensor::new(ids, &Device::Cpu).unwrap().unsqueeze(0).unwrap()
}

/// All tensors dequantized to f32, stacks of experts taken apart, as candle-transformers has them.
fn dequantized(checkpoint: &Checkpoint) -> candle_nn::VarBuilder<'static> {
    let mut tensors = HashMap::new();
    for name in checkpoint.tensor_names() {
        let tensor = crate::uqff::dequantized(checkpoint, name).unwrap();
        match name.split_once(".experts.") {
            Some((block, projection)) => {
                for expert in 0..tensor.dim(0).unwrap() {
                    let name = format!("{block}.experts.{expert}.{projection}");
                    tensors.insert(name, tensor.get(expert).unwrap());
                }
            }
            None => drop(tensors.insert(name.to_owned(), tensor)),
        }
    }
    candle_nn::VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu)
}

/// The logits of the candle-transformers model that the config names, on dequantized weights.
fn dense_logits(checkpoint: &Checkpoint) -> Tensor {
    let vb = dequantized(checkpoint);
    let mut config = checkpoint.config().clone();
    // candle asks for a number here, which it does not use as `use_sliding_window` is false.
    config["sliding_window"] = 512.into();
    let step: &mut dyn FnMut(&Tensor, usize) -> candle_core::Result<Tensor> =
        match config["model_type"].as_str() {
            Some("qwen2") => {
                let config: qwen2::Config = serde_json::from_value(config.clone()).unwrap();
                let mut model = qwen2::ModelForCausalLM::new(&config, vb).unwrap();
                &mut move |token, offset| model.forward(token, offset)
            }
            Some("qwen3") => {
                let config: qwen3::Config = serde_json::from_value(config.clone()).unwrap();
                let mut model = qwen3::ModelForCausalLM::new(&config, vb).unwrap();
                &mut move |token, offset| model.forward(token, offset)
            }
            Some("qwen3_moe") => {
                let config: qwen3_moe::Config = serde_json::from_value(config.clone()).unwrap();
                let mut model = qwen3_moe::ModelForCausalLM::new(&config, vb).unwrap();
                &mut move |token, offset| model.forward(token, offset)
            }
            Some("llama") => {
                let config: llama::LlamaConfig = serde_json::from_value(config.clone()).unwrap();
                let config = config.into_config(false);
                let mut cache = llama::Cache::new(true, DType::F32, &config, &Device::Cpu).unwrap();
                let model = llama::Llama::load(vb, &config).unwrap();
                &mut move |token, offset| model.forward(token, offset, &mut cache)?.unsqueeze(1)
            }
            other => panic!("{other:?}"),
        };
    let tokens = tokens();
    let logits: Vec<_> = (0..tokens.dim(1).unwrap())
        .map(|offset| step(&tokens.narrow(1, offset, 1).unwrap(), offset).unwrap())
        .collect();
    Tensor::cat(&logits, 1).unwrap()
}

/// Our logits for all tokens at once, and one by one, against the dense ones.
fn distances(checkpoint: &Checkpoint) -> [Distance; 2] {
    let expected = dense_logits(checkpoint);
    let mut model = Model::load(checkpoint, DType::F32, &Device::Cpu).unwrap();
    let tokens = tokens();
    let whole = model.forward(&tokens, 0).unwrap();
    model.clear_kv_cache();
    let steps: Vec<_> = (0..tokens.dim(1).unwrap())
        .map(|offset| model.forward(&tokens.narrow(1, offset, 1).unwrap(), offset).unwrap())
        .collect();
    [whole, Tensor::cat(&steps, 1).unwrap()].map(|logits| distance(&logits, &expected))
}

#[test]
fn logits_are_those_of_the_decoded_weights() {
    for name in [
        "afq4",
        "afq8",
        "f8q8",
        "fp8",
        "frommlx6",
        "hqq4",
        "moe_afq4",
        "mxfp4",
        "q4k",
        "q8_0",
        "v090_q4k",
        "odd_afq4",
        "qwen2_afq4",
        "v0816_afq4",
    ] {
        for distance in distances(&open(name)) {
            assert!(distance.max <= 3e-4 && distance.other_argmax == 0, "{name}: {distance:?}");
        }
    }
}

/// If it is asked to, candle multiplies with GGML blocks after rounding the activations to 8 bits, in groups of 32 or 256 whose
/// largest magnitude becomes 127. Of 256 roughly normal activations that is 3 standard deviations, a step of 0.024
/// and a rounding error of 0.024 / sqrt(12) = 0.007, and so much is each product off. Eight more products lie
/// before the head, and errors add up in quadrature: 0.007 * sqrt(9) = 0.021. Measured are 0.023 and 0.024; the
/// largest of 15,360 is 4.5 times that.
#[test]
fn logits_of_ggml_weights_are_off_by_the_rounding_of_activations() {
    for name in ["q4k", "q8_0", "v090_q4k"] {
        for distance in distances(&open_for_candle(name)) {
            assert!(distance.rms >= 0.005, "{name}: candle did not compute this");
            assert!(distance.rms <= 0.035 && distance.max <= 0.2, "{name}: {distance:?}");
        }
    }
    // Other roundings of the weights would not be taken for these.
    let [four, eight] = ["q4k", "q8_0"].map(|name| dense_logits(&open(name)));
    let distance = distance(&four, &eight);
    assert!(distance.rms > 0.1, "{distance:?}");
}

/// The rounding is all that differs: with activations rounded beforehand, as candle rounds them, the dense product
/// is the same.
#[test]
fn a_ggml_product_is_that_of_rounded_activations() {
    let mut types = 0;
    for (name, n, k) in [("q4k", 256, 256), ("q8_0", 256, 256), ("v090_q4k", 256, 256)] {
        let checkpoint = open_for_candle(name);
        check_product(&checkpoint, "model.layers.0.mlp.up_proj", n, k);
        types += 1;
    }
    let checkpoint = open_for_candle("families");
    for module in checkpoint.modules().iter().filter(|module| module.starts_with("ggml.q")) {
        if matches!(checkpoint.weight(module, None).unwrap(), Weight::Ggml(_)) {
            check_product(&checkpoint, module, 3, 256);
            types += 1;
        }
    }
    assert_eq!(types, 3 + 12);
}

/// The fixture, its GGML blocks multiplied by candle.
fn open_for_candle(name: &str) -> Checkpoint {
    let options = OpenOptions { ggml: GgmlKernels::Candle, ..OpenOptions::default() };
    Checkpoint::open_with(fixture(name), options).unwrap()
}

fn check_product(checkpoint: &Checkpoint, module: &str, n: usize, k: usize) {
    let vb = VarBuilder::from_checkpoint(checkpoint, DType::F32, &Device::Cpu);
    let layer = linear_no_bias(k, n, vb.pp(module)).unwrap();
    let x = crate::packed::tensor(&[5, k], 1);
    let Weight::Ggml(weight) = checkpoint.weight(module, Some(k)).unwrap() else { panic!("{module}") };
    let dense = weight.load(&Device::Cpu).unwrap().dequantize(&Device::Cpu).unwrap();
    let found = layer.forward(&x).unwrap();
    // In groups of 32, or of 256, which candle prefers where the processor and the shape allow it.
    let distances = [GgmlDType::Q8_0, GgmlDType::Q8_1, GgmlDType::Q8K].map(|rounding| {
        let rounded = QTensor::quantize(&x, rounding).unwrap().dequantize(&Device::Cpu).unwrap();
        distance(&found, &rounded.matmul(&dense.t().unwrap()).unwrap()).max
    });
    let exact = distance(&found, &x.matmul(&dense.t().unwrap()).unwrap());
    // Beside Q4_1 and Q5_1 goes the sum of a group of activations, an F16.
    let bound = if matches!(weight.dtype(), GgmlDType::Q4_1 | GgmlDType::Q5_1) { 5e-4 } else { 1e-5 };
    assert!(distances.iter().any(|max| *max <= bound), "{module} {:?}: {distances:?}", weight.dtype());
    assert!(exact.rms <= 0.03, "{module} {:?}: {exact:?}", weight.dtype());
}

/// A copy of a fixture with `tie_word_embeddings` in the config or without it, perhaps without the head.
fn tied(name: &str, config_says: Option<bool>) -> tempfile::TempDir {
    let mut config = open(name).config().clone();
    match config_says {
        Some(tied) => config["tie_word_embeddings"] = tied.into(),
        None => drop(config.as_object_mut().unwrap().remove("tie_word_embeddings")),
    }
    let dir = folder_of(&[("config.json", config.to_string().as_bytes())]);
    for entry in fs::read_dir(fixture(name)).unwrap() {
        let name = entry.as_ref().unwrap().file_name();
        if name != "config.json" {
            fs::copy(entry.unwrap().path(), dir.path().join(name)).unwrap();
        }
    }
    dir
}

fn logits(checkpoint: &Checkpoint) -> Tensor {
    Model::load(checkpoint, DType::F32, &Device::Cpu).unwrap().forward(&tokens(), 0).unwrap()
}

/// Version 1.1 stores the head of a tied model quantized, beside the dense embedding. A config that says nothing
/// leaves it to the file, which has a head.
#[test]
fn the_head_is_there_or_tied() {
    let stored = logits(&open("v0816_afq4"));
    let silent = tied("v0816_afq4", None);
    let silent = Checkpoint::open(silent.path()).unwrap();
    assert_eq!(distance(&logits(&silent), &stored).max, 0.);
    let said = tied("v0816_afq4", Some(true));
    let said = Checkpoint::open(said.path()).unwrap();
    let [whole, steps] = distances(&said);
    assert!(whole.max <= 3e-4 && steps.max <= 3e-4, "{whole:?} {steps:?}");
    let distance = distance(&logits(&said), &stored);
    assert!(distance.rms > 0.1, "another head: {distance:?}");
}

/// Version 1.2 of a tied model has the embedding alone, quantized.
#[test]
fn a_quantized_embedding_is_a_head_too() {
    for config_says in [None, Some(true)] {
        let dir = tied("mxfp4", config_says);
        rename_head(&dir.path().join("mxfp4-0.uqff"));
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        assert!(!checkpoint.contains("lm_head.weight"));
        let model = Model::load(&checkpoint, DType::F32, &Device::Cpu).unwrap();
        let formats: Vec<_> =
            model.summary().formats().map(|(name, share)| (name.to_owned(), share.count)).collect();
        assert_eq!(formats, [("mxfp4".to_owned(), 8)]);
    }
    let dir = tied("mxfp4", Some(false));
    rename_head(&dir.path().join("mxfp4-0.uqff"));
    let error = Model::load(&Checkpoint::open(dir.path()).unwrap(), DType::F32, &Device::Cpu).unwrap_err();
    assert!(error.to_string().contains("`lm_head.weight`"), "{error}");
}

/// Takes the head out of the model by giving it a name that no model asks for, of the same length.
fn rename_head(path: &std::path::Path) {
    let mut bytes = fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = String::from_utf8(bytes[8..8 + length].to_vec()).unwrap();
    let renamed = header.replace("\"lm_head.", "\"no_head.");
    assert_ne!(renamed, header);
    bytes[8..8 + length].copy_from_slice(renamed.as_bytes());
    fs::write(path, bytes).unwrap();
}
