//! Sixteen packed rows as a *panel*: vectors in which lane r has four codes of row r, as bytes.
//!
//! Rows are transposed four bytes at a time, packed where codes are 1, 2, 4 or 8 bits wide, else unpacked.

#![allow(clippy::needless_range_loop)] // Loops of constant length over arrays that have to stay in registers.

use super::super::group_params::{GroupParams, ROWS_PER_PASS};
use super::super::matrix::PackedMatrix;
use super::super::row_gemv::{load, LANES};
use super::codes::IntegerCodes;
use super::unpack::{unpack, AFFINE};
use std::arch::x86_64::*;

/// Elements along K of a panel: a multiple of all groups and of what is unpacked at a time.
pub(super) const DEPTH: usize = 512;

/// Whether codes of this width are transposed packed: some of them fill four bytes.
pub(super) const fn transposed_packed(bits: usize) -> bool {
    matches!(bits, 1 | 2 | 4 | 8)
}

/// The element, counted from the first of a panel, in a byte of a vector of the panel.
pub(super) const fn element(bits: usize, vector: usize, byte: usize) -> usize {
    if transposed_packed(bits) {
        let vectors = 8 / bits;
        vector / vectors * 4 * vectors + byte * vectors + vector % vectors
    } else {
        4 * vector + byte
    }
}

/// The vector and the byte of each lane in which an element is: the inverse of [`element`].
pub(super) const fn place(bits: usize, element: usize) -> (usize, usize) {
    if transposed_packed(bits) {
        let vectors = 8 / bits;
        let within = element % (4 * vectors);
        (element / (4 * vectors) * vectors + within % vectors, within / vectors)
    } else {
        (element / 4, element % 4)
    }
}

/// Codes of a panel, four elements to a vector.
pub(super) type Panel = [[u8; 64]];

/// Bytes of a row that are unpacked at a time, for [`DEPTH`] elements or a part of them.
const fn step_bytes(bits: usize) -> usize {
    if transposed_packed(bits) {
        64
    } else {
        16 * bits
    }
}

/// See [`Panels::unpack`](super::gemm::Panels::unpack).
///
/// # Safety
/// The caller enables the features, and vouches for what that asks for; codes have `BITS` bits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,gfni,f16c")]
pub(super) unsafe fn unpack_rows<const BITS: usize, const KIND: u8>(
    matrix: &PackedMatrix,
    (first_row, rows): (usize, usize),
    first: usize,
    panel: &mut Panel,
) {
    let step = const { step_bytes(BITS) };
    let vectors = const { step_bytes(BITS) * 8 / BITS / 4 };
    let (start, row_bytes) = (first * BITS / 8, matrix.k * BITS / 8);
    let present = (row_bytes - start).min(DEPTH * BITS / 8);
    let words: [&[u32]; 16] = std::array::from_fn(|row| matrix.row_words(first_row + row.min(rows - 1)));
    let mut from = words.map(|words| words.as_ptr().cast::<u8>().wrapping_add(start));
    assert!(panel.len() * 4 >= DEPTH && words.iter().all(|words| words.len() * 4 == row_bytes));
    let whole = present / step;
    let mut tail = [[0u8; 128]; 16];
    for index in 0..present.div_ceil(step) {
        if index == whole {
            // The rest of each row, with zeros behind it.
            for row in 0..16 {
                let rest = present - whole * step;
                // SAFETY: `rest` bytes are left of the row, less than a step, for which there is room.
                unsafe {
                    std::ptr::copy_nonoverlapping(from[row].add(whole * step), tail[row].as_mut_ptr(), rest)
                };
                from[row] = tail[row].as_ptr().wrapping_sub(whole * step);
            }
        } else {
            for row in 0..16 {
                prefetch(from[row].wrapping_add(16 * row_bytes + index * step));
            }
        }
        let at = index * step;
        // SAFETY: the step lies in the rows or in their tails, which have more bytes than a step; the panel has the vectors
        // of all steps.
        unsafe {
            let to = panel.as_mut_ptr().add(index * vectors).cast::<__m512i>();
            if const { transposed_packed(BITS) } {
                transpose_packed::<BITS, KIND>(&from, at, to);
            } else {
                transpose_unpacked::<BITS, KIND>(&from, at, to);
            }
        }
    }
}

/// Prefetches a cache line of the next sixteen rows into the second-level cache: rows of a power of two bytes share few
/// lines of the first.
#[inline(always)]
fn prefetch(address: *const u8) {
    // SAFETY: a prefetch of any address is harmless: it neither faults nor changes what a program sees.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) };
}

/// Transposes a step, then unpacks it.
///
/// # Safety
/// `from` is valid for 64 bytes from `at` on, `to` for the vectors of their codes; the caller enables the features.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,gfni")]
unsafe fn transpose_packed<const BITS: usize, const KIND: u8>(
    from: &[*const u8; 16],
    at: usize,
    to: *mut __m512i,
) {
    // SAFETY: 64 bytes of a row are a vector; each of the sixteen vectors has `8 / BITS` of codes.
    unsafe {
        let mut rows = [_mm512_setzero_si512(); 16];
        for row in 0..16 {
            rows[row] = _mm512_loadu_si512(from[row].add(at).cast());
        }
        let packed = transposed(rows);
        for vector in 0..16 {
            let to = to.add(vector * (8 / BITS));
            match BITS {
                1 => store(unpack::<1, 8, AFFINE>(packed[vector], packed[vector]), to),
                2 => store(unpack::<2, 4, KIND>(packed[vector], packed[vector]), to),
                4 => store(unpack::<4, 2, KIND>(packed[vector], packed[vector]), to),
                _ => _mm512_storeu_si512(to, packed[vector]),
            }
        }
    }
}

/// Unpacks a step, then transposes it.
///
/// # Safety
/// As for [`transpose_packed`], with `16 * BITS` bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,gfni")]
unsafe fn transpose_unpacked<const BITS: usize, const KIND: u8>(
    from: &[*const u8; 16],
    at: usize,
    to: *mut __m512i,
) {
    let bytes = const { 16 * BITS };
    let mut codes = [[_mm512_setzero_si512(); 16]; 2];
    // SAFETY: a row has the bytes of the step from `at` on; `to` has sixteen lanes of both vectors.
    unsafe {
        for row in 0..16 {
            let row_at = from[row].add(at);
            let first = load(row_at, 0, bytes.min(64), bytes);
            let second = load(row_at, 64, bytes.saturating_sub(64), bytes);
            let unpacked = unpack::<BITS, 2, KIND>(first, second);
            for vector in 0..2 {
                codes[vector][row] = unpacked[vector];
            }
        }
        for vector in 0..2 {
            let lanes = transposed(codes[vector]);
            for lane in 0..16 {
                _mm512_storeu_si512(to.add(lane * 2 + vector), lanes[lane]);
            }
        }
    }
}

/// Stores vectors one behind the other.
///
/// # Safety
/// `to` is valid for all of them.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store<const VECTORS: usize>(vectors: [__m512i; VECTORS], to: *mut __m512i) {
    for vector in 0..VECTORS {
        // SAFETY: there is room for all vectors, as the caller vouches.
        unsafe { _mm512_storeu_si512(to.add(vector), vectors[vector]) };
    }
}

/// Sixteen rows as sixteen columns: lane r of vector l is lane l of row r.
#[inline]
#[target_feature(enable = "avx512f")]
fn transposed(rows: [__m512i; 16]) -> [__m512i; 16] {
    // Four rows, column by column: each 128 bits have four lanes of one column.
    let mut quads = [[rows[0]; 4]; 4];
    for quad in 0..4 {
        let [a, b, c, d] = [rows[4 * quad], rows[4 * quad + 1], rows[4 * quad + 2], rows[4 * quad + 3]];
        let (ab_low, ab_high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let (cd_low, cd_high) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        quads[0][quad] = _mm512_unpacklo_epi64(ab_low, cd_low);
        quads[1][quad] = _mm512_unpackhi_epi64(ab_low, cd_low);
        quads[2][quad] = _mm512_unpacklo_epi64(ab_high, cd_high);
        quads[3][quad] = _mm512_unpackhi_epi64(ab_high, cd_high);
    }
    let mut columns = rows;
    for part in 0..4 {
        let [a, b, c, d] = quads[part];
        // Columns `part` and 8 + `part` of the first eight rows, and 4 + `part` and 12 + `part`; and so of the others.
        let (even, odd) = (_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xDD>(a, b));
        let (even_rest, odd_rest) = (_mm512_shuffle_i32x4::<0x88>(c, d), _mm512_shuffle_i32x4::<0xDD>(c, d));
        columns[part] = _mm512_shuffle_i32x4::<0x88>(even, even_rest);
        columns[part + 8] = _mm512_shuffle_i32x4::<0xDD>(even, even_rest);
        columns[part + 4] = _mm512_shuffle_i32x4::<0x88>(odd, odd_rest);
        columns[part + 12] = _mm512_shuffle_i32x4::<0xDD>(odd, odd_rest);
    }
    columns
}

/// Scales and biases of a panel's rows, a vector of sixteen rows for each group.
pub(in super::super) struct PanelParams {
    /// Times the unit of the codes.
    pub(super) scales: Vec<[f32; LANES]>,
    /// Of codes less their center: `q * s + b = (q - center) * s + (b + center * s)`. None where the format has none.
    pub(super) biases: Vec<[f32; LANES]>,
    /// Of codes as they are.
    pub(super) stored_biases: Vec<[f32; LANES]>,
}

impl PanelParams {
    pub(super) fn new(matrix: &PackedMatrix, has_biases: bool) -> Self {
        let groups = matrix.groups_per_row();
        let zeros = |any: bool| vec![[0.; LANES]; if any { groups } else { 0 }];
        Self { scales: zeros(true), biases: zeros(has_biases), stored_biases: zeros(has_biases) }
    }

    /// Reads those of up to sixteen rows, for codes that are integers as `codes` says; `of_rows` is room for them.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,gfni,f16c")]
    pub(super) fn load(
        &mut self,
        matrix: &PackedMatrix,
        codes: &IntegerCodes,
        (first_row, rows): (usize, usize),
        of_rows: &mut GroupParams,
    ) {
        of_rows.load(matrix, first_row, rows);
        let unit = _mm512_set1_ps(codes.unit);
        let center = _mm512_set1_ps(codes.center as f32);
        for first in (0..self.scales.len()).step_by(LANES) {
            let mut rows = [[_mm512_setzero_si512(); 16]; 2];
            for row in 0..ROWS_PER_PASS {
                let (scales, biases) = of_rows.row(row);
                for (rows, values) in rows.iter_mut().zip([scales, biases]) {
                    if let Some(sixteen) =
                        values.get(first..).and_then(|values| values.first_chunk::<LANES>())
                    {
                        // SAFETY: a chunk has the sixteen numbers of a vector.
                        rows[row] = unsafe { _mm512_loadu_si512(sixteen.as_ptr().cast()) };
                    }
                }
            }
            let [scales, biases] = [transposed(rows[0]), transposed(rows[1])];
            for (index, (scales, biases)) in scales.into_iter().zip(biases).enumerate() {
                let scales = _mm512_mul_ps(_mm512_castsi512_ps(scales), unit);
                let biases = _mm512_castsi512_ps(biases);
                // SAFETY: an array has the sixteen numbers of a vector.
                unsafe {
                    if let Some(to) = self.scales.get_mut(first + index) {
                        _mm512_storeu_ps(to.as_mut_ptr(), scales);
                    }
                    if let Some(to) = self.stored_biases.get_mut(first + index) {
                        _mm512_storeu_ps(to.as_mut_ptr(), biases);
                    }
                    if let Some(to) = self.biases.get_mut(first + index) {
                        _mm512_storeu_ps(to.as_mut_ptr(), _mm512_fmadd_ps(scales, center, biases));
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_has_its_place() {
        for bits in [1, 2, 3, 4, 5, 6, 8] {
            let places: Vec<_> = (0..DEPTH).map(|element| place(bits, element)).collect();
            for (index, (vector, byte)) in places.iter().enumerate() {
                assert!(*vector < DEPTH / 4 && *byte < 4, "{bits} bits, element {index}");
                assert_eq!(element(bits, *vector, *byte), index, "{bits} bits");
            }
        }
    }
}
