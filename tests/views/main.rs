//! Checkpoints asked for names that they do not have: by candle-transformers' models, by layers, and in vain.

#[path = "../common/checkpoint.rs"]
mod checkpoint;
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/packed.rs"]
mod packed;
#[path = "../common/ranks.rs"]
mod ranks;

mod layers;
mod models;
mod rules;

use candle_core::Tensor;
use std::collections::HashMap;

type Tensors = HashMap<String, Tensor>;

/// The tensors of a model of two layers with fused projections: all parts of a weight joined along the rows.
fn fused(mut tensors: Tensors) -> Tensors {
    for layer in 0..2 {
        for (parts, whole) in [
            (&["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"][..], "self_attn.qkv_proj"),
            (&["mlp.gate_proj", "mlp.up_proj"], "mlp.gate_up_proj"),
        ] {
            for part in ["weight", "scales", "biases", "bias"] {
                let name = |module: &str| format!("model.layers.{layer}.{module}.{part}");
                let parts: Vec<_> = parts.iter().filter_map(|module| tensors.remove(&name(module))).collect();
                if !parts.is_empty() {
                    tensors.insert(name(whole), Tensor::cat(&parts, 0).unwrap());
                }
            }
        }
    }
    tensors
}
