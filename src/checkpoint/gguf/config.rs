//! The `config.json` that a GGUF file's metadata stands for.

use super::metadata::{Metadata, Value as Stored};
use crate::{Error, Result};
use serde_json::{json, Value};

/// What the metadata does not say and the tensors do.
pub(super) struct Tensors<'a> {
    /// Rows of the embedding.
    pub vocab_size: Option<usize>,
    pub has_head: bool,
    /// Biases of the first layer's query and of its gate projection.
    pub attention_bias: bool,
    pub mlp_bias: bool,
    /// The divisors of the rotary embedding's frequencies, if the file has them.
    pub rope_freqs: Option<&'a [f32]>,
}

/// The model type that the architecture is called outside of GGUF; `None` if its tensors are not known here.
pub(super) fn model_type(metadata: &Metadata) -> Result<Option<&'static str>> {
    let Some(architecture) = metadata.text("general.architecture")? else {
        return Ok(None);
    };
    let has = |key: &str| Ok::<_, Error>(metadata.size(&format!("{architecture}.{key}"))?.unwrap_or(0) > 0);
    Ok(Some(match architecture {
        "llama" if has("expert_count")? => "mixtral",
        // Mistral models are called llama, too; the window is what tells them apart.
        "llama" if has("attention.sliding_window")? => "mistral",
        "llama" => "llama",
        "qwen2" => "qwen2",
        "qwen3" => "qwen3",
        "qwen3moe" => "qwen3_moe",
        "gpt-oss" | "gptoss" => "gpt_oss",
        _ => return Ok(None),
    }))
}

/// The config of a model of this type.
pub(super) fn config(metadata: &Metadata, model_type: &str, tensors: &Tensors) -> Result<Value> {
    let of = |key: &str| format!("{}.{key}", architecture(metadata));
    let size = |key: &str| metadata.size(&of(key));
    let (heads, hidden) = (metadata.required_size(&of("attention.head_count"))?, size("embedding_length")?);
    let head_dim = match (size("attention.key_length")?, hidden) {
        (Some(head_dim), _) => Some(head_dim),
        (None, Some(hidden)) => hidden.checked_div(heads),
        (None, None) => None,
    };
    if let (Some(keys), Some(values)) = (head_dim, size("attention.value_length")?) {
        if keys != values {
            return Err(Error::Unsupported {
                what: format!("{}: keys of {keys} and values of {values} elements", metadata.path.display()),
                remedy: "use a model whose keys and values are of one length".into(),
            });
        }
    }
    let mut config = json!({
        "model_type": model_type,
        "vocab_size": tensors.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": size("feed_forward_length")?,
        "num_hidden_layers": size("block_count")?,
        "num_attention_heads": heads,
        "num_key_value_heads": size("attention.head_count_kv")?.unwrap_or(heads),
        "head_dim": head_dim,
        "max_position_embeddings": size("context_length")?,
        "rms_norm_eps": metadata.number(&of("attention.layer_norm_rms_epsilon"))?,
        "rope_theta": metadata.number(&of("rope.freq_base"))?,
        "rope_scaling": rope_scaling(metadata, tensors.rope_freqs, head_dim)?,
        "attention_bias": tensors.attention_bias,
        "mlp_bias": tensors.mlp_bias,
        "hidden_act": "silu",
        "tie_word_embeddings": !tensors.has_head,
        "sliding_window": size("attention.sliding_window")?.filter(|window| *window > 0),
        "bos_token_id": metadata.size("tokenizer.ggml.bos_token_id")?,
        "eos_token_id": stop_tokens(metadata)?,
    });
    let rotated = size("rope.dimension_count")?;
    if let (Some(rotated), Some(head_dim)) = (rotated, head_dim.filter(|head_dim| rotated != Some(*head_dim)))
    {
        config["partial_rotary_factor"] = json!(f64::from(rotated) / f64::from(head_dim));
    }
    for (key, name) in [
        ("expert_count", "num_experts"),
        ("expert_count", "num_local_experts"),
        ("expert_used_count", "num_experts_per_tok"),
        ("expert_feed_forward_length", "moe_intermediate_size"),
    ] {
        if let Some(number) = size(key)?.filter(|number| *number > 0) {
            config[name] = json!(number);
        }
    }
    match model_type {
        // What the file does not say, all models of these types have in common.
        "qwen3_moe" => config["norm_topk_prob"] = json!(true),
        "gpt_oss" if config["rope_scaling"].is_object() => config["rope_scaling"]["truncate"] = json!(false),
        _ => {}
    }
    Ok(config)
}

/// The prefix of the keys that belong to the model; there is one if there is a model type.
pub(super) fn architecture(metadata: &Metadata) -> &str {
    match metadata.get("general.architecture") {
        Some(Stored::Text(architecture)) => architecture,
        _ => "",
    }
}

/// More tokens than this do not end a text.
const MAX_STOP_TOKENS: usize = 1024;

/// Tokens that end a text or a turn.
fn stop_tokens(metadata: &Metadata) -> Result<Value> {
    let mut ids = Vec::new();
    for key in ["eos_token_id", "eot_token_id", "eom_token_id"] {
        ids.extend(metadata.size(&format!("tokenizer.ggml.{key}"))?.map(i128::from));
    }
    const SEVERAL: &str = "tokenizer.ggml.eos_token_ids";
    if let Some(Stored::Array(array)) = metadata.get(SEVERAL) {
        if array.len > MAX_STOP_TOKENS {
            return Err(metadata.wrong(SEVERAL, "a few ids"));
        }
        ids.extend(array.integers().into_iter().flatten());
    }
    let mut unique: Vec<u32> = Vec::new();
    for id in ids.into_iter().filter_map(|id| u32::try_from(id).ok()) {
        if !unique.contains(&id) {
            unique.push(id);
        }
    }
    Ok(match unique.as_slice() {
        [] => Value::Null,
        [one] => json!(one),
        several => json!(several),
    })
}

fn rope_scaling(metadata: &Metadata, rope_freqs: Option<&[f32]>, head_dim: Option<u32>) -> Result<Value> {
    let of = |key: &str| format!("{}.rope.{key}", architecture(metadata));
    let original = metadata.size(&of("scaling.original_context_length"))?;
    let factor = match metadata.number(&of("scaling.factor"))? {
        Some(factor) => Some(factor),
        None => metadata.number(&of("scale_linear"))?,
    };
    let kind = metadata.text(&of("scaling.type"))?;
    let kind = kind.unwrap_or(if factor.is_some_and(|factor| factor != 1.) { "linear" } else { "none" });
    match (rope_freqs, kind) {
        (Some(divisors), "none") => {
            let theta = metadata.number(&of("freq_base"))?.unwrap_or(10_000.);
            llama3(metadata, divisors, theta, original.unwrap_or(8192), head_dim)
        }
        (None, "none") => Ok(Value::Null),
        (None, "linear") => Ok(json!({"rope_type": "linear", "factor": factor})),
        (None, other) => Ok(json!({
            "rope_type": other, "factor": factor, "original_max_position_embeddings": original,
        })),
        (Some(_), other) => Err(unsupported(metadata, &format!("beside rope scaling `{other}`"))),
    }
}

/// The llama 3 scaling that has these divisors. The file has the divisors only; the parameters behind them are
/// the same in all models but for the factor, which is the largest divisor.
fn llama3(
    metadata: &Metadata,
    divisors: &[f32],
    theta: f64,
    original: u32,
    head_dim: Option<u32>,
) -> Result<Value> {
    const LOW: f64 = 1.;
    const HIGH: f64 = 4.;
    let factor = f64::from(divisors.iter().copied().fold(1f32, f32::max));
    let pairs = head_dim.map(|head_dim| head_dim / 2);
    let expected = |pair: usize| {
        let frequency = theta.powf(-(pair as f64) / divisors.len() as f64);
        let turns = f64::from(original) * frequency / std::f64::consts::TAU;
        let keep = ((turns - LOW) / (HIGH - LOW)).clamp(0., 1.);
        1. / (keep + (1. - keep) / factor)
    };
    let close = |(pair, &divisor): (usize, &f32)| (f64::from(divisor) / expected(pair) - 1.).abs() < 1e-4;
    if u32::try_from(divisors.len()).ok() != pairs || !divisors.iter().enumerate().all(close) {
        return Err(unsupported(metadata, "that are not those of llama 3's scaling"));
    }
    if divisors.iter().all(|divisor| *divisor == 1.) {
        return Ok(Value::Null);
    }
    Ok(json!({
        "rope_type": "llama3", "factor": factor, "low_freq_factor": LOW, "high_freq_factor": HIGH,
        "original_max_position_embeddings": original,
    }))
}

fn unsupported(metadata: &Metadata, what: &str) -> Error {
    Error::Unsupported {
        what: format!("{}: `rope_freqs.weight` with divisors {what}", metadata.path.display()),
        remedy: "use a model with default, linear or llama3 scaling".into(),
    }
}
