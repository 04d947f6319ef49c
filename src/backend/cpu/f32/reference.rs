//! The kernels of formats without a codec: the scalar reference, slow and always right.

use super::super::matrix::PackedMatrix;
use super::dequantize_rows::DequantizeRows;
use super::dot::DotRows;
use super::lane_order::{interleave, Order};

/// A row in the order of [`interleave`], padded with zeros.
fn interleaved_row(matrix: &PackedMatrix, row: usize, lanes: usize) -> Vec<f32> {
    let mut natural = vec![0f32; matrix.k];
    matrix.dequantize_row(row, &mut natural);
    let mut interleaved = vec![0f32; matrix.k.next_multiple_of(4 * lanes)];
    interleave(&natural, lanes, &mut interleaved);
    interleaved
}

/// See [`DotRows`].
pub(super) fn dot_rows(task: DotRows<'_>, lanes: usize) {
    let DotRows { matrix, first_row, m, x, out, .. } = task;
    let block = 4 * lanes;
    for (row, out) in out.chunks_exact_mut(m).enumerate() {
        let weights = interleaved_row(matrix, first_row + row, lanes);
        for (index, out) in out.iter_mut().enumerate() {
            // Blocks of one row of x are `m` blocks apart.
            let x = x.chunks_exact(block).skip(index).step_by(m);
            let products = weights.chunks_exact(block).zip(x);
            let sums = products.map(|(weights, x)| weights.iter().zip(x).map(|(w, x)| w * x).sum::<f32>());
            *out = sums.sum();
        }
    }
}

/// See [`DequantizeRows`].
pub(super) fn dequantize_rows(task: DequantizeRows<'_>, lanes: usize) {
    let DequantizeRows { matrix, first_row, elements, order, out, .. } = task;
    let row_len = order.row_len(elements.len(), 4 * lanes);
    for (row, out) in out.chunks_exact_mut(row_len).enumerate() {
        let weights = match order {
            Order::Natural => {
                let mut natural = vec![0f32; matrix.k];
                matrix.dequantize_row(first_row + row, &mut natural);
                natural
            }
            Order::Interleaved => interleaved_row(matrix, first_row + row, lanes),
        };
        let weights = weights.get(elements.start..).unwrap_or_default();
        out.iter_mut().zip(weights).for_each(|(out, weight)| *out = *weight);
    }
}
