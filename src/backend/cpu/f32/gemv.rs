//! A few rows of x: packed weights are multiplied as they are, with up to eight rows of x in each pass over them.

use super::super::aligned::Aligned;
use super::super::group_params::{GroupParams, ROWS_PER_PASS};
use super::super::matrix::PackedMatrix;
use super::super::output::{in_parts, round_row, rows_per_task};
use super::super::tasks;
use super::dot::DotRows;
use super::kernels::Kernels;
use super::lane_order::interleave;
use crate::format::Real;

/// `x * weight^T + bias`: `x` is `[M, K]`, the output `[M, N]`.
pub(in super::super) fn matmul<T: Real>(
    kernels: &dyn Kernels,
    matrix: &PackedMatrix,
    x: &[T],
    bias: Option<&[f32]>,
) -> Vec<T> {
    let m = x.len() / matrix.k;
    let largest = largest_panel(kernels);
    let (x, padded_m) = panels(kernels, matrix.k, x);
    let padded_k = x.len() / padded_m;
    in_parts((m, matrix.rows), (m, rows_per_task((m, matrix.rows, matrix.k))), |mut part| {
        let rows = part.rows();
        let mut params = GroupParams::new(matrix);
        let mut sums = vec![0f32; ROWS_PER_PASS * largest];
        for start in (0..rows).step_by(ROWS_PER_PASS) {
            let (first_row, rows) = (part.first_row + start, ROWS_PER_PASS.min(rows - start));
            let bias = bias.and_then(|bias| bias.get(first_row..));
            kernels.load_params(&mut params, matrix, first_row, rows);
            for (x, slots) in x.chunks(largest * padded_k).zip(part.slots.chunks_mut(largest)) {
                let (m, params) = (x.len() / padded_k, &params);
                let out = &mut sums[..rows * m];
                kernels.dot_rows(DotRows { matrix, first_row, params, m, x, out });
                for (index, slots) in slots.iter_mut().enumerate() {
                    round_row(out, (index, m), bias, &mut slots[start..][..rows]);
                }
            }
        }
    })
}

/// The most rows of x in a panel.
fn largest_panel(kernels: &dyn Kernels) -> usize {
    kernels.panel_sizes().last().copied().unwrap_or(1)
}

/// `m` padded to panels: the largest ones, then the smallest that holds the rest. Rows of zeros cost less than another
/// pass over the weights.
fn padded_m(kernels: &dyn Kernels, m: usize) -> usize {
    let rest = m % largest_panel(kernels);
    let smallest = kernels.panel_sizes().iter().find(|size| **size >= rest);
    m - rest + if rest == 0 { 0 } else { smallest.copied().unwrap_or(rest) }
}

/// x as panels, each `[block][row of x][element]`, and their rows. A kernel reads a panel from its first number to its
/// last.
fn panels<T: Real>(kernels: &dyn Kernels, k: usize, x: &[T]) -> (Aligned<f32>, usize) {
    /// Blocks that a thread takes at a time.
    const BLOCKS: usize = 16;
    let (block, padded_k) = (kernels.block(), k.next_multiple_of(kernels.block()));
    let padded_m = padded_m(kernels, x.len() / k);
    let mut all = Aligned::new(padded_m * padded_k);
    let panels = all.chunks_mut(largest_panel(kernels) * padded_k).zip(x.chunks(largest_panel(kernels) * k));
    let tasks = panels.flat_map(|(panel, x)| {
        let rows = panel.len() / padded_k;
        panel.chunks_mut(BLOCKS * rows * block).map(move |blocks| (rows, x, blocks))
    });
    tasks::for_each(tasks, |task, (rows, x, blocks)| {
        let first_block = task % padded_k.div_ceil(BLOCKS * block) * BLOCKS;
        for (row, x) in x.chunks_exact(k).enumerate() {
            let x = x.get(first_block * block..).unwrap_or_default();
            for (x, out) in x.chunks(block).zip(blocks.chunks_exact_mut(rows * block)) {
                interleave(x, kernels.lanes(), &mut out[row * block..][..block]);
            }
        }
    });
    (all, padded_m)
}
