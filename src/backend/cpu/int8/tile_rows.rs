//! Sixteen packed rows, the height of a tile.

use super::super::group_params::GroupParams;
use super::super::isa::amx_tile::{self, Line, ROWS};
use super::super::matrix::PackedMatrix;
use super::affine_codes::{AffineCodes, STEP};
use std::ops::Range;

/// Up to sixteen rows of a matrix as signed bytes, with a scale (and a bias) for each group.
///
/// Where one scale does not suffice for a group, it is multiplied in several *passes*, each with a scale of its own.
pub(super) trait TileRows<'a>: Sized {
    /// The unit of a byte, beside the scales.
    const UNIT: f32;

    /// Whether groups have biases.
    const BIASES: bool;

    /// Elements that share a scale; up to 128.
    fn group_size(matrix: &PackedMatrix) -> usize;

    /// No rows yet.
    fn new(matrix: &'a PackedMatrix<'a>) -> Self;

    /// Loads `rows` rows from `first_row` on, as many as there are, at most [`ROWS`].
    ///
    /// # Safety
    /// The CPU has AVX-512 as `Avx512` proves it.
    unsafe fn load(&mut self, first_row: usize, rows: usize);

    /// Whether the fixed point keeps enough bits in these steps of the activations `x`, rows of K: those that meet groups
    /// of one scale share a unit.
    fn keeps_precision(&self, _steps: &Range<usize>, _x: &[f32]) -> bool {
        true
    }

    /// How many passes these steps of the rows take.
    fn passes(&self, steps: &Range<usize>) -> usize;

    /// Scales and biases (anything, where there are none) of the first row in a pass, and the distance to those of the next
    /// row; None if no row has such a pass.
    fn params(&self, pass: usize) -> Option<(*const f32, *const f32, usize)>;

    /// Unpacks steps of every row in a pass, each into a row of a tile.
    ///
    /// # Safety
    /// The caller enables the features that `Avx512` proves; rows have the steps; `to` is valid for all of them.
    unsafe fn unpack(&self, steps: Range<usize>, pass: usize, to: *mut Line);
}

/// How many of the steps lie completely in the rows.
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

/// Up to sixteen rows of affine codes, with their scales, and biases that absorb the zero point of the codes.
pub(super) struct AffineRows<'a, const BITS: usize> {
    matrix: &'a PackedMatrix<'a>,
    words: &'a [u32],
    rows: usize,
    tail: [Line; ROWS],
    params: GroupParams,
}

impl<'a, const BITS: usize> TileRows<'a> for AffineRows<'a, BITS> {
    const UNIT: f32 = AffineCodes::<BITS>::UNIT;
    const BIASES: bool = true;

    fn group_size(matrix: &PackedMatrix) -> usize {
        matrix.format.group_size()
    }

    fn new(matrix: &'a PackedMatrix<'a>) -> Self {
        let params = GroupParams::new(matrix);
        Self { matrix, words: &[], rows: 0, tail: [Line::ZERO; ROWS], params }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c")]
    unsafe fn load(&mut self, first_row: usize, rows: usize) {
        (self.words, self.rows) = self.matrix.rows_words(first_row, rows.min(ROWS));
        self.params.load(self.matrix, first_row, self.rows);
        self.params.absorb_center(AffineCodes::<BITS>::CENTER);
        tails(self.matrix, self.words, &mut self.tail);
    }

    #[inline(always)]
    fn passes(&self, _steps: &Range<usize>) -> usize {
        1
    }

    #[inline(always)]
    fn params(&self, _pass: usize) -> Option<(*const f32, *const f32, usize)> {
        let (scales, biases) = self.params.pointers();
        Some((scales, biases, self.params.stride()))
    }

    #[inline(always)]
    unsafe fn unpack(&self, steps: Range<usize>, _pass: usize, to: *mut Line) {
        let step_bytes = STEP * BITS / 8;
        let row_bytes = self.matrix.k * BITS / 8;
        let full = full_steps(self.matrix, &steps);
        let mut from = self.words.as_ptr().cast::<u8>().wrapping_add(steps.start * step_bytes);
        for row in 0..self.rows {
            // SAFETY: full steps lie in the row, and the tail has the bytes of a step; `to` is valid, as the caller vouches.
            unsafe {
                for step in 0..full {
                    AffineCodes::<BITS>::unpack(
                        from.wrapping_add(step * step_bytes),
                        to.add(step * ROWS + row),
                    );
                }
                if full < steps.len() {
                    AffineCodes::<BITS>::unpack(
                        amx_tile::bytes(&self.tail[row..]),
                        to.add(full * ROWS + row),
                    );
                }
            }
            from = from.wrapping_add(row_bytes);
        }
    }
}
