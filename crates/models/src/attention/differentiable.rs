//! Attention of whole texts, with gradients of queries, keys and values.

use super::on_device::{weights_of_keys, OnDevice, Visible};
use super::{Attention, Cache};
use crate::differentiable::of_three;
use crate::rope::Rotation;
use candle_core::{DType, Result, Tensor, D};
use candle_quant::ops::{self, AttentionOptions};
use candle_quant::KvCache;

/// Scores that a backward pass holds at once: 4 MiB each of what it makes of them.
const SCORES: usize = 1 << 20;

impl Attention {
    /// As [`forward`](Attention::forward), of texts from their first token on, without the cache. `window` is how many
    /// tokens one sees. Gradients flow to `x`, `residual` and adapters.
    pub fn forward_whole(
        &self,
        x: &Tensor,
        residual: &Tensor,
        rotation: &Rotation,
        window: Option<usize>,
    ) -> Result<Tensor> {
        let [q, k, v] = self.project(x, rotation)?;
        let tracked = [&q, &k, &v].into_iter().any(Tensor::track_op);
        let value = self.attend_whole([&q, &k, &v].map(Tensor::detach), window)?;
        let y = match tracked {
            false => value,
            true => {
                let shape = Heads { scale: self.scale(), window, sinks: self.sinks.clone() };
                of_three([&q, &k, &v], value, move |operands, grad| shape.backward(operands, grad))?
            }
        };
        self.o_proj.forward_add(&y, residual)
    }

    /// Attention with a cache that nobody else has.
    fn attend_whole(&self, [q, k, v]: [Tensor; 3], window: Option<usize>) -> Result<Tensor> {
        match &self.cache {
            Cache::OnCpu(cache) => {
                let options = AttentionOptions {
                    scale: self.scale() as f32,
                    sinks: self.sinks.as_ref(),
                    ..Default::default()
                };
                Ok(ops::attention(&q, &k, &v, &mut KvCache::new(*cache.config())?, options)?)
            }
            Cache::OnDevice(_) => {
                let visible = Visible::new(0, q.dim(1)?, window, q.device())?;
                OnDevice::new().attend([&q, &k, &v], Some(&visible), self.scale(), self.sinks.as_ref())
            }
        }
    }
}

/// What attention does to queries, keys and values.
struct Heads {
    scale: f64,
    window: Option<usize>,
    sinks: Option<Tensor>,
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
        let step = (SCORES / (batch * heads * len).max(1)).clamp(1, len.max(1));
        for start in (0..len).step_by(step) {
            let count = step.min(len - start);
            let Visible { first, keys, mask } = Visible::new(start, count, self.window, q.device())?;
            let part = |x: &Tensor| {
                x.narrow(3, start, count)?.contiguous()?.reshape((batch, kv_heads, shared * count, head_dim))
            };
            let (scaled, grad) = (part(&scaled)?, part(&grad)?);
            let seen = |x: &Tensor| x.narrow(2, first, keys)?.contiguous();
            let (k, v) = (seen(&k)?, seen(&v)?);
            let weights = weights_of_keys(&scaled, &k, count, mask.as_ref(), self.sinks.as_ref())?;
            let of_weights = (grad.matmul(&v.t()?)? * &weights)?;
            let sums = of_weights.sum_keepdim(D::Minus1)?;
            let of_scores = (of_weights - weights.broadcast_mul(&sums)?)?;
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
