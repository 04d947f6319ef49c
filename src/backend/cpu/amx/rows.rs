//! Sixteen packed rows, the height of a tile.

use super::super::kernels::Parameters;
use super::super::matrix::PackedMatrix;
use super::codes::{Codes, STEP};
use super::tile::{self, Line, ROWS};
use std::ops::Range;

/// Up to sixteen rows of a matrix, with their scales and (centred) biases.
pub(super) struct RowBlock<'a> {
    matrix: &'a PackedMatrix<'a>,
    words: &'a [u32],
    rows: usize,
    /// The last step of each row with zeros behind it, if it is incomplete.
    tail: [Line; ROWS],
    parameters: Parameters,
}

impl<'a> RowBlock<'a> {
    /// A block without rows.
    pub(super) fn new(matrix: &'a PackedMatrix<'a>) -> Self {
        let parameters = Parameters::new(matrix);
        Self { matrix, words: &[], rows: 0, tail: [Line::ZERO; ROWS], parameters }
    }

    /// Takes `rows` rows from `first_row` on, as many as there are.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c")]
    pub(super) fn take<const BITS: usize>(&mut self, first_row: usize, rows: usize) {
        let matrix = self.matrix;
        let row_words = matrix.k * BITS / 32;
        self.rows = rows.min(ROWS);
        self.words = matrix.words.get(first_row * row_words..).unwrap_or_default();
        self.words = self.words.get(..self.rows * row_words).unwrap_or_default();
        if self.words.is_empty() {
            self.rows = 0;
            return;
        }
        self.parameters.load(matrix, first_row, self.rows);
        self.parameters.centre(Codes::<BITS>::CENTRE);
        if !matrix.k.is_multiple_of(STEP) {
            let full = matrix.k / STEP * (STEP * BITS / 32);
            for (tail, row) in self.tail.iter_mut().zip(self.words.chunks_exact(row_words)) {
                tail.0.iter_mut().zip(row.iter().skip(full)).for_each(|(to, from)| *to = *from);
            }
        }
    }

    /// Scales and biases of the first row, and how far those of the next one are.
    #[inline(always)]
    pub(super) fn parameters(&self) -> (*const f32, *const f32, usize) {
        self.parameters.pointers()
    }

    /// Unpacks steps of every row, each into a row of a tile.
    ///
    /// # Safety
    /// The features of [`Codes::unpack`] are enabled; rows have the steps; `to` has room.
    #[inline(always)]
    pub(super) unsafe fn unpack<const BITS: usize>(&self, steps: Range<usize>, to: *mut Line) {
        let step_bytes = STEP * BITS / 8;
        let row_bytes = self.matrix.k * BITS / 8;
        let full = steps.end.min(self.matrix.k / STEP).saturating_sub(steps.start);
        let mut from = self.words.as_ptr().cast::<u8>().wrapping_add(steps.start * step_bytes);
        for row in 0..self.rows {
            // SAFETY: the caller's promise.
            unsafe {
                for step in 0..full {
                    Codes::<BITS>::unpack(from.wrapping_add(step * step_bytes), to.add(step * ROWS + row));
                }
                if full < steps.len() {
                    Codes::<BITS>::unpack(tile::bytes(&self.tail[row..]), to.add(full * ROWS + row));
                }
            }
            from = from.wrapping_add(row_bytes);
        }
    }
}
