//! Packed tensors and the layers that multiply them.

#[path = "../common/checkpoint.rs"]
mod checkpoint;
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/packed.rs"]
mod packed;
#[path = "../gguf/writer.rs"]
#[allow(dead_code)] // more than is needed here
mod writer;

mod adapters;
mod experts;
mod gradients;
mod matmul;
mod nn;
mod port;
mod tensor;
