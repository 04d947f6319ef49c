//! Layers of this crate on names that a checkpoint does not have: packed, in parts, with the biases that are there.

use crate::common::{fixture, open, reference};
use crate::packed::{bits, refused};
use crate::ranks::{check, written};
use candle_core::{DType, Device, Module, Tensor};
use candle_quant::nn::{experts, ExpertsConfig, Gating};
use candle_quant::{linear, Activation, Checkpoint, VarBuilder};
use candle_quant_models::Model;
use serde_json::json;
use std::collections::HashMap;
use tempfile::TempDir;

const BIASES: &str = "llama-untied-bias-b4-g64-f16";

/// A fixture with fused projections.
fn fused(name: &str) -> (TempDir, Checkpoint) {
    let path = fixture(name).join("model.safetensors");
    let tensors = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
    written(&crate::fused(tensors), open(name).config())
}

fn builder(checkpoint: &Checkpoint) -> VarBuilder<'static> {
    VarBuilder::from_checkpoint(checkpoint, DType::F32, &Device::Cpu)
}

#[test]
fn weights_stay_packed() {
    let (_dir, fused) = fused(BIASES);
    let stored = open(BIASES);
    let x = crate::packed::tensor(&[3, 128], 1);
    for (name, n) in [("self_attn.k_proj", 64), ("self_attn.qkv_proj", 256), ("mlp.up_proj", 256)] {
        let path = format!("model.layers.1.{name}");
        let [a, b] = [&stored, &fused].map(|checkpoint| {
            let vb = builder(checkpoint).pp(&path);
            let weight = vb.weight(n, 128, candle_nn::init::ZERO).unwrap();
            assert_eq!(weight.quantized().unwrap().format().to_string(), "affine 4-bit g64", "{path}");
            linear(128, n, vb).unwrap().forward(&x).unwrap()
        });
        assert_eq!(bits(&a), bits(&b), "{path}");
    }
    let error =
        refused(builder(&fused).pp("model.layers.1.self_attn.q_proj").weight(64, 128, candle_nn::init::ZERO));
    for part in ["model.safetensors", "`model.layers.1.self_attn.q_proj.weight`", "[64, 128]", "[128, 128]"] {
        assert!(error.contains(part), "no {part:?} in: {error}");
    }
}

/// A model that needs biases finds them, and one that must have none is refused where they are.
#[test]
fn biases_are_not_lost() {
    let (_dir, fused) = fused(BIASES);
    let vb = builder(&fused).pp("model.layers.0");
    for (bias, expected) in [
        ("self_attn.q_proj", true),
        ("self_attn.qkv_proj", true),
        ("mlp.up_proj", true),
        ("input_layernorm", false),
    ] {
        assert_eq!(vb.contains_tensor(&format!("{bias}.bias")), expected, "{bias}");
        assert_eq!(vb.dense().contains_tensor(&format!("{bias}.bias")), expected, "{bias}");
    }
    // Weights are those that are stored: models choose among layouts by them.
    assert!(
        !vb.contains_tensor("self_attn.q_proj.weight") && vb.contains_tensor("self_attn.qkv_proj.weight")
    );

    let mut config = fused.config().clone();
    for key in ["attention_bias", "mlp_bias"] {
        config[key] = false.into();
    }
    std::fs::write(fused.path().join("config.json"), config.to_string()).unwrap();
    let error = refused(
        Model::load(&Checkpoint::open(fused.path()).unwrap(), DType::F32, &Device::Cpu).map_err(Into::into),
    );
    assert!(error.contains("self_attn.q_proj.bias`: expected no such tensor"), "{error}");
}

/// A model on fused projections computes the bits of one on their parts, and ranks do the same as one.
#[test]
fn models_and_their_ranks() {
    for name in [BIASES, "qwen3-mxfp8"] {
        let (_dir, fused) = fused(name);
        let tokens = reference(name).0;
        let logits = check(name, &fused, &tokens);
        let alone =
            crate::ranks::logits(&mut Model::load(&open(name), DType::F32, &Device::Cpu).unwrap(), &tokens);
        assert_eq!(bits(&logits), bits(&alone.unwrap()), "{name}");
    }
}

/// Stacks that are parameters, as transformers writes them, not modules: gate rows first.
#[test]
fn stacks_that_are_parameters() {
    let stack = |dims: &[usize], seed| (crate::packed::tensor(dims, seed) * 0.2).unwrap();
    let (gate_up, down) = (stack(&[3, 96, 64], 1), stack(&[3, 64, 48], 2));
    let parameters = HashMap::from([
        ("mlp.experts.gate_up_proj".to_owned(), gate_up.clone()),
        ("mlp.experts.down_proj".to_owned(), down.clone()),
    ]);
    let mut single = HashMap::new();
    for expert in 0..3 {
        let gate_up = gate_up.get(expert).unwrap();
        for (name, weight) in [
            ("gate_proj", gate_up.narrow(0, 0, 48).unwrap()),
            ("up_proj", gate_up.narrow(0, 48, 48).unwrap()),
            ("down_proj", down.get(expert).unwrap()),
        ] {
            single.insert(format!("mlp.experts.{expert}.{name}.weight"), weight.contiguous().unwrap());
        }
    }
    let config = json!({"hidden_size": 64, "model_type": "qwen3_moe"});
    let sizes = ExpertsConfig {
        experts: 3,
        hidden_size: 64,
        intermediate_size: 48,
        bias: false,
        gating: Gating::Plain(Activation::Silu),
    };
    let x = crate::packed::tensor(&[1, 5, 64], 3);
    let ids = Tensor::new(&[[[0u32], [1], [2], [2], [0]]], &Device::Cpu).unwrap();
    let routing_weights = Tensor::ones((1, 5, 1), DType::F32, &Device::Cpu).unwrap();
    let [a, b] = [&parameters, &single].map(|tensors| {
        let (_dir, checkpoint) = written(tensors, &config);
        let vb = builder(&checkpoint);
        for expert in 0..3 {
            for (name, dims) in [("gate_proj", (48, 64)), ("up_proj", (48, 64)), ("down_proj", (64, 48))] {
                let path = format!("mlp.experts.{expert}.{name}.weight");
                assert_eq!(bits(&vb.get(dims, &path).unwrap()), bits(&single[&path]), "{path}");
            }
        }
        experts(&sizes, vb.pp("mlp")).unwrap().forward(&x, &ids, &routing_weights).unwrap()
    });
    assert_eq!(bits(&a), bits(&b));
}
