//! Which part of a model each rank has, and what of a checkpoint it loads.

mod parts;
mod planner;
mod shard_plan;
#[cfg(test)]
mod tests;

pub(crate) use parts::{Heads, Sharding};
pub use shard_plan::{Communication, ShardPlan, ShardedTensor, Split};
