//! The CUDA backend, on a GPU or on the pretend driver of `scripts/test-cuda.sh`.
//!
//! Without a device the tests say so and pass, unless `CANDLE_QUANT_REQUIRE_CUDA=1`.
#![cfg(feature = "cuda")]

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/convert.rs"]
mod conversion;
#[path = "../common/packed.rs"]
mod packed;
#[path = "../common/process.rs"]
mod process;
#[path = "../common/zeros.rs"]
mod zeros;

mod codec;
mod convert;
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
use std::sync::LazyLock;

/// The first CUDA device, or none with a message.
fn device() -> Option<Device> {
    static FIRST: LazyLock<Option<Device>> = LazyLock::new(|| nth_device(0));
    FIRST.clone()
}

fn nth_device(ordinal: usize) -> Option<Device> {
    match Device::new_cuda(ordinal) {
        Ok(device) => Some(device),
        Err(error) if std::env::var("CANDLE_QUANT_REQUIRE_CUDA").as_deref() == Ok("1") => {
            panic!("CANDLE_QUANT_REQUIRE_CUDA is set, and there is no CUDA device {ordinal}: {error}")
        }
        Err(error) => {
            eprintln!("skipped, for there is no CUDA device {ordinal}: {error}");
            None
        }
    }
}

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
