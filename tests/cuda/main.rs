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

mod attention;
mod cache_codes;
mod cards;
mod column_scaled;
mod delta_net;
mod expected;
mod experts;
mod fused;
mod graph;
mod matmul;
mod memory;
mod prefill;
mod quantize;
mod ranks;
mod reordered;
mod rings;
mod sample;
mod special;
mod step_dense;
mod step_experts;
mod step_orders;
mod step_ragged;
mod step_ranks;
mod steps;
mod tiles;
mod views;

use gpu::{alike, device, is_about_memory, nth_device, repeats};
