//! Tensor parallelism, by ranks that are threads.

#[path = "../../../../tests/common/mod.rs"]
mod common;
#[path = "../../../../tests/common/families.rs"]
mod families_of;
#[path = "../../../../tests/common/packed.rs"]
mod packed;
#[path = "../../../../tests/common/ranks.rs"]
mod ranks;

mod adapters;
mod collectives;
mod experts;
mod families;
mod kinds;
mod models;
mod ollama_store;
mod plans;
mod splits;
