//! Packed weights on the CPU, by all threads.
//!
//! [`dispatch`] is the table of algorithms: it alone decides which one multiplies.
//!
//! * `isa/`: instructions, and which of them this CPU has.
//! * `codec`: how a block of codes becomes weights, for each format; on `isa`.
//! * `f32/`: every format on every instruction set, and the scalar reference where a format has no codec; on `codec`.
//! * `int8/`, `bf16/`: faster algorithms for some formats, on some CPUs; on `isa`.
//! * `row_gemv/`: what the AVX-512 kernels for one row of x share, those of `int8/` and the one for MXFP8 in `f32/`; a little of it serves
//!   AVX2, too.
//!
//! * `attention/`: attention to a KV cache; on `isa`.
//! * `gated_delta`: the rule of linear attention; plain loops.
//! * `sample/`: tokens from logits; plain loops.
//! * `step/`: the nodes of a whole decoder, by a team of threads (`team`, `cursor`) or one after another; on `dispatch` and `attention`.
//!
//! `dispatch` is above all of these but the last four, and they share the plain files beside it. No room uses one above it, and neither
//! `f32/`, `int8/` nor `bf16/` uses another of the three.
//!
//! Activations of every dtype are widened to f32, sums are f32, and an output is rounded once.

mod aligned;
pub(crate) mod attention;
#[cfg(target_arch = "x86_64")]
mod bf16;
mod codec;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod column;
mod cursor;
mod dense;
mod dispatch;
mod f32;
mod fast_kernel;
pub(super) mod gated_delta;
mod group_params;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod int8;
mod isa;
pub(super) mod low_rank;
mod matrix;
mod output;
#[cfg(target_arch = "x86_64")]
mod row_gemv;
pub(super) mod sample;
pub(super) mod step;
mod tasks;
mod team;

#[cfg(test)]
mod tests;

use super::precision::ActivationPrecision;
use crate::format::Real;
pub(crate) use matrix::{GroupValues, PackedMatrix, SuperBlockValues};

/// What the instruction set is called that kernels use: one of those that `CANDLE_QUANT_SIMD` takes.
pub(crate) fn instruction_set() -> &'static str {
    isa::best().name()
}

/// `x * weight^T + bias`: `x` is `[M, K]`, the output `[M, N]`, `bias` has N numbers.
pub(crate) fn matmul<T: Real>(matrix: &PackedMatrix, x: &[T], bias: Option<&[f32]>) -> Vec<T> {
    dispatch::matmul(isa::best(), matrix, x, bias, ActivationPrecision::current())
}

/// Whether so many rows of x are multiplied in passes over the weights, and not in tiles.
pub(crate) fn is_few(rows: usize) -> bool {
    rows <= dispatch::MAX_FEW
}

/// Runs `task` with each item and its number, by all threads; a matmul that it calls runs by its thread alone.
pub(super) fn for_each<T: Send>(items: impl IntoIterator<Item = T>, task: impl Fn(usize, T) + Send + Sync) {
    tasks::for_each(items, task);
}

/// `dy * weight`, the gradient of x: `dy` is `[M, N]`, the output `[M, K]`.
pub(crate) fn matmul_backward<T: Real>(matrix: &PackedMatrix, dy: &[T]) -> Vec<T> {
    dispatch::matmul_backward(isa::best(), matrix, dy)
}

/// `x` in f32, by all threads.
pub(crate) fn widened<T: Real>(x: &[T]) -> Vec<f32> {
    dispatch::widened(x)
}

/// All rows, `[N, K]`, bit for bit as the scalar reference dequantizes them, rounded once to `T`.
pub(crate) fn dequantize<T: Real>(matrix: &PackedMatrix) -> Vec<T> {
    f32::dequantize::dequantize(f32::kernels(isa::best()), matrix)
}

/// The rows `ids`, `[ids, K]`; every id is below `matrix.rows`.
pub(crate) fn embed<T: Real>(matrix: &PackedMatrix, ids: &[usize]) -> Vec<T> {
    f32::dequantize::gather(f32::kernels(isa::best()), matrix, ids)
}
