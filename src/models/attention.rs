//! Grouped-query attention with a key/value cache.

use super::rope::Rotation;
use super::Config;
use crate::nn::{rms_norm, LayerWeight, Linear, Module, RmsNorm, VarBuilder};
use candle_core::{DType, Device, Result, Tensor, D};
use candle_nn::kv_cache::KvCache;

/// Positions by which a cache grows; one copy of the cache each.
const CACHE_STEP: usize = 512;

#[derive(Debug)]
pub(super) struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    q_norm: Option<RmsNorm>,
    k_norm: Option<RmsNorm>,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    window: Option<usize>,
    cache: KvCache,
}

impl Attention {
    pub fn new(config: &Config, window: Option<usize>, vb: VarBuilder) -> Result<Self> {
        let (hidden, head_dim) = (config.hidden_size, config.head_dim);
        let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
        let project = |out, name| super::decoder::projection(hidden, out, config.qkv_bias, vb.pp(name));
        let norm = |name| {
            let vb = vb.pp(name);
            config.qk_norm.then(|| rms_norm(head_dim, config.rms_norm_eps, vb)).transpose()
        };
        Ok(Self {
            q_proj: project(heads * head_dim, "q_proj")?,
            k_proj: project(kv_heads * head_dim, "k_proj")?,
            v_proj: project(kv_heads * head_dim, "v_proj")?,
            o_proj: super::decoder::projection(
                heads * head_dim,
                hidden,
                config.output_bias,
                vb.pp("o_proj"),
            )?,
            q_norm: norm("q_norm")?,
            k_norm: norm("k_norm")?,
            heads,
            kv_heads,
            head_dim,
            window,
            cache: KvCache::new(2, CACHE_STEP),
        })
    }

    /// `x` is `[B, T, hidden]`, its first token at position `offset`, which is also how many tokens the
    /// cache holds.
    pub fn forward(&mut self, x: &Tensor, rotation: &Rotation, offset: usize) -> Result<Tensor> {
        let (batch, len, _) = x.dims3()?;
        let heads = |x: Tensor, heads| x.reshape((batch, len, heads, self.head_dim));
        let mut q = heads(self.q_proj.forward(x)?, self.heads)?;
        let mut k = heads(self.k_proj.forward(x)?, self.kv_heads)?;
        let v = heads(self.v_proj.forward(x)?, self.kv_heads)?;
        if let Some(norm) = &self.q_norm {
            q = norm.forward(&q)?;
        }
        if let Some(norm) = &self.k_norm {
            k = norm.forward(&k)?;
        }
        let (q, k) = (rotation.apply(&q)?, rotation.apply(&k)?);

        // The CPU has no half-precision matmul worth using: there the cache is f32 whatever the
        // activations are, so that no step converts all of it.
        let dtype = if x.device().is_cpu() { DType::F32 } else { x.dtype() };
        let by_head = |x: &Tensor| x.to_dtype(dtype)?.transpose(1, 2)?.contiguous();
        let (k, v) = self.cache.append(&by_head(&k)?, &by_head(&v)?)?;
        let y = self.attend(&by_head(&q)?, &k, &v, offset)?;
        y.to_dtype(x.dtype())?.apply(&self.o_proj)
    }

    /// Softmax(q k^T / sqrt(head_dim)) v for `q` `[B, heads, T, head_dim]`, `k` and `v`
    /// `[B, kv_heads, S, head_dim]`; the result is `[B, T, heads * head_dim]`.
    fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor, offset: usize) -> Result<Tensor> {
        let (batch, _, len, _) = q.dims4()?;
        // Keys no query of this run can see are left out; with one query that is the whole mask.
        let first = self.window.map_or(0, |window| (offset + 1).saturating_sub(window));
        let keys = offset + len - first;
        let (k, v) = (k.narrow(2, first, keys)?, v.narrow(2, first, keys)?);

        // The query heads that share a key head become rows of one matrix: keys are never repeated.
        let rows = self.heads / self.kv_heads * len;
        let scale = 1. / (self.head_dim as f64).sqrt();
        let q = (q * scale)?.reshape((batch, self.kv_heads, rows, self.head_dim))?;
        let mut scores = q.matmul(&k.t()?)?;
        if len > 1 {
            let mask = causal_mask(len, keys, offset - first, self.window, q.dtype(), q.device())?;
            scores = scores.reshape((batch, self.heads, len, keys))?.broadcast_add(&mask)?.reshape((
                batch,
                self.kv_heads,
                rows,
                keys,
            ))?;
        }
        let weights = candle_nn::ops::softmax_last_dim(&scores.to_dtype(DType::F32)?)?;
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
        [&self.q_proj, &self.k_proj, &self.v_proj, &self.o_proj].into_iter().map(Linear::weight)
    }
}

/// What is added to the scores `[.., len, keys]`: query i stands at key `offset + i` and sees itself
/// and the keys before it, at most `window` in all.
fn causal_mask(
    len: usize,
    keys: usize,
    offset: usize,
    window: Option<usize>,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    let window = window.unwrap_or(usize::MAX);
    let values: Vec<f32> = (offset..offset + len)
        .flat_map(|query| {
            (0..keys).map(move |key| match query.checked_sub(key) {
                Some(distance) if distance < window => 0.,
                _ => f32::NEG_INFINITY,
            })
        })
        .collect();
    Tensor::from_vec(values, (len, keys), device)?.to_dtype(dtype)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mask_is_causal_and_windowed() {
        let x = f32::NEG_INFINITY;
        let mask = |offset, window| {
            causal_mask(2, offset + 2, offset, window, DType::F32, &Device::Cpu)
                .and_then(|mask| mask.to_vec2::<f32>())
                .unwrap()
        };
        assert_eq!(mask(0, None), [[0., x], [0., 0.]]);
        assert_eq!(mask(2, None), [[0., 0., 0., x], [0., 0., 0., 0.]]);
        assert_eq!(mask(2, Some(2)), [[x, 0., 0., x], [x, x, 0., 0.]]);
    }
}
