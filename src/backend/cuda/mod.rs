//! Packed weights on NVIDIA GPUs: the kernels of `cuda/`, launched on the stream of the weight's device.
//!
//! # CUDA graphs
//! A launch allocates nothing but its outputs, by candle's allocator, whose memory in a capture belongs to
//! the graph, and never waits for the device. So a step can be captured if it ran once before on the same
//! thread, which loads kernels and sizes the [`workspace`]; and its tensors are dropped, its result copied
//! to memory from before, before the capture ends. Candle's own operations need
//! `CudaDevice::enable_cuda_graph_htod_cache`, and event tracking disabled on a device with a stream of
//! its own.

mod bindings;
mod decode;
mod dense;
mod encode;
mod factor;
mod launch;
mod memory;
mod module;
mod plan;
mod product;
mod workspace;

pub(crate) use decode::{dequantize, embed};
pub(crate) use encode::{absmax, quantize};
pub(crate) use product::{fused, matmul, stacked};
