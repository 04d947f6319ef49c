//! Gemma: norms that multiply by one more than their weights, and embeddings that are multiplied.

use super::base::{attention_bias, read, slide, Defaults};
use crate::fields::Fields;
use crate::norm::NormKind;
use crate::rope::Rope;
use crate::{Config, Names, QkNorm, QkNormOver};
use candle_nn::Activation;
use candle_quant::Result;

const DEFAULTS: Defaults = Defaults {
    head_dim: Some(256),
    context: 8192,
    activation_key: "hidden_activation",
    activation: Activation::GeluPytorchTanh,
    ..Defaults::USUAL
};

fn common(fields: Fields, defaults: &Defaults) -> Result<Config> {
    let mut config = read(fields, defaults)?;
    attention_bias(&mut config, fields)?;
    config.norm = NormKind::RmsOnePlus;
    config.embedding_scale = (config.hidden_size as f64).sqrt();
    Ok(config)
}

/// Gemma. Its published configs say `gelu`; it was trained with the approximation by tanh, which all take.
pub(super) fn gemma(fields: Fields) -> Result<Config> {
    let config = common(fields, &DEFAULTS)?;
    for key in ["hidden_act", "hidden_activation"] {
        let value =
            fields.get(key).filter(|value| !matches!(value.as_str(), Some("gelu" | "gelu_pytorch_tanh")));
        if let Some(value) = value {
            return Err(fields.error(key, "gelu or gelu_pytorch_tanh", value));
        }
    }
    Ok(Config { hidden_act: Activation::GeluPytorchTanh, ..config })
}

/// Norms around both blocks.
const SANDWICH: Names = Names {
    attention_out_norm: Some("post_attention_layernorm"),
    mlp_norm: Some("pre_feedforward_layernorm"),
    mlp_out_norm: Some("post_feedforward_layernorm"),
    ..Names::USUAL
};

fn scores(config: &mut Config, fields: Fields) -> Result<()> {
    config.attention_scale = 1. / fields.positive("query_pre_attn_scalar")?.unwrap_or(256.).sqrt();
    config.attention_softcap = fields.positive("attn_logit_softcapping")?;
    config.logit_softcap = fields.positive("final_logit_softcapping")?;
    config.names = SANDWICH;
    fields.ignore(&["hidden_act"]);
    Ok(())
}

/// Gemma 2: ends of scores and logits, windows in every second layer.
pub(super) fn gemma2(fields: Fields) -> Result<Config> {
    let mut config = common(fields, &DEFAULTS)?;
    scores(&mut config, fields)?;
    if !fields.has("attn_logit_softcapping") {
        config.attention_softcap = Some(50.);
    }
    if !fields.has("final_logit_softcapping") {
        config.logit_softcap = Some(30.);
    }
    slide(&mut config, fields, 4096, 2)?;
    Ok(config)
}

/// Gemma 3: normalized queries and keys, and layers with windows turn faster.
pub(super) fn gemma3(fields: Fields) -> Result<Config> {
    let defaults = Defaults { context: 131_072, theta: 1e6, ..DEFAULTS };
    let mut config = common(fields, &defaults)?;
    scores(&mut config, fields)?;
    // transformers has the field, but computes without it.
    if let Some(value) = fields.get("attn_logit_softcapping") {
        return Err(fields.error("attn_logit_softcapping", "nothing in this family", value));
    }
    let kind = config.norm;
    config.qk_norm = Some(QkNorm { kind, over: QkNormOver::Head, after_rotation: false });
    let pattern = match fields.size("sliding_window_pattern")? {
        Some(pattern) => pattern,
        None => fields.size("_sliding_window_pattern")?.unwrap_or(6),
    };
    slide(&mut config, fields, 4096, pattern)?;
    config.rope = Rope::from_fields(fields, Some("full_attention"), &defaults.rope(config.head_dim))?;
    let theta = fields.positive("rope_local_base_freq")?.unwrap_or(1e4);
    let local = Defaults { theta, ..defaults }.rope(config.head_dim);
    // The scaling of older configs is that of layers without a window.
    config.local_rope = Some(match fields.object("rope_parameters")? {
        Some(parameters) if parameters.has("sliding_attention") => {
            Rope::from_fields(fields, Some("sliding_attention"), &local)?
        }
        _ => Rope::unscaled(&local),
    });
    Ok(config)
}
