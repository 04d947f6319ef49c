//! Command R: both blocks see the same, layer norms without biases, neighbours turn together.

use super::base::{attention_bias, flag, read, slide, Defaults};
use crate::fields::Fields;
use crate::norm::NormKind;
use crate::{Config, Names, QkNorm, QkNormOver};
use candle_quant::Result;

fn common(fields: Fields, theta: f64) -> Result<Config> {
    let defaults = Defaults {
        context: 8192,
        eps_key: "layer_norm_eps",
        eps: 1e-5,
        theta,
        interleaved: true,
        ..Defaults::USUAL
    };
    let mut config = read(fields, &defaults)?;
    config.norm = NormKind::Layer { bias: false };
    config.parallel_blocks = true;
    attention_bias(&mut config, fields)?;
    config.logit_scale = fields.positive("logit_scale")?.unwrap_or(0.0625);
    config.names = Names { mlp_norm: None, ..Names::USUAL };
    Ok(config)
}

/// Command R.
pub(super) fn cohere(fields: Fields) -> Result<Config> {
    let mut config = common(fields, 5e5)?;
    if flag(fields, "use_qk_norm")? {
        config.qk_norm =
            Some(QkNorm { kind: config.norm, over: QkNormOver::HeadOfItsOwn, after_rotation: false });
    }
    Ok(config)
}

/// Command R7B and A: windows, and no positions in layers without one.
pub(super) fn cohere2(fields: Fields) -> Result<Config> {
    let mut config = common(fields, 1e4)?;
    slide(&mut config, fields, 4096, fields.size("sliding_window_pattern")?.unwrap_or(4))?;
    config.rotated_layers = config.sliding_layers.clone();
    Ok(config)
}
