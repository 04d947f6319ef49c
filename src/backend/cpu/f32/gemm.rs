//! Many rows of x: tiles of weights are dequantized into f32, and the `gemm` crate multiplies with them.
//!
//! A tile stays in the cache of the core that dequantizes it. It and x lie in the order in which the crate's kernels read
//! them, so that nothing is packed or transposed but x (once) and the output: on x86 at least, where this was tried.

use super::super::aligned::Aligned;
use super::super::group_params::{GroupParams, ROWS_PER_PASS};
use super::super::matrix::PackedMatrix;
use super::super::output::{in_parts, round_row};
use super::super::tasks;
use super::dequantize_rows::DequantizeRows;
use super::gemm_crate;
use super::kernels::Kernels;
use super::lane_order::{interleave, Order};
use crate::format::Real;
use std::ops::Range;

/// Rows of x in a panel, which lie together: as many as the widest of the crate's kernels takes. Where it has NEON, it
/// copies the weights of a call with more than twice as many as a kernel takes.
pub(super) const PANEL: usize = if cfg!(target_arch = "aarch64") { 32 } else { 64 };

/// The last panel is padded with rows of zeros to a multiple of the widest vector.
const VECTOR: usize = 16;

/// Rows of a weight that the crate's kernels take at a time. Tiles are padded to a multiple: other code would multiply a
/// single row, and a slice of a weight would not give, bit for bit, a slice of the output.
const KERNEL_ROWS: usize = if cfg!(target_arch = "aarch64") { 4 } else { 6 };

/// Rows of a weight that are multiplied in one call. For more, the crate would copy x.
pub(super) const ROWS: usize = 8 * KERNEL_ROWS;

/// Elements along K of a tile. A sum is a sum of sums, which loses less to rounding.
const DEPTH: usize = 512;

/// x as panels of up to [`PANEL`] rows, each `[K, rows]`, with K padded and in the order of [`interleave`].
#[derive(Clone, Copy)]
struct Panels<'a> {
    padded_k: usize,
    values: &'a [f32],
}

impl<'a> Panels<'a> {
    /// The rows of each panel, and its values.
    fn all(self) -> impl Iterator<Item = (usize, &'a [f32])> {
        let panels = self.values.chunks(PANEL * self.padded_k);
        panels.map(move |panel| (panel.len() / self.padded_k, panel))
    }

    /// Some of the rows, from the first of a panel on.
    fn slice(self, rows: Range<usize>) -> Self {
        let end = rows.end.next_multiple_of(VECTOR);
        let values = &self.values[rows.start * self.padded_k..end * self.padded_k];
        Self { values, ..self }
    }
}

/// The values of [`Panels`]. One buffer for all: allocators keep a large one for the next matmul more often than many,
/// and fresh memory costs a page fault for every 4 KiB.
fn in_panels<T: Real>(kernels: &dyn Kernels, (x, k): (&[T], usize), padded_k: usize) -> Aligned<f32> {
    let mut values = Aligned::new((x.len() / k).next_multiple_of(VECTOR) * padded_k);
    let panels = values.chunks_mut(PANEL * padded_k).zip(x.chunks(PANEL * k));
    let tasks = panels.flat_map(|(panel, x)| {
        let rows = panel.len() / padded_k;
        let parts = panel.chunks_mut(DEPTH * rows).enumerate();
        parts.map(move |(part, out)| (x, rows, part * DEPTH, out))
    });
    tasks::for_each(tasks, |_, (x, rows, first, out)| transpose(kernels, (x, k), first, rows, out));
    values
}

/// Brings `x`, rows of `k` numbers, into the order of a panel of `rows` rows, from element `first` of each on.
fn transpose<T: Real>(
    kernels: &dyn Kernels,
    (x, k): (&[T], usize),
    first: usize,
    rows: usize,
    out: &mut [f32],
) {
    let block = kernels.block();
    let mut ordered = vec![0f32; rows * block];
    for (index, out) in out.chunks_exact_mut(block * rows).enumerate() {
        for (x, ordered) in x.chunks_exact(k).zip(ordered.chunks_exact_mut(block)) {
            let x = x.get(first + index * block..).unwrap_or_default();
            interleave(&x[..block.min(x.len())], kernels.lanes(), ordered);
        }
        for (element, out) in out.chunks_exact_mut(rows).enumerate() {
            out.iter_mut().zip(ordered.iter().skip(element).step_by(block)).for_each(|(out, x)| *out = *x);
        }
    }
}

/// Rows of x and rows of the weight that a thread takes at a time. The more rows of the weight, the less often it goes
/// through x. A weight of few rows is multiplied with some rows of x at a time, though it is dequantized for each such
/// part, so that every thread has something to do.
fn part_of_task(m: usize, n: usize) -> (usize, usize) {
    let tasks = 4 * rayon::current_num_threads();
    let part = (n / (2 * tasks)).next_multiple_of(ROWS).clamp(ROWS, 2 * ROWS);
    let bands = tasks.div_ceil(n.div_ceil(part));
    (m.div_ceil(bands).next_multiple_of(PANEL), part)
}

/// `x * weight^T + bias`: `x` is `[M, K]`, the output `[M, N]`.
pub(in super::super) fn matmul<T: Real>(
    kernels: &dyn Kernels,
    matrix: &PackedMatrix,
    x: &[T],
    bias: Option<&[f32]>,
) -> Vec<T> {
    let m = x.len() / matrix.k;
    let padded_k = matrix.k.next_multiple_of(kernels.block());
    let values = in_panels(kernels, (x, matrix.k), padded_k);
    let panels = Panels { padded_k, values: &values };
    in_parts((m, matrix.rows), part_of_task(m, matrix.rows), |mut part| {
        let panels = panels.slice(part.first_x..part.first_x + part.slots.len());
        let sums = sums(kernels, matrix, (part.first_row, part.rows()), panels);
        let bias = bias.and_then(|bias| bias.get(part.first_row..));
        for ((m, sums), slots) in sums.iter().zip(part.slots.chunks_mut(PANEL)) {
            for (index, slots) in slots.iter_mut().enumerate() {
                round_row(sums, (index, *m), bias, slots);
            }
        }
    })
}

/// Up to [`ROWS_PER_PASS`] rows of a weight, which are dequantized together.
struct Pass {
    first_row: usize,
    rows: usize,
    params: GroupParams,
}

/// For each panel its rows and the sums of products, `[rows of the weight, rows of x]`.
fn sums(
    kernels: &dyn Kernels,
    matrix: &PackedMatrix,
    (first_row, rows): (usize, usize),
    panels: Panels<'_>,
) -> Vec<(usize, Aligned<f32>)> {
    let end_row = first_row + rows;
    let pass = |first_row| {
        let rows = ROWS_PER_PASS.min(end_row - first_row);
        let mut params = GroupParams::new(matrix);
        kernels.load_params(&mut params, matrix, (first_row, rows), 0..matrix.groups_per_row());
        Pass { first_row, rows, params }
    };
    let passes: Vec<Pass> = (first_row..end_row).step_by(ROWS_PER_PASS).map(pass).collect();
    let padded_rows = rows.next_multiple_of(KERNEL_ROWS);
    let mut weights = Aligned::<f32>::new(padded_rows * DEPTH.min(panels.padded_k));
    let zeros = |(m, _): (usize, &[f32])| (m, Aligned::<f32>::new(padded_rows * m));
    let mut sums: Vec<_> = panels.all().map(zeros).collect();
    for first in (0..matrix.k).step_by(DEPTH) {
        let elements = first..matrix.k.min(first + DEPTH);
        let depth = elements.len().next_multiple_of(kernels.block());
        let weights = &mut weights[..padded_rows * depth];
        for (pass, out) in passes.iter().zip(weights.chunks_mut(ROWS_PER_PASS * depth)) {
            let Pass { first_row, rows, ref params } = *pass;
            let (elements, order, out) = (elements.clone(), Order::Interleaved, &mut out[..rows * depth]);
            kernels.dequantize_rows(DequantizeRows { matrix, first_row, params, elements, order, out });
        }
        for ((m, panel), (_, sums)) in panels.all().zip(&mut sums) {
            let x = &panel[first * m..(first + depth) * m];
            for (weights, sums) in weights.chunks(ROWS * depth).zip(sums.chunks_mut(ROWS * m)) {
                gemm_crate::multiply_add((m, weights.len() / depth, depth), (x, m), weights, sums);
            }
        }
    }
    sums
}

/// Products `[rows, columns]` of `x` `[rows, depth]` with some columns of a dense matrix `[depth, width]`, on this thread alone.
pub(in super::super) fn dense_columns(
    matrix: &[f32],
    width: usize,
    columns: Range<usize>,
    x: &[f32],
) -> Vec<f32> {
    let depth = matrix.len() / width.max(1);
    let (rows, own) = (x.len() / depth.max(1), matrix.get(columns.start..).unwrap_or_default());
    let mut products = vec![0.; rows * columns.len()];
    gemm_crate::multiply_add((columns.len(), rows, depth), (own, width), x, &mut products);
    products
}
