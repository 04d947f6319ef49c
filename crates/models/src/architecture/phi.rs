//! Phi, and others with layer norms.

use super::base::{attention_bias, flag, read, Defaults};
use crate::fields::Fields;
use crate::norm::NormKind;
use crate::{Config, Names, QkNorm, QkNormOver};
use candle_nn::Activation;
use candle_quant::Result;

const LAYER_NORM: Defaults = Defaults { eps_key: "layer_norm_eps", eps: 1e-5, ..Defaults::USUAL };

/// Phi 1 and 2: both blocks see the same, half of a head turns, all layers have biases, and there is no gate.
pub(super) fn phi(fields: Fields) -> Result<Config> {
    let defaults =
        Defaults { partial: 0.5, may_be_partial: true, activation: Activation::NewGelu, ..LAYER_NORM };
    let mut config = read(fields, &defaults)?;
    config.norm = NormKind::Layer { bias: true };
    (config.qkv_bias, config.output_bias) = (true, true);
    (config.mlp_bias, config.head_bias) = (true, true);
    config.parallel_blocks = true;
    if flag(fields, "qk_layernorm")? {
        config.qk_norm = Some(QkNorm { kind: config.norm, over: QkNormOver::Head, after_rotation: false });
    }
    config.names = Names {
        final_norm: "final_layernorm",
        mlp_norm: None,
        o_proj: "dense",
        q_norm: "q_layernorm",
        k_norm: "k_layernorm",
        gate_proj: None,
        up_proj: "fc1",
        down_proj: "fc2",
        ..Names::USUAL
    };
    Ok(config)
}

/// Phi 3 and 4: fused projections, perhaps LongRoPE.
pub(super) fn phi3(fields: Fields) -> Result<Config> {
    let mut config = read(
        fields,
        &Defaults { context: 4096, original: Some(4096), may_be_partial: true, eps: 1e-5, ..Defaults::USUAL },
    )?;
    config.sliding_window = fields.size("sliding_window")?;
    config.sliding_layers = vec![true; config.num_hidden_layers];
    Ok(config)
}

/// StableLM: a quarter of a head turns.
pub(super) fn stablelm(fields: Fields) -> Result<Config> {
    let mut config =
        read(fields, &Defaults { context: 4096, partial: 0.25, may_be_partial: true, ..LAYER_NORM })?;
    config.norm = NormKind::Layer { bias: true };
    config.qkv_bias = flag(fields, "use_qkv_bias")?;
    if flag(fields, "qk_layernorm")? {
        let kind = NormKind::Layer { bias: false };
        config.qk_norm = Some(QkNorm { kind, over: QkNormOver::HeadOfItsOwn, after_rotation: false });
    }
    config.parallel_blocks = flag(fields, "use_parallel_residual")?;
    config.names = Names { q_norm: "q_layernorm", k_norm: "k_layernorm", ..Names::USUAL };
    if config.parallel_blocks {
        config.names.mlp_norm = None;
    }
    Ok(config)
}

/// StarCoder2: no gate.
pub(super) fn starcoder2(fields: Fields) -> Result<Config> {
    let defaults = Defaults {
        context: 4096,
        eps_key: "norm_epsilon",
        activation: Activation::GeluPytorchTanh,
        ..LAYER_NORM
    };
    let mut config = read(fields, &defaults)?;
    config.norm = NormKind::Layer { bias: true };
    let bias = fields.flag("use_bias")?.unwrap_or(true);
    (config.qkv_bias, config.output_bias, config.mlp_bias) = (bias, bias, bias);
    config.sliding_window = fields.size("sliding_window")?;
    config.sliding_layers = vec![true; config.num_hidden_layers];
    config.names = Names { gate_proj: None, up_proj: "c_fc", down_proj: "c_proj", ..Names::USUAL };
    Ok(config)
}

/// Nemotron and Minitron: the square of ReLU, and no gate.
pub(super) fn nemotron(fields: Fields) -> Result<Config> {
    let defaults = Defaults {
        context: 4096,
        eps_key: "norm_eps",
        partial: 0.5,
        may_be_partial: true,
        activation: Activation::Relu2,
        ..LAYER_NORM
    };
    let mut config = read(fields, &defaults)?;
    config.norm = NormKind::LayerOnePlus;
    attention_bias(&mut config, fields)?;
    config.mlp_bias = flag(fields, "mlp_bias")?;
    config.names.gate_proj = None;
    Ok(config)
}
