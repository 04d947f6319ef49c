//! The CUDA backend, on a GPU or on the pretend driver of `scripts/test-cuda.sh`.
//!
//! Without a device the tests say so and pass, unless `CANDLE_QUANT_REQUIRE_CUDA=1`.
#![cfg(feature = "cuda")]

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/gpu.rs"]
mod gpu;
#[path = "../common/packed.rs"]
mod packed;
#[path = "../common/process.rs"]
mod process;
#[path = "../common/zeros.rs"]
mod zeros;

mod codec;
mod expected;
mod experts;
mod fused;
mod graph;
mod memory;
mod models;
mod products;
mod ranks;
mod special;
mod views;

use candle_core::Device;
use gpu::{device, nth_device};

/// In the name of a device of the pretend driver.
const PRETENDED: &str = "pretend GPU";

/// Whether candle's own kernels are there: everywhere but on the pretend driver, where what needs them is
/// skipped with a message.
fn has_candle_kernels(device: &Device) -> bool {
    let name = device.as_cuda_device().unwrap().cuda_stream().context().name().unwrap();
    let pretended = name.contains(PRETENDED);
    if pretended {
        eprintln!("skipped, for {name} lacks candle's kernels");
    }
    !pretended
}
