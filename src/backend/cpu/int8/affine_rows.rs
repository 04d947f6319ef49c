//! Sixteen packed rows, the height of a tile.

use super::super::kernels::Parameters;
use super::super::matrix::PackedMatrix;
use super::codes::{Codes, STEP};
use super::tile::{self, Line, ROWS};
use std::ops::Range;

/// Up to sixteen rows of a matrix as signed bytes, which groups share scales (and biases) of.
///
/// Where one scale does not do for a group, it is multiplied in several *passes*, each with a scale of its own.
pub(super) trait Rows<'a>: Sized {
    /// What a byte is a multiple of, beside the scales.
    const UNIT: f32;

    /// Whether groups have biases.
    const BIASES: bool;

    /// Elements that share a scale; up to 128.
    fn group_size(matrix: &PackedMatrix) -> usize;

    /// No rows yet.
    fn new(matrix: &'a PackedMatrix<'a>) -> Self;

    /// Takes `rows` rows from `first_row` on, as many as there are, at most [`ROWS`].
    ///
    /// # Safety
    /// [`super::detected`] has returned true.
    unsafe fn take(&mut self, first_row: usize, rows: usize);

    /// Whether these steps keep what the activations `x`, vectors of K, contribute, although those that meet groups
    /// of one scale are multiples of one number.
    fn keep(&self, _steps: &Range<usize>, _x: &[f32]) -> bool {
        true
    }

    /// How many passes these steps of the rows take.
    fn passes(&self, steps: &Range<usize>) -> usize;

    /// Scales and biases (anything, where there are none) of the first row in a pass, and how far those of the next one
    /// are; `None` if there is no such pass in any row.
    fn parameters(&self, pass: usize) -> Option<(*const f32, *const f32, usize)>;

    /// Unpacks steps of every row in a pass, each into a row of a tile.
    ///
    /// # Safety
    /// The features of [`super::panels::products`] are enabled; rows have the steps; `to` has room.
    unsafe fn unpack(&self, steps: Range<usize>, pass: usize, to: *mut Line);
}

/// The words of `rows` rows from `first_row` on, as many as there are, and how many that is.
pub(super) fn packed_rows<'a>(
    matrix: &PackedMatrix<'a>,
    first_row: usize,
    rows: usize,
) -> (&'a [u32], usize) {
    let row_words = matrix.k * matrix.format.bits() / 32;
    let rows = rows.min(matrix.rows.saturating_sub(first_row));
    let words = matrix.words.get(first_row * row_words..).and_then(|words| words.get(..rows * row_words));
    words.map_or((&[], 0), |words| (words, rows))
}

/// How many of the steps lie in the rows as a whole.
#[inline(always)]
pub(super) fn full_steps(matrix: &PackedMatrix, steps: &Range<usize>) -> usize {
    steps.end.min(matrix.k / STEP).saturating_sub(steps.start)
}

/// The last step of each row with zeros behind it, if it is incomplete.
pub(super) fn tails(matrix: &PackedMatrix, words: &[u32], tails: &mut [Line; ROWS]) {
    if !matrix.k.is_multiple_of(STEP) {
        let bits = matrix.format.bits();
        let full = matrix.k / STEP * (STEP * bits / 32);
        for (tail, row) in tails.iter_mut().zip(words.chunks_exact(matrix.k * bits / 32)) {
            tail.0.iter_mut().zip(row.iter().skip(full)).for_each(|(to, from)| *to = *from);
        }
    }
}

/// Up to sixteen rows of affine codes, with their scales and (centred) biases.
pub(super) struct AffineRows<'a, const BITS: usize> {
    matrix: &'a PackedMatrix<'a>,
    words: &'a [u32],
    rows: usize,
    tail: [Line; ROWS],
    parameters: Parameters,
}

impl<'a, const BITS: usize> Rows<'a> for AffineRows<'a, BITS> {
    const UNIT: f32 = Codes::<BITS>::UNIT;
    const BIASES: bool = true;

    fn group_size(matrix: &PackedMatrix) -> usize {
        matrix.format.group_size()
    }

    fn new(matrix: &'a PackedMatrix<'a>) -> Self {
        let parameters = Parameters::new(matrix);
        Self { matrix, words: &[], rows: 0, tail: [Line::ZERO; ROWS], parameters }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c")]
    unsafe fn take(&mut self, first_row: usize, rows: usize) {
        (self.words, self.rows) = packed_rows(self.matrix, first_row, rows.min(ROWS));
        self.parameters.load(self.matrix, first_row, self.rows);
        self.parameters.centre(Codes::<BITS>::CENTRE);
        tails(self.matrix, self.words, &mut self.tail);
    }

    #[inline(always)]
    fn passes(&self, _steps: &Range<usize>) -> usize {
        1
    }

    #[inline(always)]
    fn parameters(&self, _pass: usize) -> Option<(*const f32, *const f32, usize)> {
        Some(self.parameters.pointers())
    }

    #[inline(always)]
    unsafe fn unpack(&self, steps: Range<usize>, _pass: usize, to: *mut Line) {
        let step_bytes = STEP * BITS / 8;
        let row_bytes = self.matrix.k * BITS / 8;
        let full = full_steps(self.matrix, &steps);
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
