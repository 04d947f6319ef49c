//! Families whose every layer has experts, or nearly every one.

use super::base::{attention_bias, if_unsaid, layer_types, moe, read, yarn, Defaults};
use super::llama::multipliers;
use super::routed::shared_experts;
use crate::fields::Fields;
use crate::{Config, Correction, MoeConfig, Routing};
use candle_quant::nn::Gating;
use candle_quant::Result;

/// The experts of Mixtral and others.
fn local_experts(fields: Fields, config: &Config) -> Result<MoeConfig> {
    let top_k = fields.size("num_experts_per_tok")?.unwrap_or(2);
    Ok(moe(config, fields.required_size("num_local_experts")?, top_k))
}

/// Mixtral.
pub(super) fn mixtral(fields: Fields) -> Result<Config> {
    let defaults = Defaults { context: 131_072, eps: 1e-5, theta: 1e6, ..Defaults::USUAL };
    let mut config = read(fields, &defaults)?;
    attention_bias(&mut config, fields)?;
    config.sliding_window = fields.size("sliding_window")?;
    config.sliding_layers = vec![true; config.num_hidden_layers];
    config.moe = Some(MoeConfig { block_name: "block_sparse_moe", ..local_experts(fields, &config)? });
    Ok(config)
}

/// gpt-oss: biases, clamped gates, attention sinks, windows in every second layer.
pub(super) fn gpt_oss(fields: Fields) -> Result<Config> {
    let defaults =
        Defaults { head_dim: Some(64), context: 131_072, eps: 1e-5, theta: 150_000., ..Defaults::USUAL };
    let mut config = read(fields, &defaults)?;
    let scores = 0.1 * 32f64.ln() + 1.;
    if let Some(scaling) = if_unsaid(fields, yarn(32., 4096, false, scores))? {
        config.rope.scaling = scaling;
    }
    let bias = fields.flag("attention_bias")?.unwrap_or(true);
    (config.qkv_bias, config.output_bias) = (bias, bias);
    config.attention_sinks = true;
    config.sliding_window = Some(fields.size("sliding_window")?.unwrap_or(128));
    let alternating = || (0..config.num_hidden_layers).map(|layer| layer % 2 == 0).collect();
    config.sliding_layers = layer_types(fields, config.num_hidden_layers)?.unwrap_or_else(alternating);
    let top_k = match fields.size("num_experts_per_tok")? {
        Some(top_k) => top_k,
        None => fields.size("experts_per_token")?.unwrap_or(4),
    };
    config.moe = Some(MoeConfig {
        bias: true,
        gating: Gating::Clamped {
            alpha: fields.positive("swiglu_alpha")?.unwrap_or(1.702),
            limit: fields.positive("swiglu_limit")?.unwrap_or(7.),
        },
        router_name: "router",
        ..moe(&config, fields.required_size("num_local_experts")?, top_k)
    });
    Ok(config)
}

/// Granite with experts: gate and up projections of all are one stack.
pub(super) fn granitemoe(fields: Fields) -> Result<Config> {
    let mut config = read(fields, &Defaults::USUAL)?;
    attention_bias(&mut config, fields)?;
    multipliers(&mut config, fields)?;
    config.moe = Some(MoeConfig {
        block_name: "block_sparse_moe",
        router_name: "router.layer",
        stack_names: Some(["input_linear", "output_linear"]),
        ..local_experts(fields, &config)?
    });
    Ok(config)
}

/// ERNIE 4.5 with experts: the choice is corrected.
pub(super) fn ernie4_5_moe(fields: Fields) -> Result<Config> {
    let mut config = super::llama::ernie4_5(fields)?;
    let layers = config.num_hidden_layers;
    let first = fields.index("moe_layer_start_index")?.unwrap_or(1);
    // -1 is the last.
    let last = match fields.get("moe_layer_end_index").and_then(serde_json::Value::as_i64) {
        Some(-1) => layers.saturating_sub(1),
        _ => fields.index("moe_layer_end_index")?.unwrap_or(layers.saturating_sub(1)),
    };
    let step = fields.size("moe_layer_interval")?.unwrap_or(1);
    let inner = fields.size("moe_intermediate_size")?.unwrap_or(1536);
    let shared = fields.index("moe_num_shared_experts")?.unwrap_or(2);
    // mlx-lm drops it.
    let path = "moe_statics.e_score_correction_bias";
    let correction = Correction { path, is_row: true, is_optional: true };
    let sparse = |layer: usize| (layer + 1).is_multiple_of(step) && (first..=last).contains(&layer);
    let top_k = fields.size("moe_k")?.or(fields.size("num_experts_per_tok")?).unwrap_or(6);
    config.moe = Some(MoeConfig {
        intermediate_size: inner,
        routing: Routing { correction: Some(correction), ..Routing::softmax(true) },
        sparse_layers: (0..layers).map(sparse).collect(),
        shared: shared_experts(inner, shared),
        ..moe(&config, fields.size("moe_num_experts")?.unwrap_or(64), top_k)
    });
    Ok(config)
}
