//! Llama and what differs little from it.

use super::base::{attention_bias, flag, if_unsaid, layer_types, read, yarn, Defaults};
use crate::fields::Fields;
use crate::norm::NormKind;
use crate::{Config, Names, QkNorm, QkNormOver, Rope};
use candle_quant::step::QueryGrowth;
use candle_quant::Result;
use serde_json::Value;

const QK_NORM: QkNorm = QkNorm { kind: NormKind::Rms, over: QkNormOver::Head, after_rotation: false };

/// Llama 2 and 3, SmolLM, Yi, DeepSeek's first models.
pub(super) fn llama(fields: Fields) -> Result<Config> {
    let mut config = read(fields, &Defaults::USUAL)?;
    attention_bias(&mut config, fields)?;
    config.mlp_bias = flag(fields, "mlp_bias")?;
    // Ministral's, in checkpoints that call it llama.
    if let Some(layers) = layer_types(fields, config.num_hidden_layers)? {
        (config.sliding_window, config.sliding_layers) = (fields.size("sliding_window")?, layers);
    }
    Ok(config)
}

/// Mistral: a window in all layers.
pub(super) fn mistral(fields: Fields) -> Result<Config> {
    let mut config = read(fields, &Defaults { context: 131_072, ..Defaults::USUAL })?;
    attention_bias(&mut config, fields)?;
    config.mlp_bias = flag(fields, "mlp_bias")?;
    // An explicit null switches the window off, a missing key does not.
    config.sliding_window = match fields.has("sliding_window") {
        true => fields.size("sliding_window")?,
        false => Some(4096),
    };
    config.sliding_layers = vec![true; config.num_hidden_layers];
    Ok(config)
}

/// Ministral 3: queries grow with their positions.
pub(super) fn ministral3(fields: Fields) -> Result<Config> {
    let defaults = Defaults { head_dim: Some(128), context: 262_144, eps: 1e-5, ..Defaults::USUAL };
    let mut config = read(fields, &defaults)?;
    config.sliding_window = fields.size("sliding_window")?;
    config.sliding_layers = vec![true; config.num_hidden_layers];
    let growth = |(beta, period)| QueryGrowth { beta, period, first: 0 };
    if let Some(rope) = fields.object("rope_parameters")? {
        let beta = rope.positive("llama_4_scaling_beta")?;
        let period = rope.size("original_max_position_embeddings")?;
        config.query_growth = beta.zip(period).map(growth);
    }
    if let Some(scaling) = if_unsaid(fields, yarn(16., 16_384, true, 1.))? {
        config.rope = Rope { theta: 1e6, scaling, ..config.rope };
        config.query_growth = Some(growth((0.1, 16_384)));
    }
    Ok(config)
}

/// SmolLM3: no positions in each fourth layer.
pub(super) fn smollm3(fields: Fields) -> Result<Config> {
    let mut config = read(fields, &Defaults { context: 32_768, theta: 2e6, ..Defaults::USUAL })?;
    attention_bias(&mut config, fields)?;
    config.mlp_bias = flag(fields, "mlp_bias")?;
    let layers = config.num_hidden_layers;
    let interval = fields.size("no_rope_layer_interval")?.unwrap_or(4);
    config.rotated_layers = match fields.has("no_rope_layers") {
        // Ones where there are positions.
        true => {
            let rotated: Vec<_> =
                fields.indices("no_rope_layers")?.into_iter().map(|flag| flag != 0).collect();
            match rotated.is_empty() {
                true => vec![true; layers],
                false => rotated,
            }
        }
        false => (0..layers).map(|layer| !(layer + 1).is_multiple_of(interval)).collect(),
    };
    if flag(fields, "use_sliding_window")? {
        config.sliding_window = fields.size("sliding_window")?;
        let others = || config.rotated_layers.clone();
        config.sliding_layers = layer_types(fields, layers)?.unwrap_or_else(others);
    }
    Ok(config)
}

/// Seed-OSS.
pub(super) fn seed_oss(fields: Fields) -> Result<Config> {
    let defaults = Defaults { head_dim: Some(128), context: 524_288, ..Defaults::USUAL };
    let mut config = read(fields, &defaults)?;
    config.qkv_bias = fields.flag("attention_bias")?.unwrap_or(true);
    config.output_bias = flag(fields, "attention_out_bias")?;
    config.mlp_bias = flag(fields, "mlp_bias")?;
    Ok(config)
}

/// InternLM3, by mlx-lm: transformers has no such model.
pub(super) fn internlm3(fields: Fields) -> Result<Config> {
    let mut config = read(fields, &Defaults { context: 32_768, ..Defaults::USUAL })?;
    let bias = flag(fields, "bias")?;
    config.qkv_bias = flag(fields, "qkv_bias")?;
    (config.output_bias, config.mlp_bias) = (bias, bias);
    Ok(config)
}

/// ERNIE 4.5: neighbours turn together.
pub(super) fn ernie4_5(fields: Fields) -> Result<Config> {
    let defaults = Defaults {
        head_dim: None,
        context: 131_072,
        eps: 1e-5,
        theta: 5e5,
        interleaved: true,
        ..Defaults::USUAL
    };
    let mut config = read(fields, &defaults)?;
    let bias = flag(fields, "use_bias")?;
    (config.qkv_bias, config.output_bias, config.mlp_bias) = (bias, bias, bias);
    Ok(config)
}

/// Helium: neighbours turn together.
pub(super) fn helium(fields: Fields) -> Result<Config> {
    let defaults = Defaults {
        head_dim: Some(128),
        context: 4096,
        eps: 1e-8,
        theta: 1e5,
        interleaved: true,
        ..Defaults::USUAL
    };
    let mut config = read(fields, &defaults)?;
    config.qkv_bias = flag(fields, "attention_bias")?;
    config.mlp_bias = flag(fields, "mlp_bias")?;
    Ok(config)
}

/// Granite: numbers by which embeddings, scores, outputs and logits are multiplied.
pub(super) fn granite(fields: Fields) -> Result<Config> {
    let mut config = read(fields, &Defaults::USUAL)?;
    attention_bias(&mut config, fields)?;
    config.mlp_bias = flag(fields, "mlp_bias")?;
    multipliers(&mut config, fields)?;
    Ok(config)
}

/// Those of Granite.
pub(super) fn multipliers(config: &mut Config, fields: Fields) -> Result<()> {
    config.embedding_scale = fields.positive("embedding_multiplier")?.unwrap_or(1.);
    config.attention_scale = fields.positive("attention_multiplier")?.unwrap_or(1.);
    config.residual_scale = fields.positive("residual_multiplier")?.unwrap_or(1.);
    config.logit_scale = 1. / fields.positive("logits_scaling")?.unwrap_or(1.);
    Ok(())
}

/// Hunyuan: queries and keys are normalized where they stand.
pub(super) fn hunyuan(fields: Fields) -> Result<Config> {
    let mut config = read(fields, &Defaults { eps: 1e-5, ..Defaults::USUAL })?;
    attention_bias(&mut config, fields)?;
    if fields.flag("use_qk_norm")?.unwrap_or(true) {
        config.qk_norm = Some(QkNorm { after_rotation: true, ..QK_NORM });
    }
    config.names = Names { q_norm: "query_layernorm", k_norm: "key_layernorm", ..Names::USUAL };
    Ok(config)
}

/// EXAONE 4: norms behind the blocks; no positions in layers without a window, if others have one.
pub(super) fn exaone4(fields: Fields) -> Result<Config> {
    let mut config = read(fields, &Defaults { eps: 1e-5, ..Defaults::USUAL })?;
    config.qk_norm = Some(QK_NORM);
    // An explicit null switches the window off, a missing key does not.
    let has_window = fields.get("sliding_window").is_some() || !fields.has("sliding_window");
    let stated = layer_types(fields, config.num_hidden_layers)?;
    let by_pattern = pattern_of_exaone(fields, config.num_hidden_layers)?;
    if has_window {
        config.sliding_window = Some(fields.size("sliding_window")?.unwrap_or(4096));
        config.sliding_layers = stated.unwrap_or(by_pattern);
        config.rotated_layers = config.sliding_layers.clone();
    }
    config.names = Names::NORMS_BEHIND;
    Ok(config)
}

/// For each layer, whether it slides: all but each last one of so many, or a string of `L` for those that do and `G`.
fn pattern_of_exaone(fields: Fields, layers: usize) -> Result<Vec<bool>> {
    const KEY: &str = "sliding_window_pattern";
    let Some(value @ Value::String(pattern)) = fields.get(KEY) else {
        let every = fields.size(KEY)?.unwrap_or(4);
        return Ok((1..=layers).map(|number| !number.is_multiple_of(every)).collect());
    };
    if pattern.is_empty() || !pattern.bytes().all(|layer| matches!(layer, b'L' | b'G')) {
        return Err(fields.error(KEY, "a number, or `L` and `G` for some layers", value));
    }
    Ok(pattern.bytes().map(|layer| layer == b'L').cycle().take(layers).collect())
}
