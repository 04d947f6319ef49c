//! Packed weights on NVIDIA GPUs: the kernels of `cuda/`, launched on the stream of the weight's device.
//!
//! # CUDA graphs
//! A launch allocates nothing but its outputs (and a copy of an x that is out of order), by candle's
//! allocator, whose memory in a capture belongs to the graph, and never waits for the device. What is kept
//! between launches is the [`workspace`]. The crate's documentation says how a step is captured.

mod attend;
mod attention;
mod backward;
mod bindings;
mod card;
mod cublas;
mod delta_net;
mod dequantize;
mod experts;
mod experts_call;
mod formats;
mod gemv;
mod gemv_call;
mod kernel;
mod launch;
mod matmul;
mod memory;
mod module;
mod operand;
mod plan;
mod quantize;
mod sample;
mod scratch;
mod step;
mod tiles;
mod tiles_call;
mod workspace;

pub(crate) use attention::{attend, attend_prompt, attends_to_prompts, keeps_ring};
pub(crate) use backward::matmul_backward;
pub(crate) use delta_net::delta_net;
pub(crate) use dequantize::{dequantize, embed};
pub(crate) use experts::experts;
pub(crate) use matmul::{fused, matmul, stacked};
pub(crate) use quantize::{absmax, quantize};
pub(crate) use sample::sample;
pub(crate) use step::StepLaunches;

/// Whether the device has kernels for a format.
pub(crate) fn has_kernels(format: crate::QuantFormat) -> bool {
    formats::FormatKernels::of(format).is_ok()
}
