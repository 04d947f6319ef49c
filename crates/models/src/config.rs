//! What distinguishes one decoder-only model from another.

use super::fields::{is_positive, POSITIVE};
pub use super::linear_config::LinearAttentionConfig;
use super::moe::MoeConfig;
pub use super::names::{Inside, Names, QkNorm, QkNormOver, Role};
use super::norm::NormKind;
use super::rope::{Rope, RopeScaling};
use candle_nn::Activation;
use candle_quant::step::QueryGrowth;
use candle_quant::{Error, Result};

/// The shape of a decoder-only model. Read from a checkpoint's `config.json`, or made by hand.
///
/// A layer computes `x + attention(norm(x))`, and of that the same with its feed-forward block; [`names`](Config::names) says
/// which of the norms around them there are.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Rows of the embedding and of the output head.
    pub vocab_size: usize,
    /// Elements of a token's hidden state.
    pub hidden_size: usize,
    /// Elements inside the feed-forward block.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; divides the number of query heads.
    pub num_key_value_heads: usize,
    /// Elements of a head; even.
    pub head_dim: usize,
    /// The context the model was made for, in tokens, before it is stretched: see [`context`](Config::context).
    pub max_position_embeddings: usize,
    /// What keys and values are made of, if not of hidden states.
    pub latents: Option<Latents>,
    /// The layers that do not attend to keys, if there are any.
    pub linear: Option<LinearAttentionConfig>,
    /// What the norms of hidden states do.
    pub norm: NormKind,
    /// Added to the mean square in every norm.
    pub norm_eps: f64,
    /// Rotary position embedding.
    pub rope: Rope,
    /// That of layers with a sliding window, if it is another one.
    pub local_rope: Option<Rope>,
    /// For each layer, whether queries and keys turn by their positions.
    pub rotated_layers: Vec<bool>,
    /// How queries grow with their positions.
    pub query_growth: Option<QueryGrowth>,
    /// Whether they do so only in layers in which they do not turn.
    pub grows_unturned: bool,
    /// By what products of queries and keys are multiplied.
    pub attention_scale: f64,
    /// Where these products end: they become `cap * tanh(product / cap)`.
    pub attention_softcap: Option<f64>,
    /// Queries, keys and values are cut at this number and its negative.
    pub qkv_clip: Option<f64>,
    /// Whether the query projection makes, behind each head, a gate of as many elements: what the head sees is multiplied by
    /// its sigmoid.
    pub attention_gate: bool,
    /// Whether query, key and value projections have biases.
    pub qkv_bias: bool,
    /// Whether the attention's output projection has a bias.
    pub output_bias: bool,
    /// Whether the feed-forward projections have biases.
    pub mlp_bias: bool,
    /// Whether the output head has a bias.
    pub head_bias: bool,
    /// How queries and keys are normalized.
    pub qk_norm: Option<QkNorm>,
    /// The feed-forward block's non-linearity.
    pub hidden_act: Activation,
    /// Tokens a query of a sliding layer sees, its own included.
    pub sliding_window: Option<usize>,
    /// Whether the window does not slide: a query sees the tokens of its own chunk of so many, up to itself.
    pub chunked_window: bool,
    /// For each layer, whether the sliding window applies to it.
    pub sliding_layers: Vec<bool>,
    /// Whether every query head has a logit of its own beside those of the keys.
    pub attention_sinks: bool,
    /// The experts, if there are any.
    pub moe: Option<MoeConfig>,
    /// Whether the feed-forward block sees what attention sees: their outputs are added together.
    pub parallel_blocks: bool,
    /// By what embeddings are multiplied.
    pub embedding_scale: f64,
    /// By what the outputs of attention and of the feed-forward block are multiplied before they are added.
    pub residual_scale: f64,
    /// By what logits are multiplied.
    pub logit_scale: f64,
    /// Where logits end, as [`attention_softcap`](Config::attention_softcap).
    pub logit_softcap: Option<f64>,
    /// Whether the head shares the embedding's weight; `None`: if the checkpoint has no head.
    pub tie_word_embeddings: Option<bool>,
    /// What modules are called.
    pub names: Names,
}

/// Multi-head latent attention: keys and values are made of one latent vector for each token. Heads of queries and keys have
/// a part that does not turn and, behind it, one that does, which all heads share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Latents {
    /// Elements of the vector that queries are made of; of hidden states without one.
    pub query_latent: Option<usize>,
    /// Elements of the vector that keys and values are made of.
    pub latent: usize,
    /// Elements of a head of queries or keys that do not turn.
    pub key_dim: usize,
    /// Those that do.
    pub turning: usize,
    /// Elements of a head of values.
    pub value_dim: usize,
}

impl Latents {
    /// What the cache holds of a token.
    pub(super) fn cached(&self) -> usize {
        self.latent + self.turning
    }
}

/// What the queries of a layer see, their own token included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Window {
    pub tokens: usize,
    /// Whether it begins anew behind each so many, instead of sliding.
    pub is_chunked: bool,
}

/// By what the queries and keys of a layer turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LayerRope {
    None,
    All,
    /// Layers with a window, in models where they differ.
    Local,
}

impl Config {
    /// Checks how the values relate to each other.
    ///
    /// # Errors
    /// If a size is zero, heads don't divide, a number is not finite, and the like.
    pub fn validate(&self) -> Result<()> {
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim),
            ("sliding_window", self.sliding_window.unwrap_or(1)),
        ];
        for (name, size) in sizes {
            if size == 0 {
                return Err(Error::mismatch(format!("`{name}`"), "at least 1", "0"));
            }
        }
        if !self.num_attention_heads.is_multiple_of(self.num_key_value_heads) {
            return Err(Error::mismatch(
                "`num_key_value_heads`",
                format!("a divisor of the {} attention heads", self.num_attention_heads),
                self.num_key_value_heads.to_string(),
            ));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(Error::mismatch("`head_dim`", "an even number", self.head_dim.to_string()));
        }
        if self.num_attention_heads.checked_mul(self.head_dim).and_then(|size| size.checked_mul(2)).is_none()
        {
            return Err(Error::mismatch(
                "`num_attention_heads` times `head_dim`",
                "a number that fits the address space",
                format!("{} times {}", self.num_attention_heads, self.head_dim),
            ));
        }
        let numbers = [
            ("norm_eps", Some(self.norm_eps)),
            ("attention_scale", Some(self.attention_scale)),
            ("attention_softcap", self.attention_softcap),
            ("qkv_clip", self.qkv_clip),
            ("embedding_scale", Some(self.embedding_scale)),
            ("residual_scale", Some(self.residual_scale)),
            ("logit_scale", Some(self.logit_scale)),
            ("logit_softcap", self.logit_softcap),
        ];
        for (name, number) in numbers {
            if let Some(bad) = number.filter(|number| !is_positive(*number)) {
                return Err(Error::mismatch(format!("`{name}`"), POSITIVE, bad.to_string()));
            }
        }
        for (name, layers) in
            [("sliding_layers", &self.sliding_layers), ("rotated_layers", &self.rotated_layers)]
        {
            if layers.len() != self.num_hidden_layers {
                return Err(Error::mismatch(
                    format!("`{name}`"),
                    format!("one entry for each of {} layers", self.num_hidden_layers),
                    layers.len().to_string(),
                ));
            }
        }
        if let Some(linear) = &self.linear {
            linear.validate(self.num_hidden_layers)?;
        }
        if let Some(moe) = &self.moe {
            moe.validate(self.num_hidden_layers)?;
        }
        for rope in [Some(&self.rope), self.local_rope.as_ref()].into_iter().flatten() {
            rope.validate()?;
            if rope.rotary_dim > self.head_dim {
                let expected = format!("up to {}, the elements of a head", self.head_dim);
                let found = rope.rotary_dim.to_string();
                return Err(Error::mismatch("elements of a head that turn", expected, found));
            }
        }
        Ok(())
    }

    /// The tokens of the longest text that the model is made for: `max_position_embeddings`, or more where `rope` stretches
    /// what it was trained with. Llama 3's scaling is in `max_position_embeddings` already.
    pub fn context(&self) -> usize {
        let stretched = match self.rope.scaling {
            RopeScaling::None
            | RopeScaling::Dynamic
            | RopeScaling::Long { .. }
            | RopeScaling::Llama3 { .. } => 0.,
            RopeScaling::Linear { factor } => self.max_position_embeddings as f64 * factor,
            RopeScaling::Yarn { factor, original_max_position_embeddings, .. } => {
                original_max_position_embeddings as f64 * factor
            }
        };
        self.max_position_embeddings.max(stretched as usize)
    }

    /// Whether the sliding window, if there is one, applies to layer `index`.
    pub(super) fn slides(&self, index: usize) -> bool {
        self.sliding_layers.get(index).copied().unwrap_or(false)
    }

    /// Rows of the query projection for a head.
    pub(super) fn query_rows(&self) -> usize {
        self.head_dim.saturating_mul(if self.attention_gate { 2 } else { 1 })
    }

    /// What the queries of layer `index` see, if not all before them.
    pub(super) fn window_of(&self, index: usize) -> Option<Window> {
        let tokens = self.sliding_window.filter(|_| self.slides(index))?;
        Some(Window { tokens, is_chunked: self.chunked_window })
    }

    /// Elements of a head of values.
    pub(super) fn value_dim(&self) -> usize {
        self.latents.map_or(self.head_dim, |latents| latents.value_dim)
    }

    /// Heads of the cache where attention has `kv_heads`, and their elements.
    pub(super) fn cached(&self, kv_heads: usize) -> (usize, usize) {
        match self.latents {
            None => (kv_heads, self.head_dim),
            Some(latents) => (1, latents.cached()),
        }
    }

    /// By what the queries and keys of layer `index` turn.
    pub(super) fn rope_of(&self, index: usize) -> LayerRope {
        match self.rotated_layers.get(index) {
            Some(true) if self.slides(index) && self.local_rope.is_some() => LayerRope::Local,
            Some(true) => LayerRope::All,
            Some(false) | None => LayerRope::None,
        }
    }
}
