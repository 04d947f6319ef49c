//! Conversions on a CUDA device, on a GPU or on the pretend driver of `scripts/test-cuda.sh`.
//!
//! Without a device the tests say so and pass, unless `CANDLE_QUANT_REQUIRE_CUDA=1`.
#![cfg(feature = "cuda")]

#[path = "../../../../tests/common/convert.rs"]
mod conversion;
mod convert;
#[path = "../doors/format.rs"]
mod format;
#[path = "../../../../tests/common/gpu.rs"]
mod gpu;
#[path = "../../../../tests/common/packed.rs"]
mod packed;
#[cfg(feature = "cli")]
mod start;

use gpu::device;

/// See `crates/tools/tests/doors`.
#[test]
fn every_format_passes_every_door_of_a_device() {
    let Some(device) = device() else { return };
    for format in candle_quant::QuantFormat::all() {
        format::passes_every_door(format, &device);
    }
    for format in candle_quant::QuantFormat::only_read() {
        format::read_only_passes_every_door(format, &device);
    }
}
