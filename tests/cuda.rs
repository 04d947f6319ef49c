//! The CUDA backend, on a GPU or on the pretend driver of `scripts/test-cuda.sh`.
//!
//! Without a device the tests say so and pass, unless `CANDLE_QUANT_REQUIRE_CUDA=1`.
#![cfg(feature = "cuda")]

mod common;
#[path = "common/convert.rs"]
mod conversion;
#[path = "common/packed.rs"]
mod packed;
#[path = "common/process.rs"]
mod process;
#[path = "common/zeros.rs"]
mod zeros;

#[path = "cuda/codec.rs"]
mod codec;
#[path = "cuda/convert.rs"]
mod convert;
#[path = "cuda/expected.rs"]
mod expected;
#[path = "cuda/experts.rs"]
mod experts;
#[path = "cuda/fused.rs"]
mod fused;
#[path = "cuda/graph.rs"]
mod graph;
#[path = "cuda/memory.rs"]
mod memory;
#[path = "cuda/models.rs"]
mod models;
#[path = "cuda/products.rs"]
mod products;
#[path = "cuda/ranks.rs"]
mod ranks;
#[path = "cuda/special.rs"]
mod special;
#[path = "cuda/views.rs"]
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
