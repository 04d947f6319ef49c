//! Ranks, and what they do together: every rank is a thread or a process with a device of its own. Knows no layer and
//! no model.

mod collective;
mod failure;
mod host_group;
mod launch;
#[cfg(feature = "processes")]
mod launcher_env;
#[cfg_attr(not(feature = "nccl"), path = "no_nccl.rs")]
mod nccl;
pub(crate) mod partition;
mod rank;
#[cfg(feature = "processes")]
mod rendezvous;

pub use collective::{Collective, StreamCollective};
pub use launch::{run, Launch, MOST_RANKS_OF_A_PROCESS};
#[cfg(feature = "processes")]
pub use launcher_env::RankInfo;
pub use rank::Rank;
#[cfg(all(feature = "testing", feature = "processes"))]
pub use rendezvous::fuzzing;
#[cfg(feature = "processes")]
pub use rendezvous::{Joined, Secret};
