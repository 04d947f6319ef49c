//! Grouped-query attention with a key/value cache.

use super::projection::{columns_of, rows_of};
use super::rope::Rotation;
use super::sharding::{Heads, Sharding};
use super::Config;
use candle_core::{DType, Device, Result, Tensor, D};
use candle_nn::kv_cache::KvCache;
use candle_nn::{Module, RmsNorm};
use candle_quant::nn::{forward_all, rms_norm, LayerWeight, Linear, VarBuilder};
use candle_quant::parallel::RowParallel;
use std::ops::Range;
use std::slice;

/// Positions by which a cache grows; one copy of the cache each.
const CACHE_STEP: usize = 256;

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
    cache: KvCache,
}

impl Attention {
    pub fn new(config: &Config, vb: VarBuilder) -> Result<Self> {
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
            config.qk_norm.then(|| rms_norm(head_dim, config.rms_norm_eps, vb)).transpose()
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
            cache: KvCache::new(2, CACHE_STEP),
        })
    }

    /// `x` is `[B, T, hidden]`, the tokens that follow those in the cache; what attention makes of them is
    /// added to `residual`.
    pub fn forward(
        &mut self,
        x: &Tensor,
        residual: &Tensor,
        rotation: &Rotation,
        visible: &Visible,
    ) -> Result<Tensor> {
        let (batch, len, _) = x.dims3()?;
        let heads = |x: Tensor, heads| x.reshape((batch, len, heads, self.head_dim));
        let [q, k, v] = forward_all([&self.q_proj, &self.k_proj, &self.v_proj], x)?;
        let mut q = heads(q, self.heads)?;
        let mut k = heads(k, self.kv_heads)?;
        let v = heads(v, self.kv_heads)?;
        if let Some(norm) = &self.q_norm {
            q = norm.forward(&q)?;
        }
        if let Some(norm) = &self.k_norm {
            k = norm.forward(&k)?;
        }
        let (q, k) = (rotation.apply(&q)?, rotation.apply(&k)?);

        let by_head = |x: &Tensor| x.to_dtype(score_dtype(x))?.transpose(1, 2)?.contiguous();
        let (k, v) = self.cache.append(&by_head(&k)?, &by_head(&v)?)?;
        let y = self.attend(&by_head(&q)?, &k, &v, visible)?;
        self.o_proj.forward_add(&y.to_dtype(x.dtype())?, residual)
    }

    /// Softmax(q k^T / sqrt(head_dim)) v for `q` `[B, heads, T, head_dim]`, `k` and `v`
    /// `[B, kv_heads, S, head_dim]`; the result is `[B, T, heads * head_dim]`.
    fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor, visible: &Visible) -> Result<Tensor> {
        let (batch, _, len, _) = q.dims4()?;
        let &Visible { first, keys, ref mask } = visible;
        let (k, v) = (k.narrow(2, first, keys)?, v.narrow(2, first, keys)?);

        // The query heads that share a key head become rows of one matrix: keys are never repeated.
        let rows = self.heads / self.kv_heads * len;
        let scale = 1. / (self.head_dim as f64).sqrt();
        let q = (q * scale)?.reshape((batch, self.kv_heads, rows, self.head_dim))?;
        let mut scores = q.matmul(&k.t()?)?;
        if let Some(mask) = mask {
            let by_query = scores.reshape((batch, self.heads, len, keys))?;
            let masked = by_query.broadcast_add(&mask.to_dtype(q.dtype())?)?;
            scores = masked.reshape((batch, self.kv_heads, rows, keys))?;
        }
        let scores = scores.to_dtype(DType::F32)?;
        let weights = match &self.sinks {
            None => candle_nn::ops::softmax_last_dim(&scores)?,
            Some(sinks) => {
                // One more key, which has no value.
                let sinks = sinks.reshape((1, self.kv_heads, self.heads / self.kv_heads, 1))?;
                let sinks = sinks.broadcast_as((batch, self.kv_heads, self.heads / self.kv_heads, len))?;
                let sinks = sinks.reshape((batch, self.kv_heads, rows, 1))?;
                let weights = candle_nn::ops::softmax_last_dim(&Tensor::cat(&[&scores, &sinks], D::Minus1)?)?;
                weights.narrow(D::Minus1, 0, keys)?.contiguous()?
            }
        };
        weights
            .to_dtype(q.dtype())?
            .matmul(&v)?
            .reshape((batch, self.heads, len, self.head_dim))?
            .transpose(1, 2)?
            .flatten_from(D::Minus2)
    }

    /// Tokens in the cache.
    pub fn cached(&self) -> usize {
        self.cache.current_seq_len()
    }

    pub fn clear_cache(&mut self) {
        self.cache.reset();
    }

    pub fn weights(&self) -> impl Iterator<Item = &LayerWeight> {
        let inputs = [&self.q_proj, &self.k_proj, &self.v_proj].into_iter().map(Linear::weight);
        inputs.chain([self.o_proj.weight()])
    }
}

/// The dtype of cache and scores. The CPU has no half-precision matmul worth using: there it is f32
/// whatever the activations are, so that no step converts the whole cache.
fn score_dtype(x: &Tensor) -> DType {
    if x.device().is_cpu() {
        DType::F32
    } else {
        x.dtype()
    }
}

/// Which keys of the cache a run of queries sees; the same for all layers of a kind.
pub(super) struct Visible {
    /// The first key that any of the queries sees.
    first: usize,
    /// How many there are from it on.
    keys: usize,
    /// What is added to the scores `[.., len, keys]`. One query sees all that is left: it needs none.
    mask: Option<Tensor>,
}

impl Visible {
    /// For `len` queries from position `offset` on. Each sees itself and the keys before it, at most
    /// `window` in all.
    pub fn new(offset: usize, len: usize, window: Option<usize>, device: &Device) -> Result<Self> {
        let window = window.unwrap_or(usize::MAX);
        let first = (offset + 1).saturating_sub(window);
        let keys = offset + len - first;
        let values = || -> Vec<f32> {
            let queries = offset - first..keys;
            queries
                .flat_map(|query| {
                    (0..keys).map(move |key| match query.checked_sub(key) {
                        Some(distance) if distance < window => 0.,
                        _ => f32::NEG_INFINITY,
                    })
                })
                .collect()
        };
        let mask = (len > 1).then(|| Tensor::from_vec(values(), (len, keys), device)).transpose()?;
        Ok(Self { first, keys, mask })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_has_the_keys_of_its_own_heads() {
        let path = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/tests/fixtures/mlx/qwen3-affine-b4-g64");
        let checkpoint = candle_quant::Checkpoint::open(path).unwrap();
        let config = Config::from_json(checkpoint.config()).unwrap();
        // 4 query heads on 2 key heads, two tokens of 32 elements.
        for (ranks, heads) in
            [(1, vec![2]), (2, vec![1; 2]), (3, vec![1; 3]), (4, vec![1; 4]), (8, vec![2; 8])]
        {
            let (checkpoint, config) = (checkpoint.clone(), config.clone());
            let cached = candle_quant::parallel::run(&vec![Device::Cpu; ranks], move |rank| {
                let vb = VarBuilder::sharded(&checkpoint, &rank, DType::F32);
                let mut attention = Attention::new(&config, vb.pp("model.layers.0.self_attn"))?;
                let x = Tensor::ones((1, 2, 128), DType::F32, rank.device())?;
                let frequencies = config.rope.inverse_frequencies(config.head_dim);
                let rotation = Rotation::new(&frequencies, 1., 0, 2, DType::F32, rank.device())?;
                attention.forward(&x, &x, &rotation, &Visible::new(0, 2, None, rank.device())?)?;
                Ok(attention.cache.k()?.unwrap().dims().to_vec())
            });
            let expected: Vec<_> = heads.into_iter().map(|heads| vec![1, heads, 2, 32]).collect();
            assert_eq!(cached.unwrap(), expected, "{ranks} ranks");
        }
    }

    #[test]
    fn queries_see_what_is_before_them_and_in_the_window() {
        let x = f32::NEG_INFINITY;
        let visible = |offset, len, window| {
            let visible = Visible::new(offset, len, window, &Device::Cpu).unwrap();
            let mask = visible.mask.map(|mask| mask.to_vec2::<f32>().unwrap());
            (visible.first, visible.keys, mask)
        };
        assert_eq!(visible(0, 2, None), (0, 2, Some(vec![vec![0., x], vec![0., 0.]])));
        assert_eq!(visible(1, 2, None), (0, 3, Some(vec![vec![0., 0., x], vec![0., 0., 0.]])));
        assert_eq!(visible(5, 2, Some(2)), (4, 3, Some(vec![vec![0., 0., x], vec![x, 0., 0.]])));
        assert_eq!(visible(5, 1, None), (0, 6, None));
        assert_eq!(visible(5, 1, Some(2)), (4, 2, None));
        assert_eq!(visible(5, 1, Some(9)), (0, 6, None));
    }
}
