//! The two kernels of the CPU backend, once for every format and instruction set: products of packed rows, and their
//! decode. Both take rows block by block.

mod decode;
mod dot;
mod order;

use super::matrix::PackedMatrix;
use super::recipe::Recipe;
use super::simd::Simd;
pub(super) use decode::{decode_rows, DecodeRows};
pub(super) use dot::{dot_rows, DotRows};
pub(super) use order::{interleave, Order};

/// Numbers appended to a row's scales and biases, so that the last block may read a whole vector.
const PADDING: usize = 16;

/// The most rows that a kernel takes at a time: their parameters and sums are kept together.
pub(crate) const ROWS_PER_PASS: usize = 16;

/// Lanes of the widest vector.
const MAX_LANES: usize = 16;

/// How far ahead of the codes in use memory is asked for at least, in bytes.
const PREFETCH_AHEAD: usize = 4096;

/// Scales and biases of up to [`ROWS_PER_PASS`] rows as f32, each row followed by [`PADDING`] zeros.
pub(crate) struct Parameters {
    stride: usize,
    scales: Vec<f32>,
    biases: Vec<f32>,
}

impl Parameters {
    pub(crate) fn new(matrix: &PackedMatrix) -> Self {
        let stride = matrix.groups_per_row() + PADDING;
        let len = ROWS_PER_PASS * stride;
        Self { stride, scales: vec![0.0; len], biases: vec![0.0; len] }
    }

    /// Padded scales and biases of a row.
    pub(super) fn row(&self, row: usize) -> (&[f32], &[f32]) {
        let places = row * self.stride..(row + 1) * self.stride;
        let of_row = |all| <[f32]>::get(all, places.clone()).unwrap_or_default();
        (of_row(&self.scales), of_row(&self.biases))
    }

    /// Those of the first row, and how far those of the next one are.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(super) fn pointers(&self) -> (*const f32, *const f32, usize) {
        (self.scales.as_ptr(), self.biases.as_ptr(), self.stride)
    }

    /// Makes the biases those of codes less `centre`: `q * s + b = (q - centre) * s + (b + centre * s)`.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(super) fn centre(&mut self, centre: f32) {
        for (bias, scale) in self.biases.iter_mut().zip(&self.scales) {
            *bias = scale.mul_add(centre, *bias);
        }
    }

    /// Fetches those of `rows` rows from `first_row` on. Inlined where vector instructions are enabled.
    #[inline(always)]
    pub(super) fn load(&mut self, matrix: &PackedMatrix, first_row: usize, rows: usize) {
        let scales = self.scales.chunks_exact_mut(self.stride);
        let biases = self.biases.chunks_exact_mut(self.stride);
        for (row, (scales, biases)) in scales.zip(biases).take(rows).enumerate() {
            matrix.row_parameters(first_row + row, scales, biases);
        }
    }
}

/// Where the codes, scales and biases of a row start.
#[derive(Clone, Copy)]
struct Row {
    codes: *const u8,
    scales: *const f32,
    biases: *const f32,
    /// Where the codes are that come after them, from here, in bytes.
    ahead: usize,
}

/// What the weights of a block are made of.
#[derive(Clone, Copy)]
struct Block<S: Simd> {
    codes: S::U,
    scale: S::F,
    bias: S::F,
}

/// How far it is to the same place of the rows that come next, when so many go together.
fn ahead(matrix: &PackedMatrix, together: usize) -> usize {
    let bytes = together * (matrix.k * matrix.format.bits() / 8).max(1);
    bytes * PREFETCH_AHEAD.div_ceil(bytes)
}

/// Bytes of the codes of a block.
const fn block_bytes<S: Simd, R: Recipe>() -> usize {
    R::BITS * S::LANES / 2
}

/// A row's last, incomplete block with zeros behind it, so that no load leaves the row.
struct Tail([u8; 64]);

impl Tail {
    const EMPTY: Self = Self([0; 64]);

    fn new<S: Simd, R: Recipe>(words: &[u32], full_blocks: usize) -> Self {
        let start = full_blocks * block_bytes::<S, R>();
        let words = words.get(start / 4..).unwrap_or_default();
        let bytes = words.iter().flat_map(|word| word.to_le_bytes()).skip(start % 4);
        let mut tail = Self::EMPTY;
        tail.0.iter_mut().zip(bytes).for_each(|(place, byte)| *place = byte);
        tail
    }

    /// The address from which block `full_blocks` is found in the tail.
    fn origin<S: Simd, R: Recipe>(&self, full_blocks: usize) -> *const u8 {
        self.0.as_ptr().wrapping_sub(full_blocks * block_bytes::<S, R>())
    }
}

/// Fetches block `block` of a row.
///
/// # Safety
/// The row's pointers must cover the block; [`Simd`]'s conditions hold.
#[inline(always)]
unsafe fn fetch<S: Simd, R: Recipe>(row: Row, block: usize, group_shift: u32) -> Block<S> {
    let group = (block * S::BLOCK) >> group_shift;
    // SAFETY: the caller's promise; parameters are padded to a whole vector.
    unsafe {
        let from = row.codes.wrapping_add(block * block_bytes::<S, R>());
        S::prefetch(from.wrapping_add(row.ahead));
        Block {
            codes: R::load_codes::<S>(from),
            scale: R::spread::<S>(row.scales.add(group)),
            bias: if R::HAS_BIASES { R::spread::<S>(row.biases.add(group)) } else { S::zero() },
        }
    }
}

impl<S: Simd> Block<S> {
    /// The weights, in the order of [`super::simd`]. Where a caller takes one of the vectors, of a constant number once
    /// loops are unrolled, nothing is computed for the others.
    ///
    /// # Safety
    /// As [`Simd`].
    #[inline(always)]
    unsafe fn weights<R: Recipe>(self) -> [S::F; 4] {
        // SAFETY: the caller's promise.
        unsafe { R::decode::<S>(self.codes, self.scale, self.bias) }
    }
}
