//! OLMo.

use super::base::{attention_bias, flag, moe, read, slide, Defaults};
use crate::fields::Fields;
use crate::norm::NormKind;
use crate::rope::Rope;
use crate::{Config, MoeConfig, Names, QkNorm, QkNormOver, Routing};
use candle_quant::Result;

/// The norm of all queries, and of all keys.
const QK_NORM: QkNorm = QkNorm { kind: NormKind::Rms, over: QkNormOver::All, after_rotation: false };

/// OLMo: norms without weights; queries, keys and values may be cut.
pub(super) fn olmo(fields: Fields) -> Result<Config> {
    // 1e-5 in transformers, whose configs have no field for it; GGUF files say it.
    let mut config = read(fields, &Defaults { eps_key: "layer_norm_eps", eps: 1e-5, ..Defaults::USUAL })?;
    attention_bias(&mut config, fields)?;
    config.norm = NormKind::LayerPlain;
    config.qkv_clip = fields.positive("clip_qkv")?;
    Ok(config)
}

/// OLMo 2: norms behind the blocks.
pub(super) fn olmo2(fields: Fields) -> Result<Config> {
    let mut config = read(fields, &Defaults { eps: 1e-5, ..Defaults::USUAL })?;
    attention_bias(&mut config, fields)?;
    config.qk_norm = Some(QK_NORM);
    config.names = Names::NORMS_BEHIND;
    Ok(config)
}

/// OLMo 3: windows, in layers whose rope is not scaled.
pub(super) fn olmo3(fields: Fields) -> Result<Config> {
    let mut config = olmo2(fields)?;
    slide(&mut config, fields, 4096, 4)?;
    let defaults = Defaults { theta: 5e5, ..Defaults::USUAL }.rope(config.head_dim);
    config.rope = Rope::from_fields(fields, Some("full_attention"), &defaults)?;
    config.local_rope = Some(match fields.object("rope_parameters")? {
        Some(parameters) if parameters.has("sliding_attention") => {
            Rope::from_fields(fields, Some("sliding_attention"), &defaults)?
        }
        // `rope_theta` is that of the others.
        _ => Rope::unscaled(&defaults),
    });
    Ok(config)
}

/// OLMoE.
pub(super) fn olmoe(fields: Fields) -> Result<Config> {
    let mut config = read(fields, &Defaults { context: 4096, eps: 1e-5, ..Defaults::USUAL })?;
    attention_bias(&mut config, fields)?;
    config.qk_norm = Some(QK_NORM);
    config.qkv_clip = fields.positive("clip_qkv")?;
    let (experts, top_k) =
        (fields.required_size("num_experts")?, fields.size("num_experts_per_tok")?.unwrap_or(8));
    let routing = Routing::softmax(flag(fields, "norm_topk_prob")?);
    config.moe = Some(MoeConfig { routing, ..moe(&config, experts, top_k) });
    Ok(config)
}
