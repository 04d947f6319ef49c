//! Tensor parallelism: several ranks, each on a device of its own and with its slices of the weights, compute
//! one model together.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_quant::parallel;
//!
//! let devices = [Device::Cpu, Device::Cpu, Device::Cpu];
//! let sums = parallel::run(&devices, |rank| {
//!     let x = Tensor::new(&[rank.index() as f32, 1.], rank.device())?;
//!     Ok(rank.all_reduce_sum(&x)?.to_vec1::<f32>()?)
//! })?;
//! assert_eq!(sums, [[3., 3.], [3., 3.], [3., 3.]]);
//! # Ok::<(), candle_quant::Error>(())
//! ```

mod collective;
mod experts;
mod group;
mod launch;
mod layers;
mod plan;
mod planner;
mod shard;
#[cfg(test)]
mod tests;

pub use collective::{Collective, Rank};
pub use experts::{parallel_experts, ParallelExperts};
pub use launch::{run, Launch};
pub use layers::{
    column_parallel, row_parallel, vocab_parallel_embedding, vocab_parallel_head, RowParallel,
    VocabParallelEmbedding, VocabParallelHead,
};
pub use plan::{Communication, Plan, PlannedTensor, Split};
pub use shard::ExpertSplit;
pub(crate) use shard::{whole_units, ExpertShare, Heads, Sharding};
