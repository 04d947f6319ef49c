//! The gradient of x: `dy * weight`, for which tiles of weights are dequantized into f32, as for the matmul itself.
//!
//! A task has some columns of the weight, and goes through all of its rows: sums stay with it, and nobody adds up what
//! several threads computed. Each tile lies in panels of columns, in the order in which it is dequantized, and the crate's
//! kernels read vectors of weights and single numbers of dy. The order of a block's elements is undone in the output.

use super::super::aligned::Aligned;
use super::super::group_params::{GroupParams, ROWS_PER_PASS};
use super::super::matrix::PackedMatrix;
use super::super::output::in_parts;
use super::super::tasks;
use super::dequantize_rows::DequantizeRows;
use super::gemm::{PANEL, ROWS};
use super::gemm_crate;
use super::kernels::Kernels;
use super::lane_order::{deinterleave, Order};
use crate::format::Real;
use std::ops::Range;

/// Rows of the weight in a tile. A panel of it stays in the first-level cache with the numbers of dy that meet it, and
/// a sum is a sum of sums, which loses less to rounding.
const DEPTH: usize = 128;

/// The most panels of columns, and the most rows of dy, of a task: so many sums and a tile stay in the cache of its core.
const MOST_PANELS: usize = 4;
const MOST_ROWS: usize = 16 * ROWS;

/// dy in parts of up to [`DEPTH`] columns, each `[rows, columns]`.
#[derive(Clone, Copy)]
struct Parts<'a> {
    /// Rows, with one of zeros behind an odd number: other code of the crate would multiply a single one.
    padded_m: usize,
    values: &'a [f32],
}

impl<'a> Parts<'a> {
    /// Some rows of the part that begins with column `first` and has `depth` columns.
    fn rows(self, (first, depth): (usize, usize), rows: Range<usize>) -> &'a [f32] {
        &self.values[first * self.padded_m..][rows.start * depth..rows.end * depth]
    }
}

/// The values of [`Parts`].
fn in_depths<T: Real>(dy: &[T], n: usize, padded_m: usize) -> Aligned<f32> {
    let mut values = Aligned::new(padded_m * n);
    let parts = values.chunks_mut(padded_m * DEPTH).enumerate().map(|(part, out)| (part * DEPTH, out));
    tasks::for_each(parts, |_, (first, out)| {
        let depth = out.len() / padded_m;
        for (dy, out) in dy.chunks_exact(n).zip(out.chunks_exact_mut(depth)) {
            T::widen(&dy[first..first + depth], out);
        }
    });
    values
}

/// Rows of dy and columns of the weight that a task takes. As in the matmul, some rows at a time where there would be too
/// few tasks, though the weight is dequantized for each such part. Neither changes the order in which anything is added.
fn part_of_task(m: usize, k: usize) -> (usize, usize) {
    let tasks = 4 * rayon::current_num_threads();
    let columns = (k / tasks).next_multiple_of(PANEL).clamp(PANEL, MOST_PANELS * PANEL);
    let bands = tasks.div_ceil(k.div_ceil(columns));
    (m.div_ceil(bands).next_multiple_of(ROWS).min(MOST_ROWS), columns)
}

/// `dy * weight`: `dy` is `[M, N]`, the output `[M, K]`.
pub(in super::super) fn matmul<T: Real>(kernels: &dyn Kernels, matrix: &PackedMatrix, dy: &[T]) -> Vec<T> {
    let m = dy.len() / matrix.rows;
    let padded_m = m.next_multiple_of(2);
    let values = in_depths(dy, matrix.rows, padded_m);
    let parts = Parts { padded_m, values: &values };
    in_parts((m, matrix.k), part_of_task(m, matrix.k), |mut part| {
        let columns = part.first_row..part.first_row + part.rows();
        let rows = part.first_x..(part.first_x + part.slots.len()).next_multiple_of(2);
        let sums = sums(kernels, matrix, columns.clone(), parts, rows.clone());
        for (row, slots) in part.slots.iter_mut().enumerate() {
            let panels = sums.chunks(rows.len() * PANEL);
            for (sums, slots) in panels.zip(slots.chunks_mut(PANEL)) {
                let width = sums.len() / rows.len();
                round(kernels, &sums[row * width..][..width], slots);
            }
        }
    })
}

/// Rounds the sums of a row of dy in a panel of columns.
fn round<T: Real>(kernels: &dyn Kernels, sums: &[f32], slots: &mut [T]) {
    let (block, mut natural) = (kernels.block(), [0f32; PANEL]);
    for (sums, natural) in sums.chunks(block).zip(natural.chunks_mut(block)) {
        deinterleave(sums, kernels.lanes(), natural);
    }
    T::round(&natural[..slots.len()], slots);
}

/// The sums of products of some rows of dy: for each panel of columns `[rows, columns of the panel]`, whole blocks.
fn sums(
    kernels: &dyn Kernels,
    matrix: &PackedMatrix,
    columns: Range<usize>,
    dy: Parts<'_>,
    rows: Range<usize>,
) -> Aligned<f32> {
    let padded = columns.len().next_multiple_of(kernels.block());
    let mut sums = Aligned::<f32>::new(padded * rows.len());
    let mut tile = Aligned::<f32>::new(padded * DEPTH.min(matrix.rows));
    let mut params = GroupParams::new(matrix);
    for first in (0..matrix.rows).step_by(DEPTH) {
        let depth = DEPTH.min(matrix.rows - first);
        let tile = &mut tile[..padded * depth];
        dequantize(kernels, matrix, &columns, (first, depth), &mut params, tile);
        for first_dy in rows.clone().step_by(ROWS) {
            let some = first_dy..rows.end.min(first_dy + ROWS);
            let dy = dy.rows((first, depth), some.clone());
            let panels = tile.chunks(depth * PANEL).zip(sums.chunks_mut(rows.len() * PANEL));
            for (weights, sums) in panels {
                let width = weights.len() / depth;
                let sums = &mut sums[(some.start - rows.start) * width..];
                gemm_crate::multiply_add((width, some.len(), depth), (weights, width), dy, sums);
            }
        }
    }
    sums
}

/// Dequantizes some columns of some rows: for each panel of columns `[rows, columns of the panel]`, whole blocks.
fn dequantize(
    kernels: &dyn Kernels,
    matrix: &PackedMatrix,
    columns: &Range<usize>,
    (first, depth): (usize, usize),
    params: &mut GroupParams,
    tile: &mut [f32],
) {
    let group_size = matrix.format.group_size();
    let groups = columns.start / group_size..columns.end.div_ceil(group_size);
    for pass in (0..depth).step_by(ROWS_PER_PASS) {
        let (first_row, rows) = (first + pass, ROWS_PER_PASS.min(depth - pass));
        kernels.load_params(params, matrix, (first_row, rows), groups.clone());
        let first_columns = columns.clone().step_by(PANEL);
        for (panel, first_column) in tile.chunks_mut(depth * PANEL).zip(first_columns) {
            let elements = first_column..columns.end.min(first_column + PANEL);
            let width = panel.len() / depth;
            let out = &mut panel[pass * width..][..rows * width];
            let (params, order) = (&*params, Order::Interleaved);
            kernels.dequantize_rows(DequantizeRows { matrix, first_row, params, elements, order, out });
        }
    }
}
