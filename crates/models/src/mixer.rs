//! What mixes the tokens of a layer: attention to keys, or linear attention.

use super::attention::{Attention, LinearAttention, Visible};
use super::config::{LayerRope, Window};
use super::options::CacheOptions;
use super::rope::Positions;
use super::Config;
use candle_core::{Result, Tensor};
use candle_quant::nn::{LayerWeight, VarBuilder};
use candle_quant::step::{AttentionBlock, DeltaNetBlock, Turn};
use candle_quant::{DeltaNetState, DeviceKvCache, KvCache, KvFormat};

/// Both have the methods of [`Attention`].
#[derive(Debug)]
pub(super) enum Mixer {
    Attention(Box<Attention>),
    Linear(Box<LinearAttention>),
}

/// What a layer has of the tokens so far.
pub(super) enum LayerCache<'a> {
    OnCpu(&'a mut KvCache),
    OnDevice(&'a mut DeviceKvCache),
    State(&'a mut DeltaNetState),
}

/// A layer's part of a plan, between its norms.
pub(super) enum MixerBlock<'a> {
    Attention(AttentionBlock<'a>),
    Linear(DeltaNetBlock<'a>),
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

    /// None if it is of a kind that plans do not have.
    pub fn block<'a>(&'a self, turn: &'a Turn, rope: LayerRope) -> Option<MixerBlock<'a>> {
        match self {
            Self::Attention(attention) => attention.block(turn, rope).map(MixerBlock::Attention),
            Self::Linear(linear) => linear.block().map(MixerBlock::Linear),
        }
    }

    pub fn cache_mut(&mut self) -> LayerCache<'_> {
        match self {
            Self::Attention(attention) => attention.cache_mut(),
            Self::Linear(linear) => LayerCache::State(linear.state_mut()),
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
            Self::Linear(linear) => linear.state().size_in_bytes(),
        }
    }

    pub fn bytes_seen(&self, tokens: usize, window: Option<Window>) -> u64 {
        match self {
            Self::Attention(attention) => attention.bytes_seen(tokens, window),
            Self::Linear(linear) => linear.state().config().size_in_bytes(),
        }
    }

    pub fn cached(&self) -> usize {
        match self {
            Self::Attention(attention) => attention.cached(),
            Self::Linear(linear) => linear.state().lens().iter().copied().max().unwrap_or(0),
        }
    }

    pub fn clear_cache(&mut self) {
        match self {
            Self::Attention(attention) => attention.clear_cache(),
            Self::Linear(linear) => linear.state_mut().clear(),
        }
    }

    /// As that of attention; a state has no tokens that could be taken out.
    pub fn truncate_cache(&mut self, len: usize) -> bool {
        match self {
            Self::Attention(attention) => attention.truncate_cache(len),
            Self::Linear(linear) => {
                let state = linear.state_mut();
                (0..state.sequences()).all(|sequence| state.truncate(sequence, len))
            }
        }
    }

    pub fn weights(&self) -> Vec<LayerWeight> {
        match self {
            Self::Attention(attention) => attention.weights(),
            Self::Linear(linear) => linear.weights(),
        }
    }
}
