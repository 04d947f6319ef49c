//! UQFF checkpoints.

#[path = "../common/checkpoint.rs"]
mod checkpoint;
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/packed.rs"]
mod packed;
#[path = "../common/uqff.rs"]
mod uqff;

mod alternating;
mod damage;
mod files;
mod filled;
mod layers;
mod models;
mod peers;
mod rules;
