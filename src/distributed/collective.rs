//! What ranks do together.

use crate::{Error, Result};
use candle_core::{DType, Tensor};
use std::ffi::c_void;
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

    /// Calls `work` with the group's operations in streams, unless a rank has failed; none may end the group before `work`
    /// returns. None, which is the default, if there are no such operations. With them, [plans](crate::step::StepPlan)
    /// of several ranks run on their devices.
    fn in_streams(&self, work: &mut dyn FnMut(&dyn StreamCollective) -> Result<()>) -> Option<Result<()>> {
        let _ = work;
        None
    }
}

/// What a [`Collective`] does with memory of its device, in the order of a stream: operations that a CUDA graph can hold. As there,
/// every rank calls the same ones in the same order. Each returns when the stream knows what to do.
pub trait StreamCollective {
    /// Replaces the `count` numbers at the address `numbers` by their sums over all ranks.
    ///
    /// # Errors
    /// If the dtype is none of F32, F16 and BF16, or the device fails.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the device, whose context is the thread's. At the address is memory of the device for so many
    /// numbers, and nothing else uses it until the stream has passed. If the stream is capturing, that holds whenever the
    /// graph runs.
    unsafe fn all_reduce_sum(
        &self,
        numbers: u64,
        count: usize,
        dtype: DType,
        stream: *mut c_void,
    ) -> Result<()>;

    /// Joins rows of which each rank has a part, in the order of ranks: `counts` are the numbers of each part. The parts of
    /// `row_count` rows are at the first address, the rows will be at the second.
    ///
    /// # Errors
    /// As those of [`all_reduce_sum`](Self::all_reduce_sum).
    ///
    /// # Safety
    /// As that of [`all_reduce_sum`](Self::all_reduce_sum), for the rows at both addresses.
    unsafe fn all_gather(
        &self,
        parts_and_rows: [u64; 2],
        row_count: usize,
        counts: &[usize],
        dtype: DType,
        stream: *mut c_void,
    ) -> Result<()>;
}

/// An error about an argument that no group could serve.
pub(super) fn wrong_dim(x: &Tensor, dim: usize) -> Error {
    Error::mismatch("dimension of a collective", format!("one of {:?}", x.dims()), dim.to_string())
}

/// An error about a rank that is none of the group.
pub(super) fn no_rank(rank: usize) -> Error {
    Error::mismatch("rank", "one of the group", rank.to_string())
}
