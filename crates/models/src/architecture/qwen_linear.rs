//! Qwen3-Next and Qwen 3.5: layers of linear attention, and among them some of attention with gates.

use super::base::{attention_bias, layers_of_kind, read, Defaults};
use super::qwen::{experts, shared_expert};
use crate::fields::Fields;
use crate::norm::NormKind;
use crate::{Config, LinearAttentionConfig, MoeConfig, QkNorm, QkNormOver, Routing};
use candle_nn::Activation;
use candle_quant::Result;

const DEFAULTS: Defaults =
    Defaults { head_dim: Some(256), context: 32_768, partial: 0.25, may_be_partial: true, ..Defaults::USUAL };

/// Qwen3-Next: experts in every layer, and one that all tokens use.
pub(super) fn qwen3_next(fields: Fields) -> Result<Config> {
    let mut config = common(fields, &DEFAULTS, true)?;
    let is_normalized = fields.flag("norm_topk_prob")?.unwrap_or(true);
    let moe = MoeConfig { routing: Routing::softmax(is_normalized), ..experts(fields, &config, 10)? };
    config.moe = Some(MoeConfig { shared: Some(shared_expert(fields)?), ..moe });
    Ok(config)
}

/// The text part of Qwen 3.5.
pub(super) fn qwen3_5(fields: Fields) -> Result<Config> {
    common(fields, &DEFAULTS, false)
}

/// That with experts, in all layers.
pub(super) fn qwen3_5_moe(fields: Fields) -> Result<Config> {
    let defaults = Defaults { inner_key: "moe_intermediate_size", ..DEFAULTS };
    let mut config = common(fields, &defaults, false)?;
    // Those of other families are no fields of this one.
    let sparse_layers = vec![true; config.num_hidden_layers];
    let moe = MoeConfig { routing: Routing::softmax(true), sparse_layers, ..experts(fields, &config, 8)? };
    config.moe = Some(MoeConfig { shared: Some(shared_expert(fields)?), ..moe });
    Ok(config)
}

fn common(fields: Fields, defaults: &Defaults, is_grouped: bool) -> Result<Config> {
    let mut config = read(fields, defaults)?;
    // Gates and convolutions of linear attention go by it, too.
    if let (true, Some(value)) = (config.hidden_act != Activation::Silu, fields.get("hidden_act")) {
        return Err(fields.error("hidden_act", "silu", value));
    }
    attention_bias(&mut config, fields)?;
    config.attention_gate = fields.flag("attn_output_gate")?.unwrap_or(true);
    config.norm = NormKind::RmsOnePlus;
    config.qk_norm = Some(QkNorm { kind: config.norm, over: QkNormOver::Head, after_rotation: false });
    config.linear = Some(LinearAttentionConfig {
        layers: linear_layers(fields, config.num_hidden_layers)?,
        key_heads: fields.size("linear_num_key_heads")?.unwrap_or(16),
        value_heads: fields.size("linear_num_value_heads")?.unwrap_or(32),
        key_dim: fields.size("linear_key_head_dim")?.unwrap_or(128),
        value_dim: fields.size("linear_value_head_dim")?.unwrap_or(128),
        kernel: fields.size("linear_conv_kernel_dim")?.unwrap_or(4),
        is_grouped,
        channels_last: false,
        tiled_output: fields.flag("linear_out_proj_is_tiled")?.unwrap_or(false),
    });
    Ok(config)
}

/// By `layer_types`, or all but each last one of `full_attention_interval`.
fn linear_layers(fields: Fields, layers: usize) -> Result<Vec<bool>> {
    let interval = fields.size("full_attention_interval")?.unwrap_or(4);
    let by_interval = || (1..=layers).map(|number| !number.is_multiple_of(interval)).collect();
    Ok(layers_of_kind(fields, layers, "linear_attention")?.unwrap_or_else(by_interval))
}
