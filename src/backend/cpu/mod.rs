//! Packed weights on the CPU: products, decode and gather, over rayon's threads.
//!
//! * Few activations (decode): the packed weights are multiplied as they are, up to
//!   [`MAX_COLUMNS`] activations for each pass over them.
//! * Many (prefill): panels of rows are decoded into f32 and handed to the `gemm` crate.
//!
//! Activations of every dtype are widened to f32, sums are f32, and a result is rounded once.

mod gemm;
mod kernels;
mod matrix;
mod recipe;
mod simd;

#[cfg(test)]
mod tests;

use crate::format::element::Real;
use kernels::{interleave, DecodeRows, DotRows, Order, MAX_COLUMNS};
pub(crate) use matrix::{GroupValues, PackedMatrix};
use rayon::prelude::*;
use simd::InstructionSet;

/// The most activations for which packed weights are multiplied directly.
const MAX_DIRECT: usize = 32;

/// Products below this many weights are not worth waking another thread.
const SERIAL_WEIGHTS: usize = 1 << 17;

/// Numbers of a decoded panel: 4 MiB, so that it stays in a second-level cache or close to it.
const PANEL_NUMBERS: usize = 1 << 20;

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
    let padded_k = matrix.k.next_multiple_of(set.block());
    let mut interleaved = vec![0f32; m * padded_k];
    let rows = x.par_chunks_exact(matrix.k).zip(interleaved.par_chunks_exact_mut(padded_k));
    if m == 1 {
        interleave(x, set.lanes(), &mut interleaved);
    } else {
        rows.for_each(|(row, out)| interleave(row, set.lanes(), out));
    }
    if m <= MAX_DIRECT {
        direct(set, matrix, &interleaved, m, bias)
    } else {
        panels(set, matrix, &interleaved, m, bias)
    }
}

/// Rows that a thread takes at a time.
fn rows_per_task(matrix: &PackedMatrix, m: usize) -> usize {
    if matrix.rows * matrix.k * m <= SERIAL_WEIGHTS {
        return matrix.rows;
    }
    (matrix.rows / (8 * rayon::current_num_threads())).next_multiple_of(16).clamp(16, 512)
}

fn direct<T: Real>(
    set: &dyn InstructionSet,
    matrix: &PackedMatrix,
    x: &[f32],
    m: usize,
    bias: Option<&[f32]>,
) -> Vec<T> {
    let padded_k = x.len() / m;
    // Even slabs: nine columns are five and four, not eight and one.
    let columns = m.div_ceil(m.div_ceil(MAX_COLUMNS));
    let rows = rows_per_task(matrix, m);
    let mut products = vec![0f32; matrix.rows * m];
    let task = |(task, products): (usize, &mut [f32])| {
        let rows_here = products.len() / m;
        let slabs = x.chunks(columns * padded_k).zip(products.chunks_mut(columns * rows_here));
        for (x, out) in slabs {
            let columns = x.len() / padded_k;
            set.dot_rows(DotRows { matrix, first_row: task * rows, columns, x, out });
        }
    };
    if rows >= matrix.rows {
        task((0, &mut products));
    } else {
        products.par_chunks_mut(rows * m).enumerate().for_each(task);
    }
    // A task's products are [slab][row][column of the slab]; the result is [column][row].
    let mut result = Vec::with_capacity(products.len());
    for column in 0..m {
        let (slab, within) = (column / columns, column % columns);
        let width = columns.min(m - slab * columns);
        for (task, products) in products.chunks(rows * m).enumerate() {
            let rows_here = products.len() / m;
            let slab = products.get(slab * columns * rows_here..).unwrap_or_default();
            let of_column = slab.iter().skip(within).step_by(width).take(rows_here);
            match bias.and_then(|bias| bias.get(task * rows..)) {
                Some(bias) => result.extend(of_column.zip(bias).map(|(y, b)| T::from_f32(y + b))),
                None => result.extend(of_column.map(|y| T::from_f32(*y))),
            }
        }
    }
    result
}

fn panels<T: Real>(
    set: &dyn InstructionSet,
    matrix: &PackedMatrix,
    x: &[f32],
    m: usize,
    bias: Option<&[f32]>,
) -> Vec<T> {
    let (n, padded_k) = (matrix.rows, x.len() / m);
    let panel_rows = (PANEL_NUMBERS / padded_k).clamp(16, n.max(16));
    let mut panel = vec![0f32; panel_rows.min(n) * padded_k];
    let mut products = vec![0f32; m * n];
    for first_row in (0..n).step_by(panel_rows) {
        let rows = panel_rows.min(n - first_row);
        let panel = &mut panel[..rows * padded_k];
        decode_into(set, matrix, first_row, Order::Interleaved, panel, padded_k);
        gemm::multiply_transposed((m, rows, padded_k), x, panel, &mut products[first_row..], n);
    }
    if let Some(bias) = bias {
        for row in products.chunks_exact_mut(n) {
            row.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
        }
    }
    T::round_all(products)
}

/// Decodes `out.len() / row_len` rows from `first_row` on.
fn decode_into(
    set: &dyn InstructionSet,
    matrix: &PackedMatrix,
    first_row: usize,
    order: Order,
    out: &mut [f32],
    row_len: usize,
) {
    const ROWS: usize = 16;
    out.par_chunks_mut(ROWS * row_len).enumerate().for_each(|(chunk, out)| {
        set.decode_rows(DecodeRows { matrix, first_row: first_row + chunk * ROWS, order, out });
    });
}

/// All rows, `[N, K]`, bit for bit as the scalar reference decodes them, rounded once to `T`.
pub(crate) fn dequantize<T: Real>(matrix: &PackedMatrix) -> Vec<T> {
    dequantize_with(simd::best(), matrix)
}

fn dequantize_with<T: Real>(set: &dyn InstructionSet, matrix: &PackedMatrix) -> Vec<T> {
    let mut out = vec![0f32; matrix.rows * matrix.k];
    out.par_chunks_mut(16 * matrix.k).enumerate().for_each(|(chunk, out)| {
        decode_exactly(set, matrix, chunk * 16, out);
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

/// A fused multiply-add has other bits than the reference where the scales are f32.
fn decode_exactly(set: &dyn InstructionSet, matrix: &PackedMatrix, first_row: usize, out: &mut [f32]) {
    if matrix.product_is_exact() {
        set.decode_rows(DecodeRows { matrix, first_row, order: Order::Natural, out });
    } else {
        for (row, out) in out.chunks_exact_mut(matrix.k).enumerate() {
            matrix.decode_row(first_row + row, out);
        }
    }
}
