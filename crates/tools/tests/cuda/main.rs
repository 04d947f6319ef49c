//! Conversions on a CUDA device, on a GPU or on the pretend driver of `scripts/test-cuda.sh`.
//!
//! Without a device the tests say so and pass, unless `CANDLE_QUANT_REQUIRE_CUDA=1`.
#![cfg(feature = "cuda")]

#[path = "../../../../tests/common/convert.rs"]
mod conversion;
mod convert;
#[path = "../../../../tests/common/gpu.rs"]
mod gpu;

use gpu::device;
