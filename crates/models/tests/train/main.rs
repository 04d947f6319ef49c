//! Fine-tuning: forward passes and gradients of every family, curves of losses, saving and resuming.

#[path = "../../../../tests/common/mod.rs"]
mod common;
#[path = "../../../../tests/common/packed.rs"]
mod packed;

mod curves;
mod errors;
mod forward;
mod gradients;
mod models;
mod resume;
