//! GLM 4: half of a head turns.

use super::base::{flag, read, Defaults};
use super::routed::{by_sigmoid, routed, Routed};
use crate::fields::Fields;
use crate::norm::NormKind;
use crate::{Config, Names, QkNorm, QkNormOver};
use candle_quant::Result;

/// GLM 4 (0414 and before): neighbours turn together.
pub(super) fn glm(fields: Fields) -> Result<Config> {
    let defaults = Defaults {
        head_dim: Some(128),
        context: 131_072,
        eps: 1.5625e-7,
        partial: 0.5,
        may_be_partial: true,
        interleaved: true,
        ..Defaults::USUAL
    };
    let mut config = read(fields, &defaults)?;
    config.qkv_bias = fields.flag("attention_bias")?.unwrap_or(true);
    Ok(config)
}

/// GLM 4 of 2025: norms around both blocks.
pub(super) fn glm4(fields: Fields) -> Result<Config> {
    let mut config = glm(fields)?;
    config.names = Names {
        attention_out_norm: Some("post_self_attn_layernorm"),
        mlp_out_norm: Some("post_mlp_layernorm"),
        ..Names::USUAL
    };
    Ok(config)
}

/// GLM 4.5 to 4.7: experts in all but the first layers.
pub(super) fn glm4_moe(fields: Fields) -> Result<Config> {
    let defaults =
        Defaults { context: 131_072, eps: 1e-5, partial: 0.5, may_be_partial: true, ..Defaults::USUAL };
    let mut config = read(fields, &defaults)?;
    config.qkv_bias = flag(fields, "attention_bias")?;
    if flag(fields, "use_qk_norm")? {
        config.qk_norm = Some(QkNorm { kind: NormKind::Rms, over: QkNormOver::Head, after_rotation: false });
    }
    let routing = by_sigmoid(fields, (1, 1), 1.)?;
    let first_sparse = fields.index("first_k_dense_replace")?.unwrap_or(1);
    let shared = fields.index("n_shared_experts")?.unwrap_or(1);
    config.moe = Some(routed(fields, &config, Routed { routing, first_sparse, shared, top_k: Some(8) })?);
    Ok(config)
}
