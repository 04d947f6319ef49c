//! The CUDA backend, on a GPU or on the pretend driver of `scripts/test-cuda.sh`.
//!
//! Without a device the tests say so and pass, unless `CANDLE_QUANT_REQUIRE_CUDA=1`.
#![cfg(feature = "cuda")]

#[path = "common/packed.rs"]
mod packed;

#[path = "cuda/codec.rs"]
mod codec;
#[path = "cuda/expected.rs"]
mod expected;
#[path = "cuda/fused.rs"]
mod fused;
#[path = "cuda/graph.rs"]
mod graph;
#[path = "cuda/products.rs"]
mod products;
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

/// Whether candle's own kernels run on the device; the pretend driver has none.
fn has_candle_kernels(device: &Device) -> bool {
    candle_core::Tensor::zeros(1, candle_core::DType::F32, device).and_then(|zero| zero + 1.).is_ok()
}
