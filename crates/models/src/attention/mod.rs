//! Grouped-query attention with a key/value cache: on the CPU by [`candle_quant::ops::attention`], on other devices by
//! candle's operations.

mod differentiable;
mod on_device;

use super::differentiable::{rms_norm, rotate};
use super::options::CacheOptions;
use super::projection::{columns_of, rows_of};
use super::rope::Rotation;
use super::sharding::{Heads, Sharding};
use super::Config;
use candle_core::{DType, Result, Tensor};
use candle_nn::RmsNorm;
use candle_quant::nn::{self, forward_all, LayerWeight, Linear, VarBuilder};
use candle_quant::ops::{self, AttentionOptions};
use candle_quant::parallel::RowParallel;
use candle_quant::step::AttentionBlock;
use candle_quant::{KvCache, KvFormat};
use on_device::OnDevice;
pub(super) use on_device::Visible;
use std::ops::Range;
use std::slice;

#[derive(Debug)]
pub(super) struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: RowParallel,
    q_norm: Option<RmsNorm>,
    k_norm: Option<RmsNorm>,
    /// A logit for each query head, `[heads]` in f32.
    sinks: Option<Tensor>,
    /// Those of this rank, as are the projections and the cache.
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    cache: Cache,
}

/// The keys and values so far, and who attends to them.
#[derive(Debug)]
enum Cache {
    OnCpu(KvCache),
    OnDevice(OnDevice),
}

impl Attention {
    /// The attention of layer `layer`.
    pub fn new(config: &Config, layer: usize, options: &CacheOptions, vb: VarBuilder) -> Result<Self> {
        let (hidden, head_dim) = (config.hidden_size, config.head_dim);
        let (all_heads, all_kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
        let own = vb
            .rank()
            .and_then(|rank| Sharding::new(config, rank.world_size()).heads?.get(rank.index()).cloned());
        let Heads { query, key } = own.unwrap_or(Heads { query: 0..all_heads, key: 0..all_kv_heads });
        let rows = |heads: &Range<usize>| heads.start * head_dim..heads.end * head_dim;
        let project = |heads: usize, own: &Range<usize>, name| {
            columns_of(hidden, heads * head_dim, rows(own), config.qkv_bias, vb.pp(name))
        };
        let norm = |name| {
            let vb = vb.pp(name);
            config.qk_norm.then(|| nn::rms_norm(head_dim, config.rms_norm_eps, vb)).transpose()
        };
        let cache = match vb.device().is_cpu() {
            true => {
                let window = config.sliding_window.filter(|_| config.slides(layer));
                Cache::OnCpu(KvCache::new(options.layer(key.len(), head_dim, window, vb.dtype()))?)
            }
            false => Cache::OnDevice(OnDevice::new()),
        };
        Ok(Self {
            q_proj: project(all_heads, &query, "q_proj")?,
            k_proj: project(all_kv_heads, &key, "k_proj")?,
            v_proj: project(all_kv_heads, &key, "v_proj")?,
            o_proj: rows_of(all_heads * head_dim, hidden, rows(&query), config.output_bias, vb.pp("o_proj"))?,
            q_norm: norm("q_norm")?,
            k_norm: norm("k_norm")?,
            sinks: config
                .attention_sinks
                .then(|| vb.tensor_part(&[all_heads], "sinks", slice::from_ref(&query))?.to_dtype(DType::F32))
                .transpose()?,
            heads: query.len(),
            kv_heads: key.len(),
            head_dim,
            cache,
        })
    }

    /// The block behind its norm, if it is whole and on the CPU.
    pub fn block<'a>(&'a self, norm: &'a RmsNorm) -> Option<AttentionBlock<'a>> {
        Some(AttentionBlock {
            norm,
            q_proj: &self.q_proj,
            k_proj: &self.k_proj,
            v_proj: &self.v_proj,
            o_proj: self.o_proj.whole()?,
            q_norm: self.q_norm.as_ref(),
            k_norm: self.k_norm.as_ref(),
            sinks: self.sinks.as_ref(),
            head_dim: self.head_dim,
        })
    }

    /// The cache, if it is on the CPU.
    pub fn cache_mut(&mut self) -> Option<&mut KvCache> {
        match &mut self.cache {
            Cache::OnCpu(cache) => Some(cache),
            Cache::OnDevice(_) => None,
        }
    }

    /// `x` is `[B, T, hidden]`, the tokens that follow those in the cache; what attention makes of them is
    /// added to `residual`. `visible` is what they see; on the CPU the cache knows.
    pub fn forward(
        &mut self,
        x: &Tensor,
        residual: &Tensor,
        rotation: &Rotation,
        visible: Option<&Visible>,
    ) -> Result<Tensor> {
        let [q, k, v] = self.project(x, rotation)?;
        let scale = self.scale();
        let y = match &mut self.cache {
            Cache::OnCpu(cache) => {
                let options = AttentionOptions {
                    scale: scale as f32,
                    sinks: self.sinks.as_ref(),
                    ..Default::default()
                };
                ops::attention(&q, &k, &v, cache, options)?
            }
            Cache::OnDevice(cache) => cache.attend([&q, &k, &v], visible, scale, self.sinks.as_ref())?,
        };
        self.o_proj.forward_add(&y, residual)
    }

    /// Queries `[B, T, heads, head_dim]`, keys and values `[B, T, kv_heads, head_dim]` of `x`, in their positions.
    fn project(&self, x: &Tensor, rotation: &Rotation) -> Result<[Tensor; 3]> {
        let (batch, len, _) = x.dims3()?;
        let heads = |x: Tensor, heads| x.reshape((batch, len, heads, self.head_dim));
        let [q, k, v] = forward_all([&self.q_proj, &self.k_proj, &self.v_proj], x)?;
        let placed = |x: Tensor, norm: Option<&RmsNorm>| {
            let normalized = norm.map(|norm| rms_norm(norm, &x)).transpose()?;
            rotate(&normalized.unwrap_or(x), rotation)
        };
        let q = placed(heads(q, self.heads)?, self.q_norm.as_ref())?;
        let k = placed(heads(k, self.kv_heads)?, self.k_norm.as_ref())?;
        Ok([q, k, heads(v, self.kv_heads)?])
    }

    /// What products of queries and keys are multiplied by.
    fn scale(&self) -> f64 {
        1. / (self.head_dim as f64).sqrt()
    }

    /// How the cache holds keys and values, if it has formats of its own.
    pub fn cache_formats(&self) -> Option<(KvFormat, KvFormat)> {
        match &self.cache {
            Cache::OnCpu(cache) => Some((cache.config().keys, cache.config().values)),
            Cache::OnDevice(_) => None,
        }
    }

    /// Bytes of the cache as it is, blocks without tokens included.
    pub fn cache_bytes(&self) -> u64 {
        match &self.cache {
            Cache::OnCpu(cache) => cache.size_in_bytes() as u64,
            Cache::OnDevice(cache) => cache.size_in_bytes(),
        }
    }

    /// Bytes of keys and values that a token reads which is the last of so many. `window` is what it sees.
    pub fn bytes_seen(&self, tokens: usize, window: Option<usize>, dtype: DType) -> u64 {
        match &self.cache {
            Cache::OnCpu(cache) => cache.config().size_in_bytes(tokens),
            Cache::OnDevice(_) => {
                let elements = 2 * self.kv_heads * self.head_dim * dtype.size_in_bytes();
                (tokens.min(window.unwrap_or(tokens)) as u64).saturating_mul(elements as u64)
            }
        }
    }

    /// Tokens in the cache.
    pub fn cached(&self) -> usize {
        match &self.cache {
            Cache::OnCpu(cache) => cache.len(0),
            Cache::OnDevice(cache) => cache.len(),
        }
    }

    pub fn clear_cache(&mut self) {
        match &mut self.cache {
            Cache::OnCpu(cache) => cache.clear(),
            Cache::OnDevice(cache) => cache.clear(),
        }
    }

    /// Keeps the first `len` tokens; false if that is not possible.
    pub fn truncate_cache(&mut self, len: usize) -> bool {
        match &mut self.cache {
            Cache::OnCpu(cache) => (0..cache.sequences()).all(|sequence| cache.truncate(sequence, len)),
            Cache::OnDevice(cache) => cache.truncate(len),
        }
    }

    pub fn weights(&self) -> impl Iterator<Item = &LayerWeight> {
        let inputs = [&self.q_proj, &self.k_proj, &self.v_proj].into_iter().map(Linear::weight);
        inputs.chain([self.o_proj.weight()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn a_rank_has_the_keys_of_its_own_heads() {
        let checkpoint = candle_quant::Checkpoint::open("assets/tiny").unwrap();
        let config = Config::from_json(checkpoint.config()).unwrap();
        // 4 query heads on 2 key heads, two tokens of 64 elements.
        for (ranks, heads) in
            [(1, vec![2]), (2, vec![1; 2]), (3, vec![1; 3]), (4, vec![1; 4]), (8, vec![2; 8])]
        {
            let (checkpoint, config) = (checkpoint.clone(), config.clone());
            let cached = candle_quant::parallel::run(&vec![Device::Cpu; ranks], move |rank| {
                let vb = VarBuilder::sharded(&checkpoint, &rank, DType::F32);
                let mut attention =
                    Attention::new(&config, 0, &CacheOptions::default(), vb.pp("model.layers.0.self_attn"))?;
                let x = Tensor::ones((1, 2, 256), DType::F32, rank.device())?;
                let frequencies = config.rope.inverse_frequencies(config.head_dim);
                let rotation = Rotation::new(&frequencies, 1., 0, 2, DType::F32, rank.device())?;
                attention.forward(&x, &x, &rotation, None)?;
                let Cache::OnCpu(cache) = &attention.cache else { panic!("{:?}", attention.cache) };
                Ok((cache.config().kv_heads, cache.len(0)))
            });
            let expected: Vec<_> = heads.into_iter().map(|heads| (heads, 2)).collect();
            assert_eq!(cached.unwrap(), expected, "{ranks} ranks");
        }
    }
}
