//! Packed tensors and the layers that multiply them.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/packed.rs"]
mod packed;

mod adapters;
mod experts;
mod gradients;
mod matmul;
mod nn;
mod port;
mod tensor;
