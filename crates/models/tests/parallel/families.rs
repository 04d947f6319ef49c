//! Every family of models in every format, over 1, 2, 3, 4 and 8 ranks: the logits are those of one.

use crate::packed::tensor;
use crate::ranks::{check, written};
use candle_core::{Device, Tensor};
use candle_quant::{Checkpoint, QuantFormat, QuantTensor};
use serde_json::{json, Value};
use std::collections::HashMap;
use tempfile::TempDir;

const HIDDEN: usize = 128;
const INNER: usize = 256;
const EXPERTS: usize = 8;
/// 8 ranks have 12 or 13 tokens each, 3 have 34 or 33.
const VOCABULARY: usize = 100;

fn formats() -> Vec<QuantFormat> {
    let affine = [(1, 64), (2, 64), (3, 32), (4, 64), (5, 32), (6, 128), (8, 32)];
    let affine = affine.map(|(bits, group_size)| QuantFormat::affine(bits, group_size).unwrap());
    [&affine[..], &[QuantFormat::MXFP4, QuantFormat::NVFP4, QuantFormat::MXFP8]].concat()
}

/// As mlx-lm writes it.
fn quantization(format: QuantFormat) -> Value {
    let mode = match format {
        QuantFormat::MXFP4 => "mxfp4",
        QuantFormat::NVFP4 => "nvfp4",
        QuantFormat::MXFP8 => "mxfp8",
        _ => "affine",
    };
    json!({"group_size": format.group_size(), "bits": format.bits(), "mode": mode})
}

/// One layer with 8 query heads on 4 key heads: 8 ranks share the latter.
fn model(family: &str, format: QuantFormat) -> (TempDir, Checkpoint) {
    let mut config = json!({"model_type": family, "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 16, "tie_word_embeddings": false, "sliding_window": 6, "quantization": quantization(format)});
    if matches!(family, "mixtral" | "qwen3_moe" | "gpt_oss") {
        let experts = json!({"num_experts": EXPERTS, "num_local_experts": EXPERTS, "num_experts_per_tok": 2,
            "moe_intermediate_size": INNER});
        config.as_object_mut().unwrap().extend(experts.as_object().unwrap().clone());
    }
    let mut tensors = HashMap::new();
    let mut add = |name: String, value: Tensor| drop(tensors.insert(name, value));
    let mut seed = 0;
    let mut random = |dims: &[usize]| {
        seed += 1;
        (tensor(dims, seed) * 0.1).unwrap()
    };
    for norm in ["layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"] {
        add(format!("model.{norm}.weight"), (random(&[HIDDEN]) + 1.).unwrap());
    }
    let mut packed = |name: &str, dims: &[usize], bias: bool| {
        let weight = QuantTensor::quantize(&random(dims), format).unwrap();
        add(format!("{name}.weight"), weight.packed().clone());
        add(format!("{name}.scales"), weight.scales().clone());
        if let Some(biases) = weight.biases() {
            add(format!("{name}.biases"), biases.clone());
        }
        if bias {
            add(format!("{name}.bias"), random(&dims[..dims.len() - 1]));
        }
    };
    packed("model.embed_tokens", &[VOCABULARY, HIDDEN], false);
    packed("lm_head", &[VOCABULARY, HIDDEN], false);
    let gpt_oss = family == "gpt_oss";
    for (name, dims, bias) in [
        ("q", [8 * 16, HIDDEN], gpt_oss || family == "qwen2"),
        ("k", [4 * 16, HIDDEN], gpt_oss || family == "qwen2"),
        ("v", [4 * 16, HIDDEN], gpt_oss || family == "qwen2"),
        ("o", [HIDDEN, 8 * 16], gpt_oss),
    ] {
        packed(&format!("model.layers.0.self_attn.{name}_proj"), &dims, bias);
    }
    let (block, stack, router) = match family {
        "mixtral" => ("block_sparse_moe.switch_mlp", &[EXPERTS][..], Some("block_sparse_moe.gate")),
        "qwen3_moe" => ("mlp.switch_mlp", &[EXPERTS][..], Some("mlp.gate")),
        "gpt_oss" => ("mlp.experts", &[EXPERTS][..], Some("mlp.router")),
        _ => ("mlp", &[][..], None),
    };
    for (name, n, k) in [("gate", INNER, HIDDEN), ("up", INNER, HIDDEN), ("down", HIDDEN, INNER)] {
        packed(&format!("model.layers.0.{block}.{name}_proj"), &[stack, &[n, k]].concat(), gpt_oss);
    }
    if let Some(router) = router {
        packed(&format!("model.layers.0.{router}"), &[EXPERTS, HIDDEN], gpt_oss);
    }
    if family.starts_with("qwen3") {
        for norm in ["q_norm", "k_norm"] {
            add(format!("model.layers.0.self_attn.{norm}.weight"), (random(&[16]) + 1.).unwrap());
        }
    }
    if gpt_oss {
        add("model.layers.0.self_attn.sinks".into(), random(&[8]));
    }
    written(&tensors, &config)
}

fn check_family(family: &str) {
    let tokens: Vec<u32> = (0..14).map(|i| (i * 37 + 5) % VOCABULARY as u32).collect();
    let tokens = Tensor::new(tokens, &Device::Cpu).unwrap().unsqueeze(0).unwrap();
    for format in formats() {
        let (_dir, checkpoint) = model(family, format);
        check(&format!("{family} {format}"), &checkpoint, &tokens);
    }
}

macro_rules! families {
    ($($family:ident)*) => {
        $(#[test]
        fn $family() {
            check_family(stringify!($family));
        })*
    };
}

families!(llama mistral qwen2 qwen3 mixtral qwen3_moe gpt_oss);
