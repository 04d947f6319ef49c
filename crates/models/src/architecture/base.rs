//! What the configs of all families say alike.

use crate::fields::Fields;
use crate::norm::NormKind;
use crate::rope::{Rope, RopeDefaults, RopeScaling};
use crate::{Config, MoeConfig, Names, Routing};
use candle_nn::Activation;
use candle_quant::nn::Gating;
use candle_quant::Result;
use serde::Deserialize;
use serde_json::Value;

/// What absent fields mean, and what the others are called.
pub(super) struct Defaults {
    /// Elements of a head; else the hidden size over the heads.
    pub head_dim: Option<usize>,
    pub context: usize,
    /// The context of pre-training of a rope that is scaled, whatever is said with its scaling.
    pub original: Option<usize>,
    /// Of the elements inside the feed-forward block.
    pub inner_key: &'static str,
    pub eps_key: &'static str,
    pub eps: f64,
    pub theta: f64,
    /// The share of a head that turns.
    pub partial: f64,
    /// Whether configs say which share it is.
    pub may_be_partial: bool,
    /// Whether neighbours turn together.
    pub interleaved: bool,
    pub activation_key: &'static str,
    pub activation: Activation,
}

impl Defaults {
    /// Those of Llama.
    pub const USUAL: Self = Self {
        head_dim: None,
        context: 2048,
        original: None,
        inner_key: "intermediate_size",
        eps_key: "rms_norm_eps",
        eps: 1e-6,
        theta: 1e4,
        partial: 1.,
        may_be_partial: false,
        interleaved: false,
        activation_key: "hidden_act",
        activation: Activation::Silu,
    };

    /// The rope of heads of so many elements.
    pub fn rope(&self, head_dim: usize) -> RopeDefaults {
        let Self { context, original, theta, partial, may_be_partial, interleaved, .. } = *self;
        RopeDefaults { context, original, theta, partial, may_be_partial, interleaved, head_dim }
    }
}

/// A model like Llama: no biases, one rope for all layers, RMS norms before both blocks, and a gate.
pub(super) fn read(fields: Fields, defaults: &Defaults) -> Result<Config> {
    let hidden_size = fields.required_size("hidden_size")?;
    let num_attention_heads = fields.required_size("num_attention_heads")?;
    let num_hidden_layers = fields.required_size("num_hidden_layers")?;
    let head_dim = match fields.size("head_dim")?.or(defaults.head_dim) {
        Some(head_dim) => head_dim,
        None => hidden_size / num_attention_heads,
    };
    Ok(Config {
        vocab_size: fields.required_size("vocab_size")?,
        hidden_size,
        intermediate_size: fields.required_size(defaults.inner_key)?,
        num_hidden_layers,
        num_attention_heads,
        num_key_value_heads: fields.size("num_key_value_heads")?.unwrap_or(num_attention_heads),
        head_dim,
        max_position_embeddings: fields.size("max_position_embeddings")?.unwrap_or(defaults.context),
        latents: None,
        linear: None,
        norm: NormKind::Rms,
        norm_eps: fields.positive(defaults.eps_key)?.unwrap_or(defaults.eps),
        rope: Rope::from_fields(fields, None, &defaults.rope(head_dim))?,
        local_rope: None,
        rotated_layers: vec![true; num_hidden_layers],
        query_growth: None,
        grows_unturned: false,
        attention_scale: 1. / (head_dim as f64).sqrt(),
        attention_softcap: None,
        qkv_clip: None,
        attention_gate: false,
        qkv_bias: false,
        output_bias: false,
        mlp_bias: false,
        head_bias: false,
        qk_norm: None,
        hidden_act: activation(fields, defaults)?,
        sliding_window: None,
        chunked_window: false,
        sliding_layers: vec![false; num_hidden_layers],
        attention_sinks: false,
        moe: None,
        parallel_blocks: false,
        embedding_scale: 1.,
        residual_scale: 1.,
        logit_scale: 1.,
        logit_softcap: None,
        tie_word_embeddings: fields.flag("tie_word_embeddings")?,
        names: Names::USUAL,
    })
}

/// Experts in all layers, as long as the feed-forward block, of which a token uses `top_k`: those of the largest shares of a
/// softmax, which are made to add up to 1.
pub(super) fn moe(config: &Config, experts: usize, top_k: usize) -> MoeConfig {
    MoeConfig {
        experts,
        top_k,
        intermediate_size: config.intermediate_size,
        routing: Routing::softmax(true),
        bias: false,
        gating: Gating::Plain(config.hidden_act),
        sparse_layers: vec![true; config.num_hidden_layers],
        block_name: "mlp",
        router_name: "gate",
        stack_names: None,
        // Set behind, by what is known of the family.
        transposed_parameters: false,
        shared: None,
    }
}

/// The rope of a config without a word of it, in families that scale it then; of others none.
pub(super) fn if_unsaid<T>(fields: Fields, scaled: T) -> Result<Option<T>> {
    let is_said = fields.object("rope_parameters")?.is_some() || fields.object("rope_scaling")?.is_some();
    Ok(Some(scaled).filter(|_| !is_said))
}

/// YaRN by so much of a first context, between these turns, without a factor for scores.
pub(super) fn yarn(
    factor: f64,
    original_max_position_embeddings: usize,
    truncate: bool,
    attention_factor: f64,
) -> RopeScaling {
    RopeScaling::Yarn {
        factor,
        beta_fast: 32.,
        beta_slow: 1.,
        original_max_position_embeddings,
        truncate,
        attention_factor,
    }
}

/// Whether all projections of attention have biases.
pub(super) fn attention_bias(config: &mut Config, fields: Fields) -> Result<()> {
    let bias = flag(fields, "attention_bias")?;
    (config.qkv_bias, config.output_bias) = (bias, bias);
    Ok(())
}

/// The field, or false.
pub(super) fn flag(fields: Fields, key: &str) -> Result<bool> {
    Ok(fields.flag(key)?.unwrap_or(false))
}

fn activation(fields: Fields, defaults: &Defaults) -> Result<Activation> {
    let Some(value) = fields.get(defaults.activation_key) else { return Ok(defaults.activation) };
    match Activation::deserialize(value) {
        Ok(activation) => Ok(activation),
        Err(_) => Err(fields.error(defaults.activation_key, "a known activation, such as silu", value)),
    }
}

/// `layer_types`, if present: for each layer, whether it is of this kind; the others are `full_attention`.
pub(super) fn layers_of_kind(
    fields: Fields,
    num_hidden_layers: usize,
    kind: &str,
) -> Result<Option<Vec<bool>>> {
    let Some(value) = fields.get("layer_types") else { return Ok(None) };
    let is_one = |layer: &Value| match layer.as_str() {
        Some("full_attention") => Some(false),
        found => (found == Some(kind)).then_some(true),
    };
    let layers = value.as_array().and_then(|layers| layers.iter().map(is_one).collect::<Option<Vec<_>>>());
    match layers {
        Some(layers) if layers.len() == num_hidden_layers => Ok(Some(layers)),
        _ => {
            let expected = format!("{num_hidden_layers} times `full_attention` or `{kind}`");
            Err(fields.error("layer_types", expected, value))
        }
    }
}

/// The same of layers with a sliding window.
pub(super) fn layer_types(fields: Fields, num_hidden_layers: usize) -> Result<Option<Vec<bool>>> {
    layers_of_kind(fields, num_hidden_layers, "sliding_attention")
}

/// Gives the config a window of `default` tokens, if the field is absent, in the layers that `layer_types` says, or all
/// but each last one of `pattern`.
pub(super) fn slide(config: &mut Config, fields: Fields, default: usize, pattern: usize) -> Result<()> {
    let layers = config.num_hidden_layers;
    let by_pattern = || (0..layers).map(|layer| !(layer + 1).is_multiple_of(pattern.max(1))).collect();
    config.sliding_layers = layer_types(fields, layers)?.unwrap_or_else(by_pattern);
    config.sliding_window = Some(fields.size("sliding_window")?.unwrap_or(default));
    Ok(())
}
