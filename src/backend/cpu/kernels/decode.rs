//! Packed rows to f32.

use super::super::matrix::PackedMatrix;
use super::super::recipe::Recipe;
use super::super::simd::Simd;
use super::order::{deinterleave, Order};
use super::{ahead, block_bytes, fetch, Parameters, Row, Tail, MAX_LANES, PADDING, ROWS_PER_PASS};
use std::ops::Range;

/// Decodes up to [`ROWS_PER_PASS`] consecutive packed rows.
pub(crate) struct DecodeRows<'a> {
    pub(crate) matrix: &'a PackedMatrix<'a>,
    pub(crate) first_row: usize,
    /// Those of the rows, loaded.
    pub(crate) parameters: &'a Parameters,
    /// Elements of each row, from the beginning of a block to the end of one or of the row.
    pub(crate) elements: Range<usize>,
    pub(crate) order: Order,
    /// `[rows, elements]`, interleaved padded to whole blocks; its length sets the number of rows.
    pub(crate) out: &'a mut [f32],
}

/// See [`DecodeRows`].
///
/// # Safety
/// The CPU has the features of `S`, and the caller has enabled them.
#[inline(always)]
pub(in crate::backend::cpu) unsafe fn decode_rows<S: Simd, R: Recipe>(task: DecodeRows<'_>) {
    let DecodeRows { matrix, first_row, parameters, elements, order, out } = task;
    let full_blocks = matrix.k / S::BLOCK;
    let first_block = elements.start / S::BLOCK;
    let group_shift = matrix.format.group_size().trailing_zeros();
    let ahead = ahead(matrix, 1);
    let row_len = match order {
        Order::Natural => elements.len(),
        Order::Interleaved => elements.len().next_multiple_of(S::BLOCK),
    };
    assert!(elements.start % S::BLOCK == 0 && elements.end <= matrix.k);
    assert!(elements.end % S::BLOCK == 0 || elements.end == matrix.k);
    assert!(parameters.stride >= matrix.groups_per_row() + PADDING);
    for (row, out) in out.chunks_exact_mut(row_len).take(ROWS_PER_PASS).enumerate() {
        let words = matrix.row_words(first_row + row);
        assert!(words.len() * 4 >= full_blocks * block_bytes::<S, R>());
        let tail = Tail::new::<S, R>(words, full_blocks);
        let (scales, biases) = parameters.row(row);
        for (block, out) in (first_block..).zip(out.chunks_mut(S::BLOCK)) {
            let in_row = block < full_blocks;
            let pointers = Row {
                codes: if in_row { words.as_ptr().cast() } else { tail.origin::<S, R>(full_blocks) },
                scales: scales.as_ptr(),
                biases: biases.as_ptr(),
                ahead,
            };
            let mut decoded = [0f32; 4 * MAX_LANES];
            let to = match order {
                Order::Natural => decoded.as_mut_ptr(),
                Order::Interleaved => {
                    assert!(out.len() == S::BLOCK);
                    out.as_mut_ptr()
                }
            };
            // SAFETY: the caller's promise; the block lies in the row or is the tail, and there are places for it.
            unsafe {
                let weights = fetch::<S, R>(pointers, block, group_shift).weights::<R>();
                for (i, weights) in weights.into_iter().enumerate() {
                    S::store(to.add(i * S::LANES), weights);
                }
            }
            if order == Order::Natural {
                deinterleave(&decoded, S::LANES, out);
            }
        }
    }
}
