//! Scales and biases of a few packed rows as f32, as kernels read them.

use super::matrix::PackedMatrix;
use std::ops::Range;

/// Values appended to a row's scales and biases, so that the last block may read a whole vector.
pub(super) const PADDING: usize = 16;

/// The most rows of a weight that a kernel takes in one pass: their scales and sums are kept together.
pub(super) const ROWS_PER_PASS: usize = 16;

/// Scales and biases of up to [`ROWS_PER_PASS`] rows, each row followed by [`PADDING`] zeros.
pub(super) struct GroupParams {
    stride: usize,
    scales: Vec<f32>,
    biases: Vec<f32>,
}

impl GroupParams {
    pub(super) fn new(matrix: &PackedMatrix) -> Self {
        let stride = matrix.groups_per_row() + PADDING;
        let len = ROWS_PER_PASS * stride;
        Self { stride, scales: vec![0.0; len], biases: vec![0.0; len] }
    }

    /// The distance from one row to the next.
    #[inline(always)]
    pub(super) fn stride(&self) -> usize {
        self.stride
    }

    /// Padded scales and biases of a row.
    pub(super) fn row(&self, row: usize) -> (&[f32], &[f32]) {
        let range = row * self.stride..(row + 1) * self.stride;
        let of_row = |all| <[f32]>::get(all, range.clone()).unwrap_or_default();
        (of_row(&self.scales), of_row(&self.biases))
    }

    /// Reads `rows` rows of the weight, from `first_row` on. Inlined where vector instructions are enabled.
    #[inline(always)]
    pub(super) fn load(&mut self, matrix: &PackedMatrix, first_row: usize, rows: usize) {
        self.load_groups(matrix, (first_row, rows), 0..matrix.groups_per_row());
    }

    /// The same for some groups of each row; others keep what they were.
    #[inline(always)]
    pub(super) fn load_groups(
        &mut self,
        matrix: &PackedMatrix,
        (first_row, rows): (usize, usize),
        groups: Range<usize>,
    ) {
        let scales = self.scales.chunks_exact_mut(self.stride);
        let biases = self.biases.chunks_exact_mut(self.stride);
        for (row, (scales, biases)) in scales.zip(biases).take(rows).enumerate() {
            matrix.row_params(first_row + row, groups.clone(), scales, biases);
        }
    }
}
