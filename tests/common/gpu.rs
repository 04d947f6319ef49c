//! CUDA devices for tests: real ones, or those of the pretend driver of `scripts/test-cuda.sh`.
#![allow(dead_code)] // each test binary uses its own part

use candle_core::Device;
use std::sync::LazyLock;

/// The first CUDA device, or none with a message.
pub fn device() -> Option<Device> {
    static FIRST: LazyLock<Option<Device>> = LazyLock::new(|| nth_device(0));
    FIRST.clone()
}

/// Whether memory is looked at, which is the same when something is computed once more.
pub fn is_about_memory() -> bool {
    std::env::var("PRETEND_CUDA_SCHEDULES").as_deref() == Ok("random")
}

pub fn nth_device(ordinal: usize) -> Option<Device> {
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
