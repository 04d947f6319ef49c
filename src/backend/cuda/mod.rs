//! Packed weights on NVIDIA GPUs: the kernels of `cuda/`, launched on the stream of the weight's device.
//!
//! # CUDA graphs
//! A launch allocates nothing but its outputs (and a copy of an x that is out of order), by candle's
//! allocator, whose memory in a capture belongs to the graph, and never waits for the device. What is kept
//! between launches is the [`workspace`]. The crate's documentation says how a step is captured.

mod bindings;
mod decode;
mod dense;
mod encode;
mod experts;
mod factor;
mod launch;
mod memory;
mod module;
mod plan;
mod product;
mod workspace;

pub(crate) use decode::{dequantize, embed};
pub(crate) use encode::{absmax, quantize};
pub(crate) use experts::experts;
pub(crate) use product::{fused, matmul, stacked};
