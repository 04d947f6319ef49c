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
//!
//! Ranks are threads ([`run`]), or processes that a launcher has started ([`Launch::distributed`], with the feature
//! `nccl`).

mod collective;
mod experts;
mod group;
mod launch;
mod layers;
#[cfg_attr(not(feature = "nccl"), path = "no_nccl.rs")]
mod nccl;
mod place;
mod plan;
mod planner;
mod rendezvous;
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
pub use place::Place;
pub use plan::{Communication, Plan, PlannedTensor, Split};
pub use rendezvous::{Joined, Secret};
pub use shard::ExpertSplit;
pub(crate) use shard::{whole_units, ExpertShare, Heads, Sharding};
