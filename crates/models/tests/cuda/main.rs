//! Whole models on a CUDA device, on a GPU or on the pretend driver of `scripts/test-cuda.sh`.
//!
//! Without a device the tests say so and pass, unless `CANDLE_QUANT_REQUIRE_CUDA=1`.
#![cfg(feature = "cuda")]

#[path = "../../../../tests/common/mod.rs"]
mod common;
#[path = "../models/drop_in.rs"]
mod drop_in;
#[path = "../../../../tests/common/gpu.rs"]
mod gpu;
#[path = "../models/logits.rs"]
mod logits;
#[path = "../../../../tests/common/packed.rs"]
mod packed;

mod checkpoints;
mod operations;
mod ranks;
mod text;

use candle_core::DType;
use gpu::device;

/// Root-mean-square distances that 16-bit activations may make: attention rounds its scores, too, here.
const HALF_BOUNDS: [(DType, f64); 2] = [(DType::F16, 0.006), (DType::BF16, 0.05)];
/// Of every family and kind of format one: the others, in BF16, are compared with the CPU.
const HALF_FIXTURES: [&str; 4] =
    ["llama-mixed-custom", "llama-untied-mxfp4", "qwen3-affine-b3-g64", "qwen3-nvfp4"];
