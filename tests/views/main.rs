//! Checkpoints asked for names that they do not have: by candle-transformers' models, by layers, and in vain.

#[path = "../common/checkpoint.rs"]
mod checkpoint;
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/packed.rs"]
mod packed;
#[path = "../common/ranks.rs"]
mod ranks;

mod layers;
mod models;
mod rules;
