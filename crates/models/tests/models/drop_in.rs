//! Unmodified candle-transformers models against ours: on a decoded and a packed checkpoint, and, for
//! the families without one, on the same random weights.

use crate::common::{distance, open, reference};
use crate::device;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::VarMap;
use candle_quant::VarBuilder;
use candle_quant_models::{Config, Model};
use candle_transformers::models::{llama, mistral, mixtral, qwen2, qwen3};
use serde_json::json;

/// candle's config from the checkpoint's, which leaves out what mlx-lm takes for granted.
fn candle_config(config: &serde_json::Value) -> qwen3::Config {
    let mut config = config.clone();
    for (key, value) in [
        ("attention_bias", false.into()),
        ("use_sliding_window", false.into()),
        ("max_window_layers", 2.into()),
        ("hidden_act", "silu".into()),
    ] {
        config[key] = value;
    }
    serde_json::from_value(config).unwrap()
}

#[test]
fn candle_transformers_qwen3_is_the_oracle() {
    let Some(device) = device() else { return };
    for name in ["qwen3-affine-b4-g64-sharded", "qwen3-affine-b3-g64", "qwen3-nvfp4", "qwen3-mxfp8"] {
        let checkpoint = open(name);
        let vb = VarBuilder::from_checkpoint(&checkpoint, DType::F32, &Device::Cpu);
        let config = candle_config(checkpoint.config());
        let mut oracle = qwen3::ModelForCausalLM::new(&config, vb.dense()).unwrap();
        let mut ours = Model::load(&checkpoint, DType::F32, &device).unwrap();

        let (tokens, _) = reference(name);
        let (mut expected, mut found) = (vec![], vec![]);
        for offset in 0..tokens.dim(1).unwrap() {
            let token = tokens.narrow(1, offset, 1).unwrap();
            expected.push(oracle.forward(&token, offset).unwrap());
            found.push(ours.forward(&token.to_device(&device).unwrap(), offset).unwrap());
        }
        let distance = distance(&Tensor::cat(&found, 1).unwrap(), &Tensor::cat(&expected, 1).unwrap());
        assert!(distance.max <= 3e-4 && distance.other_argmax == 0, "{name}: {distance:?}");
    }
}

/// Feeds tokens one by one to ours and to an oracle on the same random weights, whole to ours too.
fn agree(
    device: &Device,
    config: serde_json::Value,
    varmap: &VarMap,
    mut oracle: impl FnMut(&Tensor, usize) -> candle_core::Result<Tensor>,
) {
    let config = Config::from_json(&config).unwrap();
    let mut ours = Model::new(&config, weights_on(device, varmap)).unwrap();
    let tokens = Tensor::arange(0u32, 60, device).unwrap().unsqueeze(0).unwrap();
    let whole = ours.forward(&tokens, 0).unwrap();
    ours.clear_kv_cache();
    for offset in 0..60 {
        let token = tokens.narrow(1, offset, 1).unwrap();
        let expected = oracle(&token.to_device(&Device::Cpu).unwrap(), offset).unwrap();
        for found in [ours.forward(&token, offset).unwrap(), whole.narrow(1, offset, 1).unwrap()] {
            let distance = distance(&found, &expected);
            assert!(distance.max < 1e-4 && distance.other_argmax == 0, "at {offset}: {distance:?}");
        }
    }
}

/// The weights that a model made, on a device.
pub fn weights_on(device: &Device, varmap: &VarMap) -> VarBuilder<'static> {
    let there = |(name, weight): (&String, &Var)| (name.clone(), weight.to_device(device).unwrap());
    let weights = varmap.data().lock().unwrap().iter().map(there).collect();
    candle_nn::VarBuilder::from_tensors(weights, DType::F32, device).into()
}

fn random_weights(varmap: &VarMap) -> candle_nn::VarBuilder<'static> {
    candle_nn::VarBuilder::from_varmap(varmap, DType::F32, &Device::Cpu)
}

fn small(changes: serde_json::Value) -> serde_json::Value {
    let mut config = json!({"vocab_size": 64, "hidden_size": 128, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "max_position_embeddings": 128, "hidden_act": "silu"});
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

#[test]
fn llama_with_llama3_rope_agrees_with_candle_transformers() {
    let Some(device) = device() else { return };
    // A short original context, so that kept, stretched and blended frequencies all occur.
    let config = small(json!({"model_type": "llama", "tie_word_embeddings": false, "rope_scaling":
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64}}));
    let varmap = VarMap::new();
    let candles: llama::LlamaConfig = serde_json::from_value(config.clone()).unwrap();
    let candles = candles.into_config(false);
    let oracle = llama::Llama::load(random_weights(&varmap), &candles).unwrap();
    let mut cache = llama::Cache::new(true, DType::F32, &candles, &Device::Cpu).unwrap();
    agree(&device, config, &varmap, |token, offset| oracle.forward(token, offset, &mut cache));
}

#[test]
fn qwen2_with_biases_agrees_with_candle_transformers() {
    let Some(device) = device() else { return };
    let config = small(json!({"model_type": "qwen2", "tie_word_embeddings": true, "sliding_window": 128,
        "max_window_layers": 2, "use_sliding_window": false}));
    let varmap = VarMap::new();
    let candles: qwen2::Config = serde_json::from_value(config.clone()).unwrap();
    let mut oracle = qwen2::ModelForCausalLM::new(&candles, random_weights(&varmap)).unwrap();
    assert!(varmap.data().lock().unwrap().contains_key("model.layers.0.self_attn.q_proj.bias"));
    agree(&device, config, &varmap, |token, offset| oracle.forward(token, offset));
}

#[test]
fn mistral_agrees_with_candle_transformers() {
    let Some(device) = device() else { return };
    let config = small(json!({"model_type": "mistral", "tie_word_embeddings": false,
        "sliding_window": null, "head_dim": 48}));
    let varmap = VarMap::new();
    let mut candles: serde_json::Value = config.clone();
    candles["use_flash_attn"] = false.into();
    let candles: mistral::Config = serde_json::from_value(candles).unwrap();
    let mut oracle = mistral::Model::new(&candles, random_weights(&varmap)).unwrap();
    agree(&device, config, &varmap, |token, offset| oracle.forward(token, offset));
}

#[test]
fn mixtral_agrees_with_candle_transformers() {
    let Some(device) = device() else { return };
    let config = small(json!({"model_type": "mixtral", "tie_word_embeddings": false, "sliding_window": 4096,
        "num_experts_per_tok": 2, "num_local_experts": 4}));
    let varmap = VarMap::new();
    let mut candles: serde_json::Value = config.clone();
    candles["use_flash_attn"] = false.into();
    let candles: mixtral::Config = serde_json::from_value(candles).unwrap();
    let mut oracle = mixtral::Model::new(&candles, random_weights(&varmap)).unwrap();
    agree(&device, config, &varmap, |token, offset| oracle.forward(token, offset));
}
