//! A few rows of x: packed weights are multiplied as they are, with up to eight rows of x in each pass over them.

use super::super::aligned::Aligned;
use super::super::fast_kernel::PreparedX;
use super::super::group_params::{GroupParams, ROWS_PER_PASS};
use super::super::matrix::PackedMatrix;
use super::super::tasks::{self, Threads};
use super::dot::DotRows;
use super::kernels::Kernels;
use super::lane_order::interleave;
use crate::format::Real;

/// Rows of x as panels.
struct Prepared<'a> {
    kernels: &'a dyn Kernels,
    m: usize,
    /// What [`panels`] gives.
    x: Aligned<f32>,
    /// Numbers in a row of x of a panel.
    padded_k: usize,
}

/// Prepares `x`, rows of `k` numbers, on this thread alone or with the help of all.
pub(in super::super) fn prepare<'a, T: Real>(
    kernels: &'a dyn Kernels,
    k: usize,
    x: &[T],
    threads: Threads,
) -> Box<dyn PreparedX + 'a> {
    let m = x.len() / k;
    let (x, padded_m) = panels(kernels, k, x, threads);
    let padded_k = x.len() / padded_m.max(1);
    Box::new(Prepared { kernels, m, x, padded_k })
}

impl PreparedX for Prepared<'_> {
    fn m(&self) -> usize {
        self.m
    }

    fn rows(&self, matrix: &PackedMatrix, first_row: usize, out: &mut [f32]) {
        let kernels = self.kernels;
        let largest = largest_panel(kernels);
        let mut params = GroupParams::new(matrix);
        let mut sums = vec![0f32; ROWS_PER_PASS * largest];
        for (pass, out) in out.chunks_mut(ROWS_PER_PASS * self.m).enumerate() {
            let (first_row, rows) = (first_row + pass * ROWS_PER_PASS, out.len() / self.m);
            kernels.load_params(&mut params, matrix, (first_row, rows), 0..matrix.groups_per_row());
            for (panel, x) in self.x.chunks(largest * self.padded_k).enumerate() {
                let (m, params) = (x.len() / self.padded_k, &params);
                let sums = &mut sums[..rows * m];
                kernels.dot_rows(DotRows { matrix, first_row, params, m, x, out: sums });
                // Rows of zeros that fill the panel are left out.
                let first = panel * largest;
                for (sums, out) in sums.chunks_exact(m).zip(out.chunks_exact_mut(self.m)) {
                    out[first..].iter_mut().zip(sums).for_each(|(out, sum)| *out = *sum);
                }
            }
        }
    }
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
fn panels<T: Real>(kernels: &dyn Kernels, k: usize, x: &[T], threads: Threads) -> (Aligned<f32>, usize) {
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
    let interleave_blocks = |task: usize, (rows, x, blocks): (usize, &[T], &mut [f32])| {
        let first_block = task % padded_k.div_ceil(BLOCKS * block) * BLOCKS;
        for (row, x) in x.chunks_exact(k).enumerate() {
            let x = x.get(first_block * block..).unwrap_or_default();
            for (x, out) in x.chunks(block).zip(blocks.chunks_exact_mut(rows * block)) {
                interleave(x, kernels.lanes(), &mut out[row * block..][..block]);
            }
        }
    };
    match threads {
        Threads::All => tasks::for_each(tasks, interleave_blocks),
        Threads::This => tasks.enumerate().for_each(|(task, blocks)| interleave_blocks(task, blocks)),
    }
    (all, padded_m)
}
