//! Whole models, and the text that they generate.

#[path = "../../../../tests/common/mod.rs"]
mod common;

mod adapters;
mod cache;
mod chat;
mod counting;
mod drop_in;
#[path = "../../../../tests/common/families.rs"]
mod families_of;
#[path = "../../../../tests/common/tiled.rs"]
mod tiled;

mod families;
mod generate;
mod linear;
mod logits;
mod lookup;
mod session;
mod shapes;

use candle_core::{DType, Device};
use common::FIXTURES as HALF_FIXTURES;

/// Root-mean-square distances that 16-bit activations may make.
const HALF_BOUNDS: [(DType, f64); 2] = [(DType::F16, 0.003), (DType::BF16, 0.025)];

/// Where the tests that `tests/cuda` has too compute here.
fn device() -> Option<Device> {
    Some(Device::Cpu)
}
