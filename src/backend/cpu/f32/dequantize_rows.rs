//! Packed rows to f32: the kernel.

use super::super::codec::Codec;
use super::super::group_params::{GroupParams, PADDING, ROWS_PER_PASS};
use super::super::isa::Simd;
use super::super::matrix::PackedMatrix;
use super::block::{block_bytes, load_block, prefetch_distance, Row, Tail, MAX_LANES};
use super::lane_order::{deinterleave, Order};
use std::ops::Range;

/// Dequantizes up to [`ROWS_PER_PASS`] consecutive packed rows.
pub(in super::super) struct DequantizeRows<'a> {
    pub(super) matrix: &'a PackedMatrix<'a>,
    pub(super) first_row: usize,
    /// Loaded for these rows.
    pub(super) params: &'a GroupParams,
    /// Elements of each row, from the beginning of a block to the end of one or of the row.
    pub(super) elements: Range<usize>,
    pub(super) order: Order,
    /// `[rows, elements]`, padded to whole blocks if interleaved; its length sets the number of rows.
    pub(super) out: &'a mut [f32],
}

/// See [`DequantizeRows`].
///
/// # Safety
/// The CPU has the features of `S`, and the caller has enabled them.
#[inline(always)]
pub(super) unsafe fn dequantize_rows<S: Simd, C: Codec>(task: DequantizeRows<'_>) {
    let DequantizeRows { matrix, first_row, params, elements, order, out } = task;
    let full_blocks = matrix.k / S::BLOCK;
    let first_block = elements.start / S::BLOCK;
    let group_shift = matrix.format.group_size().trailing_zeros();
    let prefetch_distance = prefetch_distance(matrix, 1);
    let row_len = order.row_len(elements.len(), S::BLOCK);
    assert!(elements.start % S::BLOCK == 0 && elements.end <= matrix.k);
    assert!(elements.end % S::BLOCK == 0 || elements.end == matrix.k);
    assert!(params.stride() >= matrix.groups_per_row() + PADDING);
    for (row, out) in out.chunks_exact_mut(row_len).take(ROWS_PER_PASS).enumerate() {
        let words = matrix.row_words(first_row + row);
        assert!(words.len() * 4 >= full_blocks * block_bytes::<S, C>());
        let tail = Tail::new::<S, C>(words, full_blocks);
        let (scales, biases) = params.row(row);
        for (block, out) in (first_block..).zip(out.chunks_mut(S::BLOCK)) {
            let in_row = block < full_blocks;
            let pointers = Row {
                codes: if in_row { words.as_ptr().cast() } else { tail.origin::<S, C>(full_blocks) },
                scales: scales.as_ptr(),
                biases: biases.as_ptr(),
                prefetch_distance,
            };
            let mut interleaved = [0f32; 4 * MAX_LANES];
            let to = match order {
                Order::Natural => interleaved.as_mut_ptr(),
                Order::Interleaved => {
                    assert!(out.len() == S::BLOCK);
                    out.as_mut_ptr()
                }
            };
            // SAFETY: the block lies in the row or is the tail, to which `codes` then points; scales and biases are padded, as
            // `params` has them; `to` has room for a block. The caller has enabled the features of `S`.
            unsafe {
                let weights = load_block::<S, C>(pointers, block, group_shift).weights::<C>();
                for (i, weights) in weights.into_iter().enumerate() {
                    S::store(to.add(i * S::LANES), weights);
                }
            }
            if order == Order::Natural {
                deinterleave(&interleaved, S::LANES, out);
            }
        }
    }
}
