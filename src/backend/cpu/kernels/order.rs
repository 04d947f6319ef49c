//! The order of a block's elements in vectors.

use crate::format::Real;

/// The order of decoded rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Element `k` at place `k`.
    Natural,
    /// As [`interleave`] orders activations, padded with zeros to whole blocks.
    Interleaved,
}

/// Brings a row of activations into the order in which blocks of weights are decoded: place
/// `i * lanes + l` of a block of `4 * lanes` elements holds element `4 * l + i`. Zero-pads the last.
pub(crate) fn interleave<T: Real>(row: &[T], lanes: usize, out: &mut [f32]) {
    let mut natural = [0f32; 64];
    let block = (4 * lanes).min(natural.len());
    for (elements, places) in row.chunks(block).zip(out.chunks_mut(block)) {
        if let Some((head, tail)) = natural[..block].split_at_mut_checked(elements.len()) {
            T::widen(elements, head);
            tail.fill(0.0);
        }
        for (i, places) in places.chunks_exact_mut(lanes).enumerate() {
            for (place, four) in places.iter_mut().zip(natural.chunks_exact(4)) {
                *place = four[i & 3];
            }
        }
    }
}

/// The undoing of [`interleave`] for one block.
pub(super) fn deinterleave(block: &[f32], lanes: usize, out: &mut [f32]) {
    for (index, value) in out.iter_mut().enumerate() {
        *value = block.get(index % 4 * lanes + index / 4).copied().unwrap_or(0.0);
    }
}
