//! Products with many activations: tiles of weights are decoded into f32, and the `gemm` crate multiplies with them.
//!
//! A tile stays in the cache of the core that decodes it. It and the activations lie in the order in which the crate's
//! kernels read them, so that nothing is packed or transposed but activations (once) and products: on x86 at least, where
//! this was tried.

use super::aligned::Aligned;
use super::gemm;
use super::kernels::{interleave, DecodeRows, Order, Parameters, ROWS_PER_PASS};
use super::result::{in_parts, round_column};
use super::simd::InstructionSet;
use super::{tasks, PackedMatrix};
use crate::format::Real;
use std::ops::Range;

/// Columns of activations that lie together: as many as the widest of the crate's kernels takes. Where it has NEON, it
/// copies the weights of a call with more than two kernels' columns.
const COLUMNS: usize = if cfg!(target_arch = "aarch64") { 32 } else { 64 };

/// The last panel is padded with columns of zeros to a multiple of the widest vector.
const VECTOR: usize = 16;

/// Rows that the crate's kernels take at a time. Tiles are padded to a multiple: a single row would be multiplied by
/// other code, and a slice of a weight would not give, bit for bit, a slice of the product.
const KERNEL_ROWS: usize = if cfg!(target_arch = "aarch64") { 4 } else { 6 };

/// Rows that are multiplied in one call. For more, the crate would copy the activations.
const ROWS: usize = 8 * KERNEL_ROWS;

/// Elements along K of a tile. A sum is a sum of sums, which loses less to rounding.
const DEPTH: usize = 512;

/// Activations as panels of up to [`COLUMNS`] columns, each `[K, columns]`, K padded and in the order of [`interleave`].
#[derive(Clone, Copy)]
struct Panels<'a> {
    padded_k: usize,
    numbers: &'a [f32],
}

impl<'a> Panels<'a> {
    /// Columns of each panel, and its numbers.
    fn all(self) -> impl Iterator<Item = (usize, &'a [f32])> {
        let panels = self.numbers.chunks(COLUMNS * self.padded_k);
        panels.map(move |panel| (panel.len() / self.padded_k, panel))
    }

    /// Some of the columns, from the first of a panel on.
    fn of_columns(self, columns: Range<usize>) -> Self {
        let end = columns.end.next_multiple_of(VECTOR);
        let numbers = &self.numbers[columns.start * self.padded_k..end * self.padded_k];
        Self { numbers, ..self }
    }
}

/// Numbers for [`Panels`]. One buffer for all: allocators keep a large one for the next product more often than many, and
/// fresh memory costs a page fault for every 4 KiB.
fn in_panels<T: Real>(set: &dyn InstructionSet, (x, k): (&[T], usize), padded_k: usize) -> Aligned<f32> {
    let mut numbers = Aligned::new((x.len() / k).next_multiple_of(VECTOR) * padded_k);
    let panels = numbers.chunks_mut(COLUMNS * padded_k).zip(x.chunks(COLUMNS * k));
    let tasks = panels.flat_map(|(panel, x)| {
        let columns = panel.len() / padded_k;
        let parts = panel.chunks_mut(DEPTH * columns).enumerate();
        parts.map(move |(part, out)| (x, columns, part * DEPTH, out))
    });
    tasks::for_each(tasks, |_, (x, columns, first, out)| transpose(set, (x, k), first, columns, out));
    numbers
}

/// Brings `x`, rows of `k` numbers, into the order of a panel, from element `first` of each on.
fn transpose<T: Real>(
    set: &dyn InstructionSet,
    (x, k): (&[T], usize),
    first: usize,
    columns: usize,
    out: &mut [f32],
) {
    let block = set.block();
    let mut ordered = vec![0f32; columns * block];
    for (index, out) in out.chunks_exact_mut(block * columns).enumerate() {
        for (x, ordered) in x.chunks_exact(k).zip(ordered.chunks_exact_mut(block)) {
            let x = x.get(first + index * block..).unwrap_or_default();
            interleave(&x[..block.min(x.len())], set.lanes(), ordered);
        }
        for (place, out) in out.chunks_exact_mut(columns).enumerate() {
            out.iter_mut().zip(ordered.iter().skip(place).step_by(block)).for_each(|(out, x)| *out = *x);
        }
    }
}

/// Columns and rows that a thread takes at a time. The more rows, the less often it goes through the activations; of few
/// rows some columns only, though their weights are decoded for each such part, so that every thread has something.
fn part_of_task(m: usize, rows: usize) -> (usize, usize) {
    let tasks = 4 * rayon::current_num_threads();
    let part = (rows / (2 * tasks)).next_multiple_of(ROWS).clamp(ROWS, 2 * ROWS);
    let bands = tasks.div_ceil(rows.div_ceil(part));
    (m.div_ceil(bands).next_multiple_of(COLUMNS), part)
}

/// `x * weight^T + bias`, as `matmul` of this module's parent.
pub(super) fn multiply<T: Real>(
    set: &dyn InstructionSet,
    matrix: &PackedMatrix,
    x: &[T],
    bias: Option<&[f32]>,
) -> Vec<T> {
    let m = x.len() / matrix.k;
    let padded_k = matrix.k.next_multiple_of(set.block());
    let numbers = in_panels(set, (x, matrix.k), padded_k);
    let panels = Panels { padded_k, numbers: &numbers };
    in_parts((m, matrix.rows), part_of_task(m, matrix.rows), |mut part| {
        let panels = panels.of_columns(part.first_column..part.first_column + part.places.len());
        let sums = sums(set, matrix, (part.first_row, part.rows()), panels);
        let bias = bias.and_then(|bias| bias.get(part.first_row..));
        for ((columns, sums), places) in sums.iter().zip(part.places.chunks_mut(COLUMNS)) {
            for (column, places) in places.iter_mut().enumerate() {
                round_column(sums, (column, *columns), bias, places);
            }
        }
    })
}

/// Up to [`ROWS_PER_PASS`] rows, which are decoded together.
struct Pass {
    first_row: usize,
    rows: usize,
    parameters: Parameters,
}

/// Columns of each panel, and its products with rows, `[rows, columns]`.
fn sums(
    set: &dyn InstructionSet,
    matrix: &PackedMatrix,
    (first_row, rows): (usize, usize),
    panels: Panels<'_>,
) -> Vec<(usize, Aligned<f32>)> {
    let end_row = first_row + rows;
    let pass = |first_row| {
        let rows = ROWS_PER_PASS.min(end_row - first_row);
        let mut parameters = Parameters::new(matrix);
        set.load_parameters(&mut parameters, matrix, first_row, rows);
        Pass { first_row, rows, parameters }
    };
    let passes: Vec<Pass> = (first_row..end_row).step_by(ROWS_PER_PASS).map(pass).collect();
    let padded_rows = rows.next_multiple_of(KERNEL_ROWS);
    let mut weights = Aligned::<f32>::new(padded_rows * DEPTH.min(panels.padded_k));
    let zeros = |(columns, _): (usize, &[f32])| (columns, Aligned::<f32>::new(padded_rows * columns));
    let mut sums: Vec<_> = panels.all().map(zeros).collect();
    for first in (0..matrix.k).step_by(DEPTH) {
        let elements = first..matrix.k.min(first + DEPTH);
        let depth = elements.len().next_multiple_of(set.block());
        let weights = &mut weights[..padded_rows * depth];
        for (pass, out) in passes.iter().zip(weights.chunks_mut(ROWS_PER_PASS * depth)) {
            let Pass { first_row, rows, ref parameters } = *pass;
            let (elements, order, out) = (elements.clone(), Order::Interleaved, &mut out[..rows * depth]);
            set.decode_rows(DecodeRows { matrix, first_row, parameters, elements, order, out });
        }
        for ((columns, panel), (_, sums)) in panels.all().zip(&mut sums) {
            let x = &panel[first * columns..(first + depth) * columns];
            for (weights, sums) in weights.chunks(ROWS * depth).zip(sums.chunks_mut(ROWS * columns)) {
                gemm::multiply_add((columns, weights.len() / depth, depth), x, weights, sums);
            }
        }
    }
    sums
}
