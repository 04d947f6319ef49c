//! Lengths of the rows of a weight and of its sum with an update, which DoRA needs.

use super::super::dense_rows::map_rows;
use super::super::LayerWeight;
use super::Lora;
use crate::distributed::Rank;
use crate::{ActivationPrecision, Result};
use candle_core::{DType, Tensor};
use std::ops::Range;

/// The columns that a rank answers for, if others have other ones.
#[derive(Clone, Debug)]
pub(crate) struct OwnColumns {
    pub rank: Rank,
    /// Of those that it has loaded: beside them may be some of groups that it shares with another rank.
    pub own: Range<usize>,
}

impl OwnColumns {
    /// A tensor `[.., K]` with zeros in the columns of other ranks.
    fn masked(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let last = x.rank().saturating_sub(1);
        let loaded = x.dim(last)?;
        let own = x.narrow(last, self.own.start, self.own.len())?;
        own.pad_with_zeros(last, self.own.start, loaded.saturating_sub(self.own.end))
    }
}

/// The sums of the squares of each row, `[N]` in F32, over the columns of all ranks.
pub(super) fn squares(weight: &LayerWeight, columns: Option<&OwnColumns>) -> Result<Tensor> {
    let parts = map_rows(weight, |chunk, _| match columns {
        Some(columns) => chunk.narrow(1, columns.own.start, columns.own.len())?.sqr()?.sum(1),
        None => chunk.sqr()?.sum(1),
    })?;
    over_ranks(Tensor::cat(&parts, 0)?, columns)
}

/// The lengths of the rows of `W + scale B A`, `[N]` in F32, of which `squares` are those of `W`.
///
/// The square is `|w|^2 + 2 scale b (A w) + scale^2 b (A A^T) b^T` for a row `w` of W and its row `b` of B.
pub(super) fn updated(
    weight: &LayerWeight,
    squares: &Tensor,
    lora: &Lora,
    columns: Option<&OwnColumns>,
) -> Result<Tensor> {
    let f32 = |tensor: &Tensor| tensor.detach().to_dtype(DType::F32);
    let (a, b) = (f32(&lora.a)?, f32(&lora.b)?);
    let a = columns.map_or(Ok(a.clone()), |columns| columns.masked(&a))?;
    let (rank, n) = (lora.rank(), b.dim(0)?);
    // [rank, N + rank], so that ranks sum once.
    let products = Tensor::cat(&[a_times(weight, &a)?, a.matmul(&a.t()?)?], 1)?;
    let products = over_ranks(products, columns)?;
    let (cross, gram) = (products.narrow(1, 0, n)?.t()?, products.narrow(1, n, rank)?);
    let cross = ((&b * cross)?.sum(1)? * (2. * lora.scale))?;
    let square = ((b.matmul(&gram.contiguous()?)? * &b)?.sum(1)? * (lora.scale * lora.scale))?;
    // Rounding can make a length of nothing negative.
    Ok(((squares + cross)? + square)?.relu()?.sqrt()?)
}

/// `A W^T`, `[rank, N]`.
fn a_times(weight: &LayerWeight, a: &Tensor) -> Result<Tensor> {
    // Activations may be rounded on request: A is no activation.
    match (weight, ActivationPrecision::current()) {
        (LayerWeight::Quantized(weight), ActivationPrecision::Exact) => return Ok(weight.matmul(a, None)?),
        (LayerWeight::Reordered(weight), ActivationPrecision::Exact) => return Ok(weight.matmul(a, None)?),
        (LayerWeight::ColumnScaled(weight), ActivationPrecision::Exact) => return Ok(weight.matmul(a, None)?),
        _ => {}
    }
    let parts = map_rows(weight, |chunk, _| a.matmul(&chunk.t()?))?;
    Ok(Tensor::cat(&parts, 1)?)
}

fn over_ranks(sum: Tensor, columns: Option<&OwnColumns>) -> Result<Tensor> {
    columns.map_or(Ok(sum.clone()), |columns| columns.rank.all_reduce_sum(&sum))
}
