//! Large checkpoints of zeros, and a rank without others: enough to load.

use crate::process::write_hole;
use candle_core::{Device, Tensor};
use candle_quant::parallel::{Collective, Rank};
use candle_quant::{Error, Result};
use serde_json::{json, Value};
use std::fs;
use std::path::Path;
use std::sync::Arc;

/// A rank on `device` of several whose others are not there.
pub fn alone(device: &Device, index: usize, world_size: usize) -> Rank {
    Rank::new(device, Arc::new(Alone { index, world_size }))
}

#[derive(Debug)]
struct Alone {
    index: usize,
    world_size: usize,
}

fn nobody<T>() -> Result<T> {
    Err(Error::Unsupported { what: "a collective without other ranks".into(), remedy: "load only".into() })
}

impl Collective for Alone {
    fn index(&self) -> usize {
        self.index
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn all_reduce_sum(&self, _: &Tensor) -> Result<Tensor> {
        nobody()
    }

    fn all_gather(&self, _: &Tensor, _: usize) -> Result<Tensor> {
        nobody()
    }

    fn reduce_scatter(&self, _: &Tensor, _: usize) -> Result<Tensor> {
        nobody()
    }

    fn broadcast(&self, _: &Tensor, _: usize) -> Result<Tensor> {
        nobody()
    }

    fn barrier(&self) -> Result<()> {
        nobody()
    }
}

/// What is common to both models: 4-bit weights in groups of 64, `hidden` elements, 16 query heads on 4 key heads.
fn config(model_type: &str, hidden: usize) -> Value {
    json!({"model_type": model_type, "vocab_size": 32_768, "hidden_size": hidden, "num_hidden_layers": 2,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "tie_word_embeddings": true,
        "quantization": {"bits": 4, "group_size": 64}})
}

pub fn llama() -> Value {
    let mut config = config("llama", 4096);
    config["intermediate_size"] = 16_384.into();
    config
}

pub fn qwen3_moe() -> Value {
    let mut config = config("qwen3_moe", 2048);
    for (name, size) in [
        ("intermediate_size", 4096),
        ("moe_intermediate_size", 1024),
        ("num_experts", 32),
        ("num_experts_per_tok", 2),
    ] {
        config[name] = size.into();
    }
    config
}

/// A checkpoint of zeros.
pub fn write(dir: &Path, config: &Value) {
    let size = |name: &str| config[name].as_u64().unwrap() as usize;
    let (hidden, heads) = (size("hidden_size"), 16 * 128);
    let (mut header, mut end) = (json!({}), 0);
    let mut add = |name: String, dtype: &str, dims: &[usize], bytes: usize| {
        header[name] = json!({"dtype": dtype, "shape": dims, "data_offsets": [end, end + bytes]});
        end += bytes;
    };
    let mut packed = |module: &str, stack: &[usize], n: usize, k: usize| {
        let count = stack.iter().product::<usize>() * n;
        let dims = |last| [stack, &[n, last]].concat();
        add(format!("{module}.weight"), "U32", &dims(k / 8), count * k / 2);
        for part in ["scales", "biases"] {
            add(format!("{module}.{part}"), "BF16", &dims(k / 64), count * k / 32);
        }
    };
    packed("model.embed_tokens", &[], size("vocab_size"), hidden);
    for layer in 0..2 {
        let path = format!("model.layers.{layer}");
        let module = |name: &str| format!("{path}.{name}");
        for (name, n, k) in
            [("q", heads, hidden), ("k", heads / 4, hidden), ("v", heads / 4, hidden), ("o", hidden, heads)]
        {
            packed(&module(&format!("self_attn.{name}_proj")), &[], n, k);
        }
        let (mlp, stack, inner) = match config.get("num_experts") {
            None => ("mlp", vec![], size("intermediate_size")),
            Some(_) => ("mlp.switch_mlp", vec![size("num_experts")], size("moe_intermediate_size")),
        };
        for (name, n, k) in [("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)] {
            packed(&module(&format!("{mlp}.{name}_proj")), &stack, n, k);
        }
        if let [experts] = stack.as_slice() {
            packed(&module("mlp.gate"), &[], *experts, hidden);
        }
    }
    let norms = ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"];
    let of_layers = (0..2).flat_map(|layer| norms.map(|norm| format!("model.layers.{layer}.{norm}.weight")));
    for name in of_layers.chain(["model.norm.weight".to_owned()]) {
        let len = if name.contains("self_attn") { 128 } else { hidden };
        if config["model_type"] != "llama" || !name.contains("self_attn") {
            add(name, "F32", &[len], len * 4);
        }
    }
    let header = header.to_string();
    let head = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    write_hole(&dir.join("model.safetensors"), &head, end);
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
}
