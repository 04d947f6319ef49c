//! Angles of a run of positions, applied to queries and keys.

use crate::differentiable;
use candle_core::{DType, Device, Result, Tensor, D};
use std::ops::Range;

/// Cosines and sines for one run of positions, shared by all layers of a forward pass.
pub(crate) struct Rotation {
    cos: Tensor,
    sin: Tensor,
    rotary_dim: usize,
    interleaved: bool,
}

impl Rotation {
    /// Tables `[tokens, pairs]` for these positions. Angles are f32 products, as in
    /// the implementations the models were trained with; the tables, times `factor`, are then rounded to
    /// `dtype`.
    pub fn new(
        (inverse_frequencies, interleaved): (&[f32], bool),
        factor: f32,
        tokens: Range<usize>,
        (dtype, device): (DType, &Device),
    ) -> Result<Self> {
        let table = |f: fn(f32) -> f32| {
            let values: Vec<f32> = tokens
                .clone()
                .flat_map(|position| {
                    inverse_frequencies.iter().map(move |frequency| f(position as f32 * frequency) * factor)
                })
                .collect();
            Tensor::from_vec(values, (tokens.len(), inverse_frequencies.len()), device)?.to_dtype(dtype)
        };
        let (cos, sin) = (table(f32::cos)?, table(f32::sin)?);
        Ok(Self { cos, sin, rotary_dim: 2 * inverse_frequencies.len(), interleaved })
    }

    /// Rotates `x`, `[B, T, heads, head_dim]`, of which the first `rotary_dim` elements turn. Neighbours that were pairs
    /// are apart then, in queries as in keys: their products are the same.
    pub fn apply(&self, x: &Tensor) -> Result<Tensor> {
        let head_dim = x.dim(D::Minus1)?;
        let turning = match head_dim == self.rotary_dim {
            true => x.clone(),
            false => x.narrow(D::Minus1, 0, self.rotary_dim)?,
        };
        let turning = match self.interleaved {
            false => turning,
            true => {
                let (batch, len, heads, dim) = turning.dims4()?;
                let pairs = turning.reshape((batch, len, heads, dim / 2, 2))?;
                pairs.transpose(3, 4)?.reshape((batch, len, heads, dim))?
            }
        };
        let turned = differentiable::rotate(&turning.contiguous()?, self)?;
        match head_dim == self.rotary_dim {
            true => Ok(turned),
            false => {
                let rest = x.narrow(D::Minus1, self.rotary_dim, head_dim - self.rotary_dim)?;
                Tensor::cat(&[turned, rest], D::Minus1)
            }
        }
    }

    /// The rotation back, times the same factor: that of gradients.
    pub fn inverse(&self) -> Result<Self> {
        Ok(Self { cos: self.cos.clone(), sin: self.sin.neg()?, ..*self })
    }

    /// Rotates halves of whole heads.
    pub fn turn(&self, x: &Tensor) -> Result<Tensor> {
        candle_nn::rotary_emb::rope_thd(x, &self.cos, &self.sin)
    }
}
