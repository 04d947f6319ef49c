//! What ranks do together.

use crate::{Error, Result};
use candle_core::Tensor;
use std::fmt;

/// The operations of a group of ranks, as one rank of them calls them.
///
/// Every rank has to call the same operations in the same order. Each returns when all ranks have come (with
/// NCCL, as soon as the GPU knows what to do), with a result on the device of the argument, or with the error of
/// whichever rank failed.
pub trait Collective: fmt::Debug + Send + Sync {
    /// Which rank this is, from 0 on.
    fn index(&self) -> usize;

    /// How many ranks there are.
    fn world_size(&self) -> usize;

    /// The sum of the `x` of all ranks, which have one shape and dtype: the same bits on every rank. Between
    /// threads summed in the order of ranks, F16 and BF16 in f32 and rounded once, alike in every run. NCCL
    /// chooses an order by sizes and wires, and adds F16 and BF16 as such, rounding each time.
    ///
    /// # Errors
    /// If a rank fails or does not come, or ranks call different operations.
    fn all_reduce_sum(&self, x: &Tensor) -> Result<Tensor>;

    /// The `x` of all ranks, joined along `dim` in the order of ranks. Sizes along `dim` may differ.
    ///
    /// # Errors
    /// As those of [`all_reduce_sum`](Collective::all_reduce_sum).
    fn all_gather(&self, x: &Tensor, dim: usize) -> Result<Tensor>;

    /// This rank's share along `dim` of what [`all_reduce_sum`](Collective::all_reduce_sum) gives: as even
    /// shares as possible, the larger ones first.
    ///
    /// # Errors
    /// As those of [`all_reduce_sum`](Collective::all_reduce_sum); if there are fewer entries than ranks.
    fn reduce_scatter(&self, x: &Tensor, dim: usize) -> Result<Tensor>;

    /// The `x` of the rank `root`; all ranks pass one of the same shape and dtype.
    ///
    /// # Errors
    /// As those of [`all_reduce_sum`](Collective::all_reduce_sum); if there is no such rank.
    fn broadcast(&self, x: &Tensor, root: usize) -> Result<Tensor>;

    /// Waits until every rank is here.
    ///
    /// # Errors
    /// As those of [`all_reduce_sum`](Collective::all_reduce_sum).
    fn barrier(&self) -> Result<()>;
}

/// An error about an argument that no group could serve.
pub(super) fn wrong_dim(x: &Tensor, dim: usize) -> Error {
    Error::mismatch("dimension of a collective", format!("one of {:?}", x.dims()), dim.to_string())
}

/// An error about a rank that is none of the group.
pub(super) fn no_rank(rank: usize) -> Error {
    Error::mismatch("rank", "one of the group", rank.to_string())
}
