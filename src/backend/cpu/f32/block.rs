//! Packed rows as kernels read them: block by block.

use super::super::codec::Codec;
use super::super::isa::Simd;
use super::super::matrix::PackedMatrix;

/// Lanes of the widest vector.
pub(super) const MAX_LANES: usize = 16;

/// Minimum prefetch distance, in bytes.
const PREFETCH_AHEAD: usize = 4096;

/// Where the codes, scales and biases of a row start.
#[derive(Clone, Copy)]
pub(super) struct Row {
    pub(super) codes: *const u8,
    pub(super) scales: *const f32,
    pub(super) biases: *const f32,
    /// See [`prefetch_distance`].
    pub(super) prefetch_distance: usize,
}

/// The codes of a block, and the scales and biases of its groups.
#[derive(Clone, Copy)]
pub(super) struct Block<S: Simd> {
    codes: S::U,
    scale: S::F,
    bias: S::F,
}

/// Byte offset to prefetch: the same position in the next `rows` rows, or in rows behind them if these are short.
pub(super) fn prefetch_distance(matrix: &PackedMatrix, rows: usize) -> usize {
    let bytes = rows * (matrix.k * matrix.format.bits() / 8).max(1);
    bytes * PREFETCH_AHEAD.div_ceil(bytes)
}

/// Bytes of the codes of a block.
pub(super) const fn block_bytes<S: Simd, C: Codec>() -> usize {
    C::BITS * S::LANES / 2
}

/// A row's last, incomplete block with zeros behind it, so that no load leaves the row.
pub(super) struct Tail([u8; 64]);

impl Tail {
    pub(super) const EMPTY: Self = Self([0; 64]);

    pub(super) fn new<S: Simd, C: Codec>(words: &[u32], full_blocks: usize) -> Self {
        let start = full_blocks * block_bytes::<S, C>();
        let words = words.get(start / 4..).unwrap_or_default();
        let bytes = words.iter().flat_map(|word| word.to_le_bytes()).skip(start % 4);
        let mut tail = Self::EMPTY;
        tail.0.iter_mut().zip(bytes).for_each(|(slot, byte)| *slot = byte);
        tail
    }

    /// The address of a row whose block `full_blocks` is the tail.
    pub(super) fn origin<S: Simd, C: Codec>(&self, full_blocks: usize) -> *const u8 {
        self.0.as_ptr().wrapping_sub(full_blocks * block_bytes::<S, C>())
    }
}

/// Loads block `block` of a row, and prefetches codes.
///
/// # Safety
/// The row's pointers are valid for the block; scales and biases are followed by a vector's padding; [`Simd`]'s
/// conditions hold.
#[inline(always)]
pub(super) unsafe fn load_block<S: Simd, C: Codec>(row: Row, block: usize, group_shift: u32) -> Block<S> {
    let group = (block * S::BLOCK) >> group_shift;
    // SAFETY: the row's codes are valid for this block, of which exactly its bytes are read. Scales and biases are valid
    // for its groups, and the padding covers the rest of the vector. A prefetch never faults.
    unsafe {
        let from = row.codes.wrapping_add(block * block_bytes::<S, C>());
        S::prefetch(from.wrapping_add(row.prefetch_distance));
        Block {
            codes: C::load_codes::<S>(from),
            scale: C::broadcast::<S>(row.scales.add(group)),
            bias: if C::HAS_BIASES { C::broadcast::<S>(row.biases.add(group)) } else { S::zero() },
        }
    }
}

impl<S: Simd> Block<S> {
    /// The weights, in the order of [`super::super::isa`]. Where a caller takes one of the vectors, of a constant number
    /// once loops are unrolled, nothing is computed for the others.
    ///
    /// # Safety
    /// [`Simd`]'s conditions hold.
    #[inline(always)]
    pub(super) unsafe fn weights<C: Codec>(self) -> [S::F; 4] {
        // SAFETY: only registers are read; the caller has enabled the features of `S`.
        unsafe { C::dequantize::<S>(self.codes, self.scale, self.bias) }
    }
}
