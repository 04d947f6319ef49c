//! Llama 4, the text part.

use super::base::{attention_bias, layers_of_kind, moe, read, Defaults};
use crate::fields::Fields;
use crate::norm::NormKind;
use crate::{Config, MoeConfig, Names, QkNorm, QkNormOver, Routing, Scores, SharedExpert};
use candle_quant::step::QueryGrowth;
use candle_quant::{Error, Result};
use serde_json::Value;

/// Layers that see chunks and turn, and, each fourth, layers that see all and do not; experts in some.
pub(super) fn llama4(fields: Fields) -> Result<Config> {
    let defaults = Defaults {
        head_dim: Some(128),
        context: 131_072,
        eps: 1e-5,
        theta: 5e5,
        interleaved: true,
        ..Defaults::USUAL
    };
    let mut config = read(fields, &defaults)?;
    let layers = config.num_hidden_layers;
    attention_bias(&mut config, fields)?;
    config.rotated_layers = rotated(fields, layers)?;
    if fields.flag("use_qk_norm")?.unwrap_or(true) {
        let norm = QkNorm { kind: NormKind::RmsPlain, over: QkNormOver::Head, after_rotation: true };
        config.qk_norm = Some(norm);
    }
    // Those that turn, if the config does not say it.
    let chunked = layers_of_kind(fields, layers, "chunked_attention")?;
    config.sliding_layers = chunked.unwrap_or_else(|| config.rotated_layers.clone());
    config.sliding_window = Some(fields.size("attention_chunk_size")?.unwrap_or(8192));
    config.chunked_window = true;
    let beta = fields.positive("attn_scale")?.unwrap_or(0.1);
    let period = fields.size("floor_scale")?.unwrap_or(8192);
    // Published as a number, which counts as Python counts it.
    let tuning = match fields.get("attn_temperature_tuning").and_then(Value::as_f64) {
        Some(number) => number != 0.,
        None => fields.flag("attn_temperature_tuning")?.unwrap_or(true),
    };
    if tuning {
        config.query_growth = Some(QueryGrowth { beta, period, first: 1 });
        config.grows_unturned = true;
    }
    config.names = Names { mlp: "feed_forward", ..Names::USUAL };
    let inner = config.intermediate_size;
    config.intermediate_size = fields.size("intermediate_size_mlp")?.unwrap_or(16_384);
    let (sparse, experts) = (sparse(fields, layers)?, fields.index("num_local_experts")?.unwrap_or(16));
    if sparse.contains(&true) {
        config.moe = Some(MoeConfig {
            intermediate_size: inner,
            routing: Routing { scores: Scores::Sigmoid, weighs_inputs: true, ..Routing::softmax(false) },
            sparse_layers: sparse,
            block_name: "feed_forward",
            router_name: "router",
            shared: Some(SharedExpert {
                intermediate_size: inner,
                block_name: "shared_expert",
                gate_name: None,
            }),
            ..moe(&config, experts, fields.size("num_experts_per_tok")?.unwrap_or(1))
        });
    }
    Ok(config)
}

/// For each layer, whether its queries and keys turn: ones where they do.
fn rotated(fields: Fields, layers: usize) -> Result<Vec<bool>> {
    let stated = fields.indices("no_rope_layers")?;
    let interval = fields.size("no_rope_layer_interval")?.unwrap_or(4);
    Ok(match stated.is_empty() {
        true => (0..layers).map(|layer| !(layer + 1).is_multiple_of(interval)).collect(),
        false => stated.into_iter().map(|flag| flag != 0).collect(),
    })
}

/// For each layer, whether it has experts.
fn sparse(fields: Fields, layers: usize) -> Result<Vec<bool>> {
    if fields.get("moe_layers").is_some() {
        let stated = fields.indices("moe_layers")?;
        if let Some(outside) = stated.iter().find(|layer| **layer >= layers) {
            return Err(Error::mismatch("`moe_layers`", format!("each below {layers}"), outside.to_string()));
        }
        return Ok((0..layers).map(|layer| stated.contains(&layer)).collect());
    }
    let step = fields.size("interleave_moe_layer_step")?.unwrap_or(1);
    Ok((0..layers).map(|layer| (layer + 1).is_multiple_of(step)).collect())
}
