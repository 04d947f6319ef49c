//! The low-rank update of one weight.

use crate::{Error, Result};
use candle_core::{DType, IndexOp, Tensor};

/// The low-rank update of a weight `W` `[N, K]`, which becomes `W + scale * B A` (Hu et al. 2021, LoRA).
///
/// With a magnitude it is DoRA's (Liu et al. 2024): row n of the sum is given the length `magnitude[n]`.
#[derive(Clone, Debug)]
pub struct Lora {
    /// `A`, `[rank, K]`, or `[E, rank, K]` for a stack of experts.
    pub a: Tensor,
    /// `B`, `[N, rank]`, or `[E, N, rank]`.
    pub b: Tensor,
    /// What `B A` is multiplied by: `alpha / rank`, or `alpha / sqrt(rank)` for rsLoRA (Kalajdzievski 2023).
    pub scale: f64,
    /// DoRA's lengths of the rows, `[N]`.
    pub magnitude: Option<Tensor>,
}

impl Lora {
    /// Rows of A.
    pub fn rank(&self) -> usize {
        self.a.dims().iter().rev().nth(1).copied().unwrap_or_default()
    }

    /// Checks that it fits a weight of these dimensions: `[N, K]` or `[E, N, K]`.
    pub(super) fn check(&self, dims: &[usize]) -> Result<()> {
        let [stack @ .., n, k] = dims else {
            return Err(Error::mismatch("weight of an adapter", "[N, K] or [E, N, K]", format!("{dims:?}")));
        };
        let rank = self.rank();
        let check = |what: &str, tensor: &Tensor, expected: Vec<usize>| match tensor.dims() == expected {
            true => Ok(()),
            false => Err(Error::mismatch(
                format!("{what} of an adapter of rank {rank}"),
                format!("shape {expected:?}"),
                format!("{:?}", tensor.dims()),
            )),
        };
        check("A", &self.a, [stack, &[rank, *k]].concat())?;
        check("B", &self.b, [stack, &[*n, rank]].concat())?;
        if rank == 0 {
            return Err(Error::mismatch("rank of an adapter", "1 or more", "0"));
        }
        if !self.scale.is_finite() {
            return Err(Error::mismatch("scale of an adapter", "a finite number", self.scale.to_string()));
        }
        match &self.magnitude {
            Some(magnitude) => check("magnitude", magnitude, [stack, &[*n]].concat()),
            None => Ok(()),
        }
    }

    /// Whether a gradient of any of its tensors may be asked for.
    pub(super) fn is_trained(&self) -> bool {
        self.a.track_op() || self.b.track_op() || self.magnitude.as_ref().is_some_and(Tensor::track_op)
    }

    /// The update of one expert of a stack.
    pub(super) fn expert(&self, index: usize) -> candle_core::Result<Self> {
        let magnitude = self.magnitude.as_ref().map(|magnitude| magnitude.i(index)).transpose()?;
        Ok(Self { a: self.a.i(index)?, b: self.b.i(index)?, scale: self.scale, magnitude })
    }

    /// `scale * x (B A)^T` for `x` `[.., K]`.
    pub(super) fn update(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let dims = x.dims();
        let (k, outer) = dims.split_last().map_or((0, dims), |(k, outer)| (*k, outer));
        let rows = x.to_dtype(self.a.dtype())?.reshape(((), k))?;
        // The scale on the smaller one.
        let inner = (rows.matmul(&self.a.t()?)? * self.scale)?;
        inner.matmul(&self.b.t()?)?.reshape([outer, &[self.b.dim(0)?]].concat())
    }

    /// The layer's output with the update, of `y`, that without it. `rescale` is what DoRA multiplies rows by, `[N]`.
    pub(super) fn apply(
        &self,
        x: &Tensor,
        y: &Tensor,
        bias: Option<&Tensor>,
        rescale: Option<&Tensor>,
    ) -> candle_core::Result<Tensor> {
        let update = self.update(x)?;
        let Some(rescale) = rescale else { return y + update.to_dtype(y.dtype())? };
        let y_f32 = y.to_dtype(DType::F32)?;
        let bias = bias.map(|bias| bias.to_dtype(DType::F32)).transpose()?;
        let without_bias = match &bias {
            Some(bias) => y_f32.broadcast_sub(bias)?,
            None => y_f32,
        };
        let rescaled = (without_bias + update.to_dtype(DType::F32)?)?.broadcast_mul(rescale)?;
        match &bias {
            Some(bias) => rescaled.broadcast_add(bias)?,
            None => rescaled,
        }
        .to_dtype(y.dtype())
    }
}
