//! Which part of a model each rank has, what of a checkpoint it loads, and what memory it needs.

mod footprint;
mod parts;
mod planner;
mod shard_plan;

pub use footprint::{Footprint, Workload};
pub(crate) use parts::{inner_shares, Heads, Sharding};
pub use shard_plan::{Communication, ShardPlan, ShardedTensor, Split};
