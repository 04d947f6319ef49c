//! Panels and tiles of x, with AVX2: a vector is half of a panel's.

#![allow(clippy::needless_range_loop)] // Loops of constant length over arrays that have to stay in registers.

use super::super::group_params::GroupParams;
use super::super::isa::avx2::Avx2;
use super::super::matrix::PackedMatrix;
use super::codes::IntegerCodes;
use super::gemm::{Chunk, Sums};
use super::gemv_avx2::unpack::load_block;
use super::magnitudes::Magnitudes;
use super::outliers::Outlier;
use super::panel_columns::Columns;
use super::tables::with_codes;
use super::weight_panels::{rows_of_panel, transposed_packed, Panel, PanelParams, Panels};
use super::x_tiles::{unit_and_sum, Layout, Tile, LARGEST_GROUP};
use std::arch::x86_64::*;
use std::ops::Range;

impl Panels for Avx2 {
    fn magnitudes(self) -> impl Magnitudes {
        self
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(
        params: &mut PanelParams,
        matrix: &PackedMatrix,
        codes: &IntegerCodes,
        (first_row, rows): (usize, usize),
        of_rows: &mut GroupParams,
    ) {
        of_rows.load(matrix, first_row, rows);
        params.fill(codes, of_rows);
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn unpack(
        (of, _): (&IntegerCodes, Layout),
        matrix: &PackedMatrix,
        rows: (usize, usize),
        first: usize,
        panel: &mut Panel,
    ) {
        // SAFETY: the caller vouches for the rows; codes have the width that their kind says.
        unsafe { with_codes!(of.kind, unpack_rows(matrix, rows, first, panel)) };
    }

    #[target_feature(enable = "avx2,fma")]
    unsafe fn add_outliers(
        columns: Columns,
        chunk: Chunk,
        outliers: (&[Outlier], Range<usize>),
        sums: &mut Sums,
    ) {
        columns.add_outliers(chunk, outliers, sums);
    }

    #[target_feature(enable = "avx2,fma")]
    unsafe fn fill<const DIGITS: usize>(
        tile: &mut Tile,
        at: (usize, usize),
        x: &[f32],
        center: i32,
        order: (&[u8; 64], Layout),
    ) {
        let (unit, sum) = unit_and_sum(x, DIGITS);
        let inverse = _mm256_set1_ps(1. / unit);
        let mut integers = [0i32; LARGEST_GROUP];
        for (to, x) in integers.as_chunks_mut::<8>().0.iter_mut().zip(x.as_chunks::<8>().0) {
            // SAFETY: both have the eight numbers of a vector.
            unsafe {
                let x = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x.as_ptr()), inverse));
                _mm256_storeu_si256(to.as_mut_ptr().cast(), x);
            }
        }
        tile.put::<DIGITS>(at, &mut integers[..x.len()], (unit, sum), center, order);
    }
}

/// Bytes of a row that are unpacked at a time.
const fn step_bytes(bits: usize) -> usize {
    if transposed_packed(bits) {
        32
    } else {
        4 * bits
    }
}

/// See [`Panels::unpack`].
///
/// # Safety
/// The caller enables the features, and vouches for what that asks for; codes have `BITS` bits.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack_rows<const BITS: usize, const KIND: u8>(
    matrix: &PackedMatrix,
    rows: (usize, usize),
    first: usize,
    panel: &mut Panel,
) {
    let step = const { step_bytes(BITS) };
    let vectors = const { step_bytes(BITS) * 8 / BITS / 4 };
    let (starts, present) = rows_of_panel(matrix, rows, first, BITS);
    let (whole, rest) = (present / step, present % step);
    let mut tails = [[0u8; 32]; 16];
    for index in 0..present.div_ceil(step) {
        let to = &mut panel[index * vectors..][..vectors];
        let mut from = starts.map(|start| start.wrapping_add(index * step));
        if index == whole {
            // The rest of each row, with zeros behind it.
            for row in 0..16 {
                // SAFETY: `rest` bytes are left of the row, less than a step, for which there is room.
                unsafe { std::ptr::copy_nonoverlapping(from[row], tails[row].as_mut_ptr(), rest) };
                from[row] = tails[row].as_ptr();
            }
        }
        for half in 0..2 {
            let mut eight = [_mm256_setzero_si256(); 8];
            for row in 0..8 {
                // SAFETY: the step lies in the row or in its tail, which has more bytes than a step.
                unsafe {
                    eight[row] = match const { transposed_packed(BITS) } {
                        true => _mm256_loadu_si256(from[8 * half + row].cast()),
                        false => load_block::<BITS, 1, KIND>(from[8 * half + row])[0],
                    };
                }
            }
            for (column, to) in transposed(eight).into_iter().zip(to.chunks_exact_mut(vectors / 8)) {
                match BITS {
                    1 => store(unpacked::<1, 8, KIND>(column), half, to),
                    2 => store(unpacked::<2, 4, KIND>(column), half, to),
                    4 => store(unpacked::<4, 2, KIND>(column), half, to),
                    _ => store([column], half, to),
                }
            }
        }
    }
}

/// See [`load_block`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn unpacked<const BITS: usize, const VECTORS: usize, const KIND: u8>(packed: __m256i) -> [__m256i; VECTORS] {
    // SAFETY: a block of these codes is a vector.
    unsafe { load_block::<BITS, VECTORS, KIND>((&raw const packed).cast()) }
}

/// Stores one half of vectors of a panel.
#[inline]
#[target_feature(enable = "avx2")]
fn store<const VECTORS: usize>(vectors: [__m256i; VECTORS], half: usize, panel: &mut Panel) {
    for (vector, to) in vectors.into_iter().zip(panel) {
        // SAFETY: the half has the 32 bytes that are written.
        unsafe { _mm256_storeu_si256(to[32 * half..][..32].as_mut_ptr().cast(), vector) };
    }
}

/// Eight rows as eight columns: lane r of vector l is lane l of row r.
#[inline]
#[target_feature(enable = "avx2")]
fn transposed(rows: [__m256i; 8]) -> [__m256i; 8] {
    // Four rows: the lower 128 bits have four lanes of column c, the upper ones of column 4 + c.
    let mut quads = [[rows[0]; 4]; 2];
    for quad in 0..2 {
        let [a, b, c, d] = [rows[4 * quad], rows[4 * quad + 1], rows[4 * quad + 2], rows[4 * quad + 3]];
        let (ab_low, ab_high) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
        let (cd_low, cd_high) = (_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
        quads[quad] = [
            _mm256_unpacklo_epi64(ab_low, cd_low),
            _mm256_unpackhi_epi64(ab_low, cd_low),
            _mm256_unpacklo_epi64(ab_high, cd_high),
            _mm256_unpackhi_epi64(ab_high, cd_high),
        ];
    }
    let mut columns = rows;
    for column in 0..4 {
        columns[column] = _mm256_permute2x128_si256::<0x20>(quads[0][column], quads[1][column]);
        columns[column + 4] = _mm256_permute2x128_si256::<0x31>(quads[0][column], quads[1][column]);
    }
    columns
}
