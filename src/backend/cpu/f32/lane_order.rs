//! The order of a block's elements in the lanes of vectors.

use crate::format::Real;

/// The order of dequantized rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Order {
    /// Element `k` at index `k`.
    Natural,
    /// As [`interleave`] orders activations, padded with zeros to whole blocks.
    Interleaved,
}

impl Order {
    /// Numbers that a row of `elements` elements fills.
    #[inline(always)]
    pub(super) fn row_len(self, elements: usize, block: usize) -> usize {
        match self {
            Self::Natural => elements,
            Self::Interleaved => elements.next_multiple_of(block),
        }
    }
}

/// Brings a row of x into the order in which blocks of weights are dequantized: index `i * lanes + l` of a block of
/// `4 * lanes` elements holds element `4 * l + i`. Pads the last block with zeros.
pub(super) fn interleave<T: Real>(row: &[T], lanes: usize, out: &mut [f32]) {
    let mut natural = [0f32; 64];
    let block = (4 * lanes).min(natural.len());
    for (elements, out) in row.chunks(block).zip(out.chunks_mut(block)) {
        if let Some((head, tail)) = natural[..block].split_at_mut_checked(elements.len()) {
            T::widen(elements, head);
            tail.fill(0.0);
        }
        for (i, out) in out.chunks_exact_mut(lanes).enumerate() {
            for (out, four) in out.iter_mut().zip(natural.chunks_exact(4)) {
                *out = four[i & 3];
            }
        }
    }
}

/// The inverse of [`interleave`], for one block or the beginning of one.
#[inline(always)]
pub(super) fn deinterleave(block: &[f32], lanes: usize, out: &mut [f32]) {
    let vector = |i: usize| block.get(i * lanes..).unwrap_or_default().iter().take(lanes);
    let fours = vector(0).zip(vector(1)).zip(vector(2).zip(vector(3)));
    for (out, ((a, b), (c, d))) in out.chunks_mut(4).zip(fours) {
        out.iter_mut().zip([a, b, c, d]).for_each(|(out, value)| *out = *value);
    }
}
