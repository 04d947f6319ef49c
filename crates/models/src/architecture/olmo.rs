//! OLMo.

use super::base::{flag, read, slide, Defaults};
use crate::fields::Fields;
use crate::norm::NormKind;
use crate::rope::Rope;
use crate::{Config, MoeConfig, Names, QkNorm, QkNormOver, Routing};
use candle_quant::nn::Gating;
use candle_quant::Result;

/// The norm of all queries, and of all keys.
const QK_NORM: QkNorm = QkNorm { kind: NormKind::Rms, over: QkNormOver::All, after_rotation: false };

fn biases(config: &mut Config, fields: Fields) -> Result<()> {
    let bias = flag(fields, "attention_bias")?;
    (config.qkv_bias, config.output_bias) = (bias, bias);
    Ok(())
}

/// OLMo: norms without weights; queries, keys and values may be cut.
pub(super) fn olmo(fields: Fields) -> Result<Config> {
    // Its norms take no number from the config.
    let mut config = read(fields, &Defaults { eps_key: "layer_norm_eps", eps: 1e-5, ..Defaults::default() })?;
    biases(&mut config, fields)?;
    config.norm = NormKind::LayerPlain;
    config.qkv_clip = fields.positive("clip_qkv")?;
    Ok(config)
}

/// OLMo 2: norms behind the blocks.
pub(super) fn olmo2(fields: Fields) -> Result<Config> {
    let mut config = read(fields, &Defaults { eps: 1e-5, ..Defaults::default() })?;
    biases(&mut config, fields)?;
    config.qk_norm = Some(QK_NORM);
    config.names = Names {
        attention_norm: None,
        attention_out_norm: Some("post_attention_layernorm"),
        mlp_norm: None,
        mlp_out_norm: Some("post_feedforward_layernorm"),
        ..Names::default()
    };
    Ok(config)
}

/// OLMo 3: windows, in layers whose rope is not scaled.
pub(super) fn olmo3(fields: Fields) -> Result<Config> {
    let mut config = olmo2(fields)?;
    slide(&mut config, fields, 4096, 4)?;
    let defaults = Defaults { theta: 5e5, ..Defaults::default() }.rope(config.head_dim);
    config.rope = Rope::from_fields(fields, Some("full_attention"), &defaults)?;
    config.local_rope = Some(match fields.object("rope_parameters")? {
        Some(parameters) if parameters.has("sliding_attention") => {
            Rope::from_fields(fields, Some("sliding_attention"), &defaults)?
        }
        _ => Rope { theta: config.rope.theta, ..Rope::unscaled(&defaults) },
    });
    Ok(config)
}

/// OLMoE.
pub(super) fn olmoe(fields: Fields) -> Result<Config> {
    let mut config = read(fields, &Defaults { context: 4096, eps: 1e-5, ..Defaults::default() })?;
    biases(&mut config, fields)?;
    config.qk_norm = Some(QK_NORM);
    config.qkv_clip = fields.positive("clip_qkv")?;
    config.moe = Some(MoeConfig {
        experts: fields.required_size("num_experts")?,
        top_k: fields.required_size("num_experts_per_tok")?,
        intermediate_size: config.intermediate_size,
        routing: Routing::softmax(flag(fields, "norm_topk_prob")?),
        bias: false,
        gating: Gating::Plain(config.hidden_act),
        sparse_layers: vec![true; config.num_hidden_layers],
        block_name: "mlp",
        router_name: "gate",
        stack_names: None,
        transposed_parameters: false,
        shared: None,
    });
    Ok(config)
}
