//! Models of every family, and texts for them.

use crate::common::open;
use crate::packed::{numbers, tensor};
use candle_core::{DType, Device, Tensor};
use candle_quant::nn::LoraConfig;
use candle_quant::{Checkpoint, VarBuilder};
use candle_quant_models::train::{add_adapter, Sequence, Variable};
use candle_quant_models::{Config, Model};
use serde_json::json;
use std::collections::HashMap;

/// Norms of queries and keys, biases, experts, sinks with windows, and linear attention, in several formats.
pub const FAMILIES: [&str; 8] = [
    "llama-untied-bias-b4-g64-f16",
    "llama-untied-mxfp4",
    "qwen3-nvfp4",
    "qwen3moe-affine-b4-g64",
    "gptoss-mxfp4-hf",
    "mistral, window",
    "mixtral",
    "qwen3_next",
];

pub fn load(name: &str) -> Model {
    match name {
        "mistral, window" => random(json!({"model_type": "mistral", "sliding_window": 6})),
        "mixtral" => {
            random(json!({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}))
        }
        "qwen3_next" => {
            let fixture = "tests/fixtures/families/qwen3_next/mlx-affine4";
            let path = std::path::Path::new(env!("CANDLE_QUANT_REPOSITORY")).join(fixture);
            Model::load(&Checkpoint::open(path).unwrap(), DType::F32, &Device::Cpu).unwrap()
        }
        fixture => Model::load(&open(fixture), DType::F32, &Device::Cpu).unwrap(),
    }
}

/// A small dense model with random weights.
fn random(changes: serde_json::Value) -> Model {
    let mut config = json!({"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": true});
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    let config = Config::from_json(&config).unwrap();
    let mut weights = HashMap::new();
    let mut add = |name: String, dims: &[usize]| {
        let values = tensor(dims, weights.len() as u64 + 1);
        let weight = if dims.len() == 1 { (values * 0.1).unwrap() + 1. } else { values * 0.15 };
        weights.insert(format!("model.{name}.weight"), weight.unwrap());
    };
    add("embed_tokens".into(), &[256, 64]);
    add("norm".into(), &[64]);
    for layer in 0..2 {
        let mut add = |name: &str, dims: &[usize]| add(format!("layers.{layer}.{name}"), dims);
        add("input_layernorm", &[64]);
        add("post_attention_layernorm", &[64]);
        for (name, n) in [("q", 64), ("k", 32), ("v", 32), ("o", 64)] {
            add(&format!("self_attn.{name}_proj"), &[n, 64]);
        }
        match &config.moe {
            None => {
                for (name, dims) in [("gate", [96, 64]), ("up", [96, 64]), ("down", [64, 96])] {
                    add(&format!("mlp.{name}_proj"), &dims);
                }
            }
            Some(moe) => {
                add("block_sparse_moe.gate", &[moe.experts, 64]);
                for expert in 0..moe.experts {
                    for (name, dims) in [("w1", [96, 64]), ("w3", [96, 64]), ("w2", [64, 96])] {
                        add(&format!("block_sparse_moe.experts.{expert}.{name}"), &dims);
                    }
                }
            }
        }
    }
    let vb = candle_nn::VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu);
    Model::new(&config, vb.into()).unwrap()
}

/// The model on its weights as dense tensors.
pub fn decoded(checkpoint: &Checkpoint) -> Model {
    let mut tensors: HashMap<String, Tensor> = HashMap::new();
    for module in checkpoint.modules() {
        if let Ok(weight) = checkpoint.weight(&module, None) {
            tensors.insert(format!("{module}.weight"), weight.to_dense(DType::F32, &Device::Cpu).unwrap());
        }
        if let Ok(bias) = checkpoint.dense(&format!("{module}.bias")) {
            tensors.insert(format!("{module}.bias"), bias.load(DType::F32, &Device::Cpu).unwrap());
        }
    }
    for name in checkpoint.tensor_names().filter(|name| name.ends_with("norm.weight")) {
        tensors
            .insert(name.to_owned(), checkpoint.dense(name).unwrap().load(DType::F32, &Device::Cpu).unwrap());
    }
    let vb = candle_nn::VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
    Model::new(&Config::from_checkpoint(checkpoint).unwrap(), VarBuilder::from(vb)).unwrap()
}

pub fn lora(rank: usize) -> LoraConfig {
    LoraConfig { rank, alpha: 2. * rank as f64, rs_lora: false, dora: false }
}

/// Adapters in all linear layers, B with numbers.
pub fn with_adapters(model: &Model) -> Vec<Variable> {
    let variables = add_adapter(model, "test", &lora(3), &["all-linear"], 6).unwrap();
    for (seed, variable) in variables.iter().enumerate() {
        let noise = (tensor(variable.var.dims(), seed as u64) * 0.05).unwrap();
        variable.var.set(&(variable.var.as_tensor() + noise).unwrap()).unwrap();
    }
    variables
}

/// `count` texts of several lengths up to `len`, of few words, so that there is something to learn.
pub fn texts(count: usize, len: usize) -> Vec<Sequence> {
    let text = |index: usize| {
        let tokens =
            numbers(len - index % 4, index as u64 + 9).into_iter().map(|x| 40 + (x.abs() * 20.) as u32);
        let (tokens, first) = (tokens.collect::<Vec<_>>(), index % 3);
        Sequence::with_prompt(&tokens[..first], &tokens[first..])
    };
    (0..count).map(text).collect()
}

/// The texts side by side `[B, T]`, padded.
pub fn ids(texts: &[Sequence]) -> Tensor {
    let len = texts.iter().map(|text| text.tokens().len()).max().unwrap();
    let padded =
        texts.iter().flat_map(|text| text.tokens().iter().copied().chain(std::iter::repeat(7)).take(len));
    Tensor::from_iter(padded, &Device::Cpu).unwrap().reshape((texts.len(), len)).unwrap()
}
