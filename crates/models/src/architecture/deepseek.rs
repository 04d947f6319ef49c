//! DeepSeek 2 and 3: latent attention, and experts in all but the first layers.

use super::base::{attention_bias, flag, read, Defaults};
use super::routed::{by_sigmoid, routed, Routed};
use crate::fields::Fields;
use crate::{Config, ExpertGroups, GroupScore, Latents, Routing};
use candle_quant::{Error, Result};

/// Latents say what heads are; their rope is read again.
const DEFAULTS: Defaults = Defaults { head_dim: Some(2), interleaved: true, ..Defaults::USUAL };

fn latents(fields: Fields, interleaved: bool) -> Result<Config> {
    let mut config = read(fields, &DEFAULTS)?;
    let query_latent = fields.size("q_lora_rank")?;
    let sizes = Latents {
        query_latent,
        latent: fields.required_size("kv_lora_rank")?,
        key_dim: fields.required_size("qk_nope_head_dim")?,
        turning: fields.required_size("qk_rope_head_dim")?,
        value_dim: fields.required_size("v_head_dim")?,
    };
    config.latents = Some(sizes);
    config.head_dim = sizes.key_dim + sizes.turning;
    // Each head has keys of its own.
    config.num_key_value_heads = config.num_attention_heads;
    let rope = Defaults { interleaved, ..DEFAULTS };
    config.rope = crate::Rope::from_fields(fields, None, &rope.rope(sizes.turning))?;
    let stretch = stretch(fields)?;
    config.attention_scale = stretch * stretch / (config.head_dim as f64).sqrt();
    attention_bias(&mut config, fields)?;
    config.mlp_bias = flag(fields, "mlp_bias")?;
    Ok(config)
}

/// By what YaRN's `mscale_all_dim` multiplies queries, and keys.
fn stretch(fields: Fields) -> Result<f64> {
    let scaling = match fields.object("rope_parameters")? {
        Some(parameters) => Some(parameters),
        None => fields.object("rope_scaling")?,
    };
    let Some(scaling) = scaling else { return Ok(1.) };
    let kind = scaling.text("rope_type")?.or(scaling.text("type")?);
    if kind.is_none_or(|kind| kind == "default") {
        return Ok(1.);
    }
    let number = |key: &str| match scaling.get(key) {
        None => Ok(0.),
        Some(value) => value.as_f64().ok_or_else(|| scaling.error(key, "a number", value)),
    };
    let (factor, of_all) = (number("factor")?, number("mscale_all_dim")?);
    Ok(if factor > 1. { 0.1 * of_all * factor.ln() + 1. } else { 1. })
}

/// DeepSeek 2, 2.5 and Coder 2: softmax over all experts.
pub(super) fn deepseek_v2(fields: Fields) -> Result<Config> {
    let mut config = latents(fields, true)?;
    let groups = match fields.text("topk_method")?.unwrap_or("greedy") {
        "greedy" => None,
        "group_limited_greedy" => Some(ExpertGroups {
            count: fields.required_size("n_group")?,
            chosen: fields.required_size("topk_group")?,
            by: GroupScore::Largest,
        }),
        other => {
            return Err(Error::mismatch(
                "`topk_method`",
                "`greedy` or `group_limited_greedy`",
                format!("`{other}`"),
            ))
        }
    };
    let scale = fields.positive("routed_scaling_factor")?.unwrap_or(1.);
    // `norm_topk_prob` has no effect in transformers.
    fields.ignore(&["norm_topk_prob"]);
    let routing = Routing { groups, scale, ..Routing::softmax(false) };
    let first_sparse = fields.index("first_k_dense_replace")?.unwrap_or(0);
    let shared = fields.index("n_shared_experts")?.unwrap_or(2);
    config.moe = Some(routed(fields, &config, Routed { routing, first_sparse, shared, top_k: None })?);
    Ok(config)
}

/// DeepSeek 3 and R1: a sigmoid for each expert, and a correction of the choice.
pub(super) fn deepseek_v3(fields: Fields) -> Result<Config> {
    let mut config = latents(fields, fields.flag("rope_interleave")?.unwrap_or(true))?;
    if let Some(value) = fields.get("scoring_func").filter(|value| value.as_str() != Some("sigmoid")) {
        return Err(fields.error("scoring_func", "`sigmoid`", value));
    }
    let routing = by_sigmoid(fields, (8, 4), 2.5)?;
    let first_sparse = fields.index("first_k_dense_replace")?.unwrap_or(3);
    let shared = fields.index("n_shared_experts")?.unwrap_or(1);
    config.moe = Some(routed(fields, &config, Routed { routing, first_sparse, shared, top_k: Some(8) })?);
    Ok(config)
}
