//! Tensor parallelism, by ranks that are threads.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/packed.rs"]
mod packed;
#[path = "../common/ranks.rs"]
mod ranks;

mod collectives;
mod experts;
mod families;
mod kinds;
mod models;
