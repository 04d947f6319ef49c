//! What a model holds, and what a step of it reads.

use super::Model;
use crate::layer::{FeedForward, Layer};
use crate::CacheOptions;
use candle_quant::nn::{LayerWeight, WeightSummary};
use candle_quant::KvFormat;

/// What a decode step of one text reads from memory at least.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepBytes {
    /// Weights that the token is multiplied with: all layers, of experts those that it uses, the head, and its row of an
    /// embedding that is not the head.
    pub weights: u64,
    /// Keys and values that it sees, its own included; states of linear attention.
    pub cache: u64,
}

impl StepBytes {
    /// Both together.
    pub fn all(self) -> u64 {
        self.weights.saturating_add(self.cache)
    }
}

impl Model {
    /// The weights that tokens are multiplied with: the projections and the head. Stacks of experts are `[E, N, K]`.
    pub fn matmul_weights(&self) -> impl Iterator<Item = LayerWeight> + '_ {
        self.layers.iter().flat_map(Layer::weights).chain([self.lm_head.weight().clone()])
    }

    /// Formats and sizes of the embedding, the projections and the head (a tied head counts once).
    pub fn summary(&self) -> WeightSummary {
        let embedding = (!self.tied).then(|| self.embed_tokens.embeddings().clone());
        self.matmul_weights().chain(embedding).collect()
    }

    /// The formats in which the KV cache holds keys and values.
    pub fn cache_formats(&self) -> (KvFormat, KvFormat) {
        let stated = self.layers.iter().find_map(|layer| layer.attention.cache_formats());
        stated.unwrap_or_else(|| CacheOptions::default().formats(self.dtype))
    }

    /// Bytes of the KV cache as it is, of all layers, states of linear attention included.
    pub fn cache_size_in_bytes(&self) -> u64 {
        self.layers.iter().map(|layer| layer.attention.cache_bytes()).sum()
    }

    /// What the step reads that computes the token behind `depth` others.
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_quant::Checkpoint;
    /// use candle_quant_models::Model;
    ///
    /// let model = Model::load(&Checkpoint::open("assets/tiny")?, DType::F32, &Device::Cpu)?;
    /// // Its head is its embedding: all weights are read.
    /// assert_eq!(model.step_bytes(0).weights, model.summary().size_in_bytes());
    /// assert!(model.step_bytes(100).cache > model.step_bytes(0).cache);
    /// # Ok::<(), candle_quant::Error>(())
    /// ```
    pub fn step_bytes(&self, depth: usize) -> StepBytes {
        let bytes = |weight: &LayerWeight| weight.size_in_bytes() as u64;
        let of_layer = |layer: &Layer| match &layer.mlp {
            FeedForward::Dense(_) => layer.weights().iter().map(bytes).sum::<u64>(),
            FeedForward::Sparse(mlp) => {
                layer.attention.weights().iter().map(bytes).sum::<u64>() + mlp.bytes_of_token()
            }
        };
        let embedding = self.embed_tokens.embeddings();
        let rows = embedding.dims().first().copied().unwrap_or(1).max(1) as u64;
        let row = if self.tied { 0 } else { bytes(embedding) / rows };
        let cache = |layer: &Layer| {
            let window = self.window.filter(|_| layer.slides);
            layer.attention.bytes_seen(depth.saturating_add(1), window)
        };
        StepBytes {
            weights: self.layers.iter().map(of_layer).sum::<u64>() + bytes(self.lm_head.weight()) + row,
            cache: self.layers.iter().map(cache).sum(),
        }
    }
}
