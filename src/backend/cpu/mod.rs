//! Packed weights on the CPU: products, decode and gather, by all threads.
//!
//! * Few activations (decode): the packed weights are multiplied as they are, up to eight activations
//!   for each pass over them.
//! * Many (prefill): tiles of weights are decoded into f32 and handed to the `gemm` crate.
//! * An instruction set may have a product of its own for some or all of them: VNNI for one row of
//!   activations, AMX for more.
//!
//! Activations of every dtype are widened to f32, sums are f32, and a result is rounded once.

mod aligned;
#[cfg(target_arch = "x86_64")]
mod amx;
mod gemm;
mod kernels;
mod matrix;
mod recipe;
mod result;
mod simd;
mod tasks;
mod tiles;

#[cfg(test)]
mod tests;

use crate::format::Real;
use aligned::Aligned;
use kernels::{interleave, DecodeRows, DotRows, Order, Parameters, ROWS_PER_PASS};
pub(crate) use matrix::{GroupValues, PackedMatrix};
use rayon::prelude::*;
use result::{in_parts, round_column};
use simd::InstructionSet;

/// The most activations for which packed weights are multiplied directly.
const MAX_DIRECT: usize = 31;

/// Products below this many weights are not worth waking another thread.
const SERIAL_WEIGHTS: usize = 1 << 17;

/// `x * weight^T + bias`: `x` is `[M, K]`, the result `[M, N]`, `bias` has N numbers.
pub(crate) fn matmul<T: Real>(matrix: &PackedMatrix, x: &[T], bias: Option<&[f32]>) -> Vec<T> {
    matmul_with(simd::best(), matrix, x, bias)
}

fn matmul_with<T: Real>(
    set: &dyn InstructionSet,
    matrix: &PackedMatrix,
    x: &[T],
    bias: Option<&[f32]>,
) -> Vec<T> {
    let m = x.len() / matrix.k;
    if m == 0 {
        return Vec::new();
    }
    let product = if set.has_product(m) { set.product(matrix, &widened(x)) } else { None };
    if let Some(mut products) = product {
        products.chunks_exact_mut(matrix.rows).for_each(|row| add_bias(row, bias));
        return T::round_all(products);
    }
    if m <= MAX_DIRECT {
        direct(set, matrix, x, bias)
    } else {
        tiles::multiply(set, matrix, x, bias)
    }
}

/// `x` in f32.
fn widened<T: Real>(x: &[T]) -> Vec<f32> {
    const AT_ONCE: usize = 1 << 16;
    let mut all = vec![0f32; x.len()];
    tasks::for_each(all.chunks_mut(AT_ONCE).zip(x.chunks(AT_ONCE)), |_, (to, from)| T::widen(from, to));
    all
}

/// The widest slab of columns that the direct kernel takes.
fn slab(set: &dyn InstructionSet) -> usize {
    set.slab_widths().last().copied().unwrap_or(1)
}

/// The columns that the direct kernel computes for `m`: the widest slabs, then the narrowest that holds
/// the rest. Columns of zeros cost less than another pass over the weights.
fn padded_columns(set: &dyn InstructionSet, m: usize) -> usize {
    let rest = m % slab(set);
    let narrowest = set.slab_widths().iter().find(|width| **width >= rest);
    m - rest + if rest == 0 { 0 } else { narrowest.copied().unwrap_or(rest) }
}

/// Rows that a thread takes at a time.
fn rows_per_task(matrix: &PackedMatrix, m: usize) -> usize {
    if matrix.rows * matrix.k * m <= SERIAL_WEIGHTS {
        return matrix.rows;
    }
    (matrix.rows / (8 * rayon::current_num_threads())).next_multiple_of(16).clamp(16, 512)
}

/// Activations for the direct kernel: slabs of columns, each `[block][column][place]`, and their columns. A product goes
/// through a slab from its first number to its last.
fn slabs<T: Real>(set: &dyn InstructionSet, k: usize, x: &[T]) -> (Aligned<f32>, usize) {
    /// Blocks that a thread takes at a time.
    const BLOCKS: usize = 16;
    let (block, padded_k) = (set.block(), k.next_multiple_of(set.block()));
    let columns = padded_columns(set, x.len() / k);
    let mut all = Aligned::new(columns * padded_k);
    let slabs = all.chunks_mut(slab(set) * padded_k).zip(x.chunks(slab(set) * k));
    let tasks = slabs.flat_map(|(slab, x)| {
        let columns = slab.len() / padded_k;
        slab.chunks_mut(BLOCKS * columns * block).map(move |blocks| (columns, x, blocks))
    });
    tasks::for_each(tasks, |task, (columns, x, blocks)| {
        let first_block = task % padded_k.div_ceil(BLOCKS * block) * BLOCKS;
        for (column, x) in x.chunks_exact(k).enumerate() {
            let x = x.get(first_block * block..).unwrap_or_default();
            for (x, places) in x.chunks(block).zip(blocks.chunks_exact_mut(columns * block)) {
                interleave(x, set.lanes(), &mut places[column * block..][..block]);
            }
        }
    });
    (all, columns)
}

fn direct<T: Real>(set: &dyn InstructionSet, matrix: &PackedMatrix, x: &[T], bias: Option<&[f32]>) -> Vec<T> {
    let m = x.len() / matrix.k;
    let slab_width = slab(set);
    let (x, columns) = slabs(set, matrix.k, x);
    let padded_k = x.len() / columns;
    in_parts((m, matrix.rows), (m, rows_per_task(matrix, m)), |mut part| {
        let rows = part.rows();
        let mut parameters = Parameters::new(matrix);
        let mut sums = vec![0f32; ROWS_PER_PASS * slab_width];
        for start in (0..rows).step_by(ROWS_PER_PASS) {
            let (first_row, rows) = (part.first_row + start, ROWS_PER_PASS.min(rows - start));
            let bias = bias.and_then(|bias| bias.get(first_row..));
            set.load_parameters(&mut parameters, matrix, first_row, rows);
            for (x, places) in x.chunks(slab_width * padded_k).zip(part.places.chunks_mut(slab_width)) {
                let (columns, parameters) = (x.len() / padded_k, &parameters);
                let out = &mut sums[..rows * columns];
                set.dot_rows(DotRows { matrix, first_row, parameters, columns, x, out });
                for (column, places) in places.iter_mut().enumerate() {
                    round_column(out, (column, columns), bias, &mut places[start..][..rows]);
                }
            }
        }
    })
}

fn add_bias(products: &mut [f32], bias: Option<&[f32]>) {
    products.iter_mut().zip(bias.unwrap_or_default()).for_each(|(y, b)| *y += b);
}

/// All rows, `[N, K]`, bit for bit as the scalar reference decodes them, rounded once to `T`.
pub(crate) fn dequantize<T: Real>(matrix: &PackedMatrix) -> Vec<T> {
    dequantize_with(simd::best(), matrix)
}

fn dequantize_with<T: Real>(set: &dyn InstructionSet, matrix: &PackedMatrix) -> Vec<T> {
    let mut out = vec![0f32; matrix.rows * matrix.k];
    out.par_chunks_mut(ROWS_PER_PASS * matrix.k).enumerate().for_each(|(pass, out)| {
        decode_exactly(set, matrix, pass * ROWS_PER_PASS, out);
    });
    T::round_all(out)
}

/// The rows `ids`, `[ids, K]`; every id is below `matrix.rows`.
pub(crate) fn embed<T: Real>(matrix: &PackedMatrix, ids: &[usize]) -> Vec<T> {
    let mut out = vec![0f32; ids.len() * matrix.k];
    for (&id, row) in ids.iter().zip(out.chunks_exact_mut(matrix.k)) {
        decode_exactly(simd::best(), matrix, id, row);
    }
    T::round_all(out)
}

/// Decodes up to [`ROWS_PER_PASS`] rows with the bits of the scalar reference. A fused multiply-add has
/// others where the scales are f32.
fn decode_exactly(set: &dyn InstructionSet, matrix: &PackedMatrix, first_row: usize, out: &mut [f32]) {
    if matrix.product_is_exact() {
        let mut parameters = Parameters::new(matrix);
        set.load_parameters(&mut parameters, matrix, first_row, out.len() / matrix.k);
        let (elements, order) = (0..matrix.k, Order::Natural);
        set.decode_rows(DecodeRows { matrix, first_row, parameters: &parameters, elements, order, out });
    } else {
        for (row, out) in out.chunks_exact_mut(matrix.k).enumerate() {
            matrix.decode_row(first_row + row, out);
        }
    }
}
