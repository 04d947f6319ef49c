//! Rows of weights in their natural order, with the bits of the scalar reference.

use super::super::group_params::{GroupParams, ROWS_PER_PASS};
use super::super::matrix::PackedMatrix;
use super::dequantize_rows::DequantizeRows;
use super::kernels::Kernels;
use super::lane_order::Order;
use crate::format::Real;
use rayon::prelude::*;

/// All rows, `[N, K]`, bit for bit as the scalar reference dequantizes them, rounded once to `T`.
pub(in super::super) fn dequantize<T: Real>(kernels: &dyn Kernels, matrix: &PackedMatrix) -> Vec<T> {
    let mut out = vec![0f32; matrix.rows * matrix.k];
    out.par_chunks_mut(ROWS_PER_PASS * matrix.k).enumerate().for_each(|(pass, out)| {
        dequantize_exactly(kernels, matrix, pass * ROWS_PER_PASS, out);
    });
    T::round_all(out)
}

/// The rows `ids`, `[ids, K]`; every id is below `matrix.rows`.
pub(in super::super) fn gather<T: Real>(
    kernels: &dyn Kernels,
    matrix: &PackedMatrix,
    ids: &[usize],
) -> Vec<T> {
    let mut out = vec![0f32; ids.len() * matrix.k];
    for (&id, row) in ids.iter().zip(out.chunks_exact_mut(matrix.k)) {
        dequantize_exactly(kernels, matrix, id, row);
    }
    T::round_all(out)
}

/// Dequantizes up to [`ROWS_PER_PASS`] rows with the bits of the scalar reference. Where scales are f32, a fused
/// multiply-add has others.
fn dequantize_exactly(kernels: &dyn Kernels, matrix: &PackedMatrix, first_row: usize, out: &mut [f32]) {
    if matrix.scaling_is_exact() {
        let mut params = GroupParams::new(matrix);
        let rows = (first_row, out.len() / matrix.k);
        kernels.load_params(&mut params, matrix, rows, 0..matrix.groups_per_row());
        let (elements, order) = (0..matrix.k, Order::Natural);
        kernels.dequantize_rows(DequantizeRows { matrix, first_row, params: &params, elements, order, out });
    } else {
        for (row, out) in out.chunks_exact_mut(matrix.k).enumerate() {
            matrix.dequantize_row(first_row + row, out);
        }
    }
}
