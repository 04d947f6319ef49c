//! Qwen 2 and 3, with and without experts.

use super::base::{attention_bias, flag, layer_types, moe, read, Defaults};
use crate::fields::Fields;
use crate::norm::NormKind;
use crate::{Config, MoeConfig, QkNorm, QkNormOver, Routing, SharedExpert};
use candle_quant::Result;
use std::collections::BTreeSet;

/// Qwen2 and Qwen2.5: biased queries, keys and values.
pub(super) fn qwen2(fields: Fields) -> Result<Config> {
    let mut config = read(fields, &Defaults { context: 32_768, ..Defaults::USUAL })?;
    windows(&mut config, fields)?;
    config.qkv_bias = true;
    // Known in some configs, of no effect.
    fields.ignore(&["attention_bias", "qkv_bias"]);
    config.mlp_bias = flag(fields, "mlp_bias")?;
    Ok(config)
}

/// Qwen2 with experts, and one that all tokens use.
pub(super) fn qwen2_moe(fields: Fields) -> Result<Config> {
    let mut config = read(fields, &Defaults { context: 32_768, ..Defaults::USUAL })?;
    windows(&mut config, fields)?;
    config.qkv_bias = fields.flag("qkv_bias")?.unwrap_or(true);
    fields.ignore(&["attention_bias"]);
    config.moe = Some(MoeConfig { shared: Some(shared_expert(fields)?), ..experts(fields, &config, 4)? });
    Ok(config)
}

/// Qwen3: normalized queries and keys.
pub(super) fn qwen3(fields: Fields) -> Result<Config> {
    with_norms_of_heads(fields, Some(128))
}

fn with_norms_of_heads(fields: Fields, head_dim: Option<usize>) -> Result<Config> {
    let mut config = read(fields, &Defaults { head_dim, context: 32_768, ..Defaults::USUAL })?;
    windows(&mut config, fields)?;
    attention_bias(&mut config, fields)?;
    config.mlp_bias = flag(fields, "mlp_bias")?;
    config.qk_norm = Some(QkNorm { kind: NormKind::Rms, over: QkNormOver::Head, after_rotation: false });
    Ok(config)
}

/// Qwen3 with experts.
pub(super) fn qwen3_moe(fields: Fields) -> Result<Config> {
    let config = with_norms_of_heads(fields, None)?;
    Ok(Config { moe: Some(experts(fields, &config, 8)?), ..config })
}

fn windows(config: &mut Config, fields: Fields) -> Result<()> {
    let (window, first) = (fields.get("sliding_window"), fields.index("max_window_layers")?.unwrap_or(28));
    let types = layer_types(fields, config.num_hidden_layers)?;
    if flag(fields, "use_sliding_window")? {
        let size = window.map(|_| fields.size("sliding_window")).transpose()?.flatten();
        config.sliding_window = Some(size.unwrap_or(4096));
        let behind = || (0..config.num_hidden_layers).map(|layer| layer >= first).collect();
        config.sliding_layers = types.unwrap_or_else(behind);
    }
    Ok(())
}

/// The expert that all tokens use, as much as its gate says.
pub(super) fn shared_expert(fields: Fields) -> Result<SharedExpert> {
    Ok(SharedExpert {
        intermediate_size: fields.required_size("shared_expert_intermediate_size")?,
        block_name: "shared_expert",
        gate_name: Some("shared_expert_gate"),
    })
}

/// `top_k` is how many of them a token uses, if the config does not say it.
pub(super) fn experts(fields: Fields, config: &Config, top_k: usize) -> Result<MoeConfig> {
    let step = fields.size("decoder_sparse_step")?.unwrap_or(1);
    let dense: BTreeSet<usize> = fields.indices("mlp_only_layers")?.into_iter().collect();
    let sparse = |layer: usize| !dense.contains(&layer) && (layer + 1).is_multiple_of(step);
    let count = match fields.size("num_experts")? {
        Some(count) => count,
        None => fields
            .required_size("num_local_experts")
            .map_err(|_| candle_quant::Error::mismatch("`num_experts`", "an integer", "nothing"))?,
    };
    Ok(MoeConfig {
        intermediate_size: fields.required_size("moe_intermediate_size")?,
        routing: Routing::softmax(flag(fields, "norm_topk_prob")?),
        sparse_layers: (0..config.num_hidden_layers).map(sparse).collect(),
        ..moe(config, count, fields.size("num_experts_per_tok")?.unwrap_or(top_k))
    })
}
