//! The low-rank update of one weight.

use super::super::LayerWeight;
use crate::{Error, Result};
use candle_core::Tensor;

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
    /// Checks that it fits a weight of these dimensions: `[N, K]` or `[E, N, K]`.
    pub(super) fn check(&self, dims: &[usize]) -> Result<()> {
        let [stack @ .., n, k] = dims else {
            return Err(Error::mismatch("weight of an adapter", "[N, K] or [E, N, K]", format!("{dims:?}")));
        };
        let rank = self.a.dims().iter().rev().nth(1).copied().unwrap_or_default();
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
        match &self.magnitude {
            Some(magnitude) => check("magnitude", magnitude, [stack, &[*n]].concat()),
            None => Ok(()),
        }
    }

    /// What it adds to `y`, the output `[.., N]` of the frozen layer for `x` `[.., K]`.
    pub(super) fn forward(&self, x: &Tensor, _weight: &LayerWeight) -> candle_core::Result<Tensor> {
        let dims = x.dims();
        let (k, outer) = dims.split_last().map_or((0, dims), |(k, outer)| (*k, outer));
        let rows = x.to_dtype(self.a.dtype())?.reshape(((), k))?;
        let update = (rows.matmul(&self.a.t()?)?.matmul(&self.b.t()?)? * self.scale)?;
        update.reshape([outer, &[self.b.dim(0)?]].concat())
    }
}
