//! Writes the trained model as a Hugging Face checkpoint.

use crate::model::Config;
use anyhow::{anyhow, Context, Result};
use candle_core::{DType, Tensor};
use candle_nn::VarMap;
use serde_json::{json, Value};
use std::collections::HashMap;
use std::path::Path;

/// `config.json` as transformers, mlx-lm and candle-transformers read it.
fn config_json(cfg: &Config, end: u32) -> Value {
    json!({
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.intermediate_size,
        "num_hidden_layers": cfg.num_hidden_layers,
        "num_attention_heads": cfg.num_attention_heads,
        "num_key_value_heads": cfg.num_key_value_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": cfg.rms_norm_eps,
        "rope_theta": cfg.rope_theta,
        "rope_scaling": null,
        "max_position_embeddings": cfg.max_position_embeddings,
        "attention_bias": false,
        "attention_dropout": 0.0,
        "sliding_window": null,
        "use_sliding_window": false,
        "max_window_layers": cfg.num_hidden_layers,
        "tie_word_embeddings": true,
        "initializer_range": 0.02,
        "use_cache": true,
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": "bfloat16",
    })
}

/// Writes the two config files and `model.safetensors` in bf16.
pub fn save_bf16(cfg: &Config, vars: &VarMap, end: u32, folder: &Path) -> Result<()> {
    let generation = json!({
        "bos_token_id": end,
        "eos_token_id": end,
        "do_sample": true,
        "temperature": 0.8,
        "top_p": 0.95,
    });
    write_json(&folder.join("generation_config.json"), &generation)?;
    write_json(&folder.join("config.json"), &config_json(cfg, end))?;
    let data = vars.data().lock().map_err(|_| anyhow!("poisoned lock"))?;
    let tensors = data
        .iter()
        .map(|(name, var)| Ok((name.clone(), var.as_detached_tensor().to_dtype(DType::BF16)?)))
        .collect::<Result<_>>()?;
    save_tensors(&tensors, "pt", folder)
}

/// Writes `model.safetensors` with the `format` entry that transformers (`pt`) and mlx-lm (`mlx`) expect.
pub fn save_tensors(tensors: &HashMap<String, Tensor>, format: &str, folder: &Path) -> Result<()> {
    let path = folder.join("model.safetensors");
    let metadata = HashMap::from([("format".to_string(), format.to_string())]);
    safetensors::serialize_to_file(tensors, Some(metadata), &path)
        .with_context(|| format!("writing {}", path.display()))
}

pub fn write_json(path: &Path, value: &Value) -> Result<()> {
    let text = serde_json::to_string_pretty(value)? + "\n";
    std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}
