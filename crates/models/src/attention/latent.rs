//! Multi-head latent attention: keys and values of all heads are made of one latent vector for each token, which is all that
//! the cache holds.
//!
//! With keys `K_h c` of a latent `c`, `q_h · K_h c` is `K_h^T q_h · c`: queries are turned into latents, and every head attends
//! to the same keys. Values are the latents, too; what a head sees of them is projected afterwards, by `V_h`.

use crate::config::{Latents, LayerRope};
use crate::norm::{Norm, NormKind};
use crate::projection::{columns_of, projection};
use crate::rope::Positions;
use crate::Config;
use candle_core::{Result, Tensor, D};
use candle_nn::Module;
use candle_quant::nn::{LayerWeight, Linear, VarBuilder};
use std::ops::Range;

/// The norms of latents know no number of the config.
const EPS: f64 = 1e-6;

/// The projections of latent attention, of some heads.
#[derive(Debug)]
pub(super) struct LatentInputs {
    sizes: Latents,
    heads: usize,
    queries: Queries,
    /// To the latent of a token, and to the part of a key that turns.
    kv_down: Linear,
    kv_norm: Norm,
    /// `K_h`, `[heads, key_dim, latent]`.
    keys: Tensor,
    /// `V_h^T`, `[heads, latent, value_dim]`.
    values: Tensor,
}

#[derive(Debug)]
enum Queries {
    One(Linear),
    Two { down: Linear, norm: Box<Norm>, up: Linear },
}

impl LatentInputs {
    /// `own` are the heads of this rank.
    pub fn new(config: &Config, sizes: Latents, own: &Range<usize>, vb: &VarBuilder) -> Result<Self> {
        let (hidden, heads) = (config.hidden_size, config.num_attention_heads);
        let rows = |size: usize| own.start * size..own.end * size;
        let bias = config.qkv_bias;
        let of_heads = |inputs, name| {
            let size = config.head_dim;
            columns_of(inputs, heads * size, rows(size), false, vb.pp(name))
        };
        let queries = match sizes.query_latent {
            None => Queries::One(of_heads(hidden, "q_proj")?),
            Some(latent) => Queries::Two {
                down: projection(hidden, latent, bias, vb.pp("q_a_proj"))?,
                norm: Norm::new(NormKind::Rms, latent, EPS, vb.pp("q_a_layernorm"))?.into(),
                up: of_heads(latent, "q_b_proj")?,
            },
        };
        let (keys, values) = up(heads, sizes, own, vb)?;
        Ok(Self {
            sizes,
            heads: own.len(),
            queries,
            kv_down: projection(hidden, sizes.cached(), bias, vb.pp("kv_a_proj_with_mqa"))?,
            kv_norm: Norm::new(NormKind::Rms, sizes.latent, EPS, vb.pp("kv_a_layernorm"))?,
            keys,
            values,
        })
    }

    /// Queries `[B, T, heads, cached]`, and keys and values `[B, T, 1, cached]`: those have zeros for the part that turns.
    pub fn project(&self, x: &Tensor, at: (&Positions, LayerRope)) -> Result<[Tensor; 3]> {
        let (batch, len, _) = x.dims3()?;
        let Latents { latent, key_dim, turning, .. } = self.sizes;
        let q = match &self.queries {
            Queries::One(linear) => linear.forward(x)?,
            Queries::Two { down, norm, up } => up.forward(&norm.forward(&down.forward(x)?)?)?,
        };
        let q = q.reshape((batch, len, self.heads, key_dim + turning))?;
        let q_latent = by_heads(&q.narrow(D::Minus1, 0, key_dim)?, &self.keys)?;
        let kv = self.kv_down.forward(x)?;
        let c = self.kv_norm.forward(&kv.narrow(D::Minus1, 0, latent)?.contiguous()?)?.unsqueeze(2)?;
        let k_turning = kv.narrow(D::Minus1, latent, turning)?.unsqueeze(2)?;
        let q_turning = q.narrow(D::Minus1, key_dim, turning)?;
        let (positions, rope) = at;
        let [q_turning, k_turning] =
            positions.place(rope, q_turning.contiguous()?, k_turning.contiguous()?)?;
        let joined = |a: &Tensor, b: &Tensor| Tensor::cat(&[a, b], D::Minus1);
        let zeros = k_turning.zeros_like()?;
        Ok([joined(&q_latent, &q_turning)?, joined(&c, &k_turning)?, joined(&c, &zeros)?])
    }

    /// What heads see, `[B, T, heads * cached]`, as their values, `[B, T, heads * value_dim]`.
    pub fn finish(&self, y: &Tensor) -> Result<Tensor> {
        let (batch, len, _) = y.dims3()?;
        let y = y.reshape((batch, len, self.heads, self.sizes.cached()))?;
        by_heads(&y.narrow(D::Minus1, 0, self.sizes.latent)?, &self.values)?.flatten_from(2)
    }

    pub fn weights(&self) -> impl Iterator<Item = LayerWeight> + '_ {
        let queries = match &self.queries {
            Queries::One(linear) => vec![linear],
            Queries::Two { down, up, .. } => vec![down, up],
        };
        let linears = queries.into_iter().chain([&self.kv_down]).map(|linear| linear.weight().clone());
        linears.chain([&self.keys, &self.values].map(|weight| LayerWeight::from(weight.clone())))
    }
}

/// `x` `[B, T, heads, a]` times `[heads, a, b]`, head by head: `[B, T, heads, b]`.
fn by_heads(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let (batch, len, heads, size) = x.dims4()?;
    let x = x.permute((2, 0, 1, 3))?.contiguous()?.reshape((heads, batch * len, size))?;
    let y = x.matmul(weight)?;
    y.reshape((heads, batch, len, ()))?.permute((1, 2, 0, 3))?.contiguous()
}

/// The projections of latents to keys and values, dense: `kv_b_proj` has both for each head; mlx-lm writes them apart, those
/// of keys transposed.
fn up(heads: usize, sizes: Latents, own: &Range<usize>, vb: &VarBuilder) -> Result<(Tensor, Tensor)> {
    let Latents { latent, key_dim, value_dim, .. } = sizes;
    if vb.pp("embed_q").contains_tensor("weight") {
        let stack = |name: &str, n: usize, k: usize| {
            vb.pp(name).decoded_part(&[heads, n, k], &[own.clone(), 0..n, 0..k])
        };
        let (keys, values) = (stack("embed_q", latent, key_dim)?, stack("unembed_out", value_dim, latent)?);
        return Ok((keys.transpose(1, 2)?.contiguous()?, values.transpose(1, 2)?.contiguous()?));
    }
    let size = key_dim + value_dim;
    let rows = own.start * size..own.end * size;
    let both = vb.pp("kv_b_proj").decoded_part(&[heads * size, latent], &[rows, 0..latent])?;
    let both = both.reshape((own.len(), size, latent))?;
    let values = both.narrow(1, key_dim, value_dim)?.transpose(1, 2)?.contiguous()?;
    Ok((both.narrow(1, 0, key_dim)?.contiguous()?, values))
}
