//! Attention of whole texts, with gradients of queries, keys and values.

use super::on_device::{weights_of_keys, OnDevice, Scores, Visible};
use super::{options, Attention, Cache};
use crate::config::{LayerRope, Window};
use crate::differentiable::of_three;
use crate::options::CacheOptions;
use crate::rope::Positions;
use candle_core::{DType, Result, Tensor, D};
use candle_quant::ops;
use candle_quant::{KvCache, KvCacheConfig};

/// Scores that a backward pass holds at once: 4 MiB each of what it makes of them.
const SCORES: usize = 1 << 20;

impl Attention {
    /// As [`forward`](Attention::forward), of texts from their first token on, without the cache. `window` is how many
    /// tokens one sees. Gradients flow to `x`, `residual` and adapters.
    pub fn forward_whole(
        &self,
        x: &Tensor,
        residual: Option<&Tensor>,
        at: (&Positions, LayerRope),
        window: Option<Window>,
    ) -> Result<Tensor> {
        let ([q, k, v], gate) = self.project(x, at)?;
        let tracked = [&q, &k, &v].into_iter().any(Tensor::track_op);
        let value = self.attend_whole([&q, &k, &v].map(Tensor::detach), window)?;
        let y = match tracked {
            false => value,
            true => {
                let shape = Heads {
                    scale: self.scale,
                    softcap: self.softcap,
                    window,
                    sinks: self.sinks.clone(),
                    scores: SCORES,
                };
                of_three([&q, &k, &v], value, move |operands, grad| shape.backward(operands, grad))?
            }
        };
        self.output(&y, gate.as_ref(), residual)
    }

    /// Attention with a cache that nobody else has, of the activations' dtype: gradients are those of what is computed.
    fn attend_whole(&self, [q, k, v]: [Tensor; 3], window: Option<Window>) -> Result<Tensor> {
        let config = match &self.cache {
            Cache::OnCpu(cache) => cache.config(),
            Cache::OnDevice(OnDevice { cache }) => cache.config(),
        };
        let (keys, values) = CacheOptions::default().formats(q.dtype());
        let config = KvCacheConfig { keys, values, max_tokens: usize::MAX, ..*config };
        match &self.cache {
            Cache::OnCpu(_) => {
                let options = options(self.scale, self.softcap, self.sinks.as_ref());
                Ok(ops::attention(&q, &k, &v, &mut KvCache::new(config)?, options)?)
            }
            Cache::OnDevice(_) => {
                let visible = Visible::new(0, q.dim(1)?, window, q.device());
                let scores = Scores { scale: self.scale, softcap: self.softcap, sinks: self.sinks.as_ref() };
                OnDevice::new(config, q.device())?.attend([&q, &k, &v], Some(&visible), &scores)
            }
        }
    }
}

/// What attention does to queries, keys and values.
struct Heads {
    scale: f64,
    softcap: Option<f64>,
    window: Option<Window>,
    sinks: Option<Tensor>,
    /// How many scores a backward pass holds at once.
    scores: usize,
}

impl Heads {
    /// The gradients of `q` `[B, T, heads, head_dim]`, `k` and `v` `[B, T, kv_heads, head_dim]` for that of the output. Scores
    /// are computed again, for a few queries at a time: no matrix of all of them exists.
    fn backward(&self, [q, k, v]: [&Tensor; 3], grad: &Tensor) -> Result<[Tensor; 3]> {
        let (batch, len, heads, head_dim) = q.dims4()?;
        let kv_heads = k.dim(2)?;
        let shared = heads / kv_heads;
        let by_head = |x: &Tensor| x.to_dtype(DType::F32)?.transpose(1, 2)?.contiguous();
        let by_key = |x: &Tensor| by_head(x)?.reshape((batch, kv_heads, shared, len, head_dim));
        let (scaled, k, v) = (by_key(&(q * self.scale)?)?, by_head(k)?, by_head(v)?);
        let grad = by_key(&grad.reshape(q.shape())?)?;
        let (mut of_q, mut of_k, mut of_v) = (Vec::new(), k.zeros_like()?, v.zeros_like()?);
        let step = (self.scores / (batch * heads * len).max(1)).clamp(1, len.max(1));
        for start in (0..len).step_by(step) {
            let count = step.min(len - start);
            let visible = Visible::new(start, count, self.window, q.device());
            let (first, keys) = (visible.first, visible.keys);
            let part = |x: &Tensor| {
                x.narrow(3, start, count)?.contiguous()?.reshape((batch, kv_heads, shared * count, head_dim))
            };
            let (scaled, grad) = (part(&scaled)?, part(&grad)?);
            let seen = |x: &Tensor| x.narrow(2, first, keys)?.contiguous();
            let (k, v) = (seen(&k)?, seen(&v)?);
            let how = Scores { scale: self.scale, softcap: self.softcap, sinks: self.sinks.as_ref() };
            let weights = weights_of_keys(&scaled, &k, count, visible.mask()?, &how)?;
            let of_weights = (grad.matmul(&v.t()?)? * &weights)?;
            let sums = of_weights.sum_keepdim(D::Minus1)?;
            let mut of_scores = (of_weights - weights.broadcast_mul(&sums)?)?;
            if let Some(cap) = self.softcap {
                // The derivative of a capped score is 1 - (score / cap)^2.
                let capped = how.capped(scaled.matmul(&k.t()?)?)?;
                of_scores = (of_scores * (capped / cap)?.sqr()?.affine(-1., 1.)?)?;
            }
            let in_place = |x: Tensor| x.pad_with_zeros(2, first, len - first - keys);
            of_v = (of_v + in_place(weights.t()?.matmul(&grad)?)?)?;
            of_k = (of_k + in_place(of_scores.t()?.matmul(&scaled)?)?)?;
            let of_part = (of_scores.matmul(&k)? * self.scale)?;
            of_q.push(of_part.reshape((batch, kv_heads, shared, count, head_dim))?);
        }
        let of_q = Tensor::cat(&of_q, 3)?.reshape((batch, heads, len, head_dim))?;
        let by_token = |x: Tensor| x.transpose(1, 2)?.contiguous()?.to_dtype(q.dtype());
        Ok([by_token(of_q)?, by_token(of_k)?, by_token(of_v)?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Var};

    /// Five texts of seven tokens, four heads on two key heads.
    fn operands() -> [Var; 3] {
        [(4, 0.3), (2, 1.1), (2, 2.3)].map(|(heads, phase)| {
            let count = 5 * 7 * heads * 8;
            let values: Vec<f32> = (0..count).map(|i| (i as f32 * 0.71 + phase).sin() * 2.).collect();
            Var::from_vec(values, (5, 7, heads, 8), &Device::Cpu).unwrap()
        })
    }

    /// Attention in operations that candle differentiates.
    fn plain([q, k, v]: [&Tensor; 3], heads: &Heads) -> Result<Tensor> {
        let by_head = |x: &Tensor| x.transpose(1, 2)?.contiguous();
        let repeated = |x: &Tensor| {
            let x = by_head(x)?.unsqueeze(2)?.repeat((1, 1, 2, 1, 1))?;
            x.reshape((5, 4, 7, 8))
        };
        let scores = (by_head(q)?.matmul(&repeated(k)?.t()?)? * heads.scale)?;
        let visible = Visible::new(0, 7, heads.window, &Device::Cpu);
        let how = Scores { scale: heads.scale, softcap: heads.softcap, sinks: None };
        let mut scores = how.capped(scores)?.broadcast_add(visible.mask()?.unwrap())?;
        if let Some(sinks) = &heads.sinks {
            let sinks = sinks.reshape((1, 4, 1, 1))?.broadcast_as((5, 4, 7, 1))?;
            scores = Tensor::cat(&[&scores, &sinks.contiguous()?], D::Minus1)?;
        }
        let weights = candle_nn::ops::softmax(&scores, D::Minus1)?.narrow(D::Minus1, 0, 7)?;
        weights.contiguous()?.matmul(&repeated(v)?)?.transpose(1, 2)?.flatten_from(D::Minus2)
    }

    #[test]
    fn gradients_are_those_of_candles_operations() {
        let sinks = Tensor::new(&[0.5f32, -1., 2., 0.], &Device::Cpu).unwrap();
        let vars = operands();
        let operands = vars.each_ref().map(|var| var.as_tensor());
        let factor = Tensor::arange(0f32, 5. * 7. * 32., &Device::Cpu).unwrap().cos().unwrap();
        let factor = factor.reshape((5, 7, 32)).unwrap();
        let sliding = |tokens| Some(Window { tokens, is_chunked: false });
        for (softcap, window, sinks) in [
            (None, None, None),
            (None, sliding(3), None),
            (None, sliding(1), Some(sinks.clone())),
            (None, Some(Window { tokens: 3, is_chunked: true }), None),
            (None, None, Some(sinks.clone())),
            (Some(1.5), sliding(3), Some(sinks)),
            (Some(0.5), None, None),
        ] {
            // All queries at once, three at a time, and one at a time.
            for scores in [1 << 20, 3 * 5 * 4 * 7, 1] {
                let heads = Heads { scale: 0.4, softcap, window, sinks: sinks.clone(), scores };
                let value = plain(operands, &heads).unwrap();
                let expected = (&value * &factor).unwrap().sum_all().unwrap().backward().unwrap();
                let detached = vars.each_ref().map(|var| var.as_detached_tensor());
                let found = heads.backward(detached.each_ref(), &factor).unwrap();
                for (found, var) in found.iter().zip(&vars) {
                    let far = (found - expected.get(var).unwrap()).unwrap().abs().unwrap();
                    let far = far.max_all().unwrap().to_scalar::<f32>().unwrap();
                    assert!(far < 2e-5, "window {window:?}, sinks {:?}, {scores} scores: {far}", heads.sinks);
                }
            }
        }
    }
}
