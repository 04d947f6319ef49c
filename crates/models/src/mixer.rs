//! What mixes the tokens of a layer: attention to keys, or linear attention.

use super::attention::{Attention, LinearAttention, Visible};
use super::config::{LayerRope, Window};
use super::options::CacheOptions;
use super::rope::Positions;
use super::Config;
use candle_core::{Result, Tensor};
use candle_quant::nn::{LayerWeight, VarBuilder};
use candle_quant::step::{AttentionBlock, Turn};
use candle_quant::{DeviceKvCache, KvCache, KvFormat};

/// Both have the methods of [`Attention`].
#[derive(Debug)]
pub(super) enum Mixer {
    Attention(Box<Attention>),
    Linear(Box<LinearAttention>),
}

impl Mixer {
    /// That of layer `layer`, at which `vb` stands.
    pub fn new(config: &Config, layer: usize, options: &CacheOptions, vb: &VarBuilder) -> Result<Self> {
        match config.linear.as_ref().filter(|linear| linear.is_linear(layer)) {
            Some(linear) => LinearAttention::new(config, linear, &vb.pp("linear_attn"))
                .map(|linear| Self::Linear(linear.into())),
            None => Attention::new(config, layer, options, vb.pp("self_attn"))
                .map(|attention| Self::Attention(attention.into())),
        }
    }

    pub fn block<'a>(&'a self, turn: &'a Turn, rope: LayerRope) -> Option<AttentionBlock<'a>> {
        match self {
            Self::Attention(attention) => attention.block(turn, rope),
            Self::Linear(_) => None,
        }
    }

    pub fn cache_mut(&mut self) -> Option<&mut KvCache> {
        match self {
            Self::Attention(attention) => attention.cache_mut(),
            Self::Linear(_) => None,
        }
    }

    pub fn device_cache_mut(&mut self) -> Option<&mut DeviceKvCache> {
        match self {
            Self::Attention(attention) => attention.device_cache_mut(),
            Self::Linear(_) => None,
        }
    }

    pub fn forward(
        &mut self,
        x: &Tensor,
        residual: Option<&Tensor>,
        at: (&Positions, LayerRope),
        visible: Option<&Visible>,
    ) -> Result<Tensor> {
        match self {
            Self::Attention(attention) => attention.forward(x, residual, at, visible),
            Self::Linear(linear) => linear.forward(x, residual),
        }
    }

    pub fn forward_whole(
        &self,
        x: &Tensor,
        residual: Option<&Tensor>,
        at: (&Positions, LayerRope),
        window: Option<Window>,
    ) -> Result<Tensor> {
        match self {
            Self::Attention(attention) => attention.forward_whole(x, residual, at, window),
            Self::Linear(linear) => linear.forward_whole(x, residual),
        }
    }

    pub fn cache_formats(&self) -> Option<(KvFormat, KvFormat)> {
        match self {
            Self::Attention(attention) => Some(attention.cache_formats()),
            Self::Linear(_) => None,
        }
    }

    pub fn cache_bytes(&self) -> u64 {
        match self {
            Self::Attention(attention) => attention.cache_bytes(),
            Self::Linear(linear) => linear.state_bytes(),
        }
    }

    pub fn bytes_seen(&self, tokens: usize, window: Option<Window>) -> u64 {
        match self {
            Self::Attention(attention) => attention.bytes_seen(tokens, window),
            Self::Linear(linear) => linear.bytes_of_text(),
        }
    }

    pub fn cached(&self) -> usize {
        match self {
            Self::Attention(attention) => attention.cached(),
            Self::Linear(linear) => linear.tokens(),
        }
    }

    pub fn clear_cache(&mut self) {
        match self {
            Self::Attention(attention) => attention.clear_cache(),
            Self::Linear(linear) => linear.clear(),
        }
    }

    /// As that of attention; a state has no tokens that could be taken out.
    pub fn truncate_cache(&mut self, len: usize) -> bool {
        match self {
            Self::Attention(attention) => attention.truncate_cache(len),
            Self::Linear(linear) => len >= linear.tokens(),
        }
    }

    pub fn weights(&self) -> Vec<LayerWeight> {
        match self {
            Self::Attention(attention) => attention.weights(),
            Self::Linear(linear) => linear.weights(),
        }
    }
}
