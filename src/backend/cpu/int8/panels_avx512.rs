//! Panels and tiles of x, with AVX-512.

#![allow(clippy::needless_range_loop)] // Loops of constant length over arrays that have to stay in registers.

use super::super::group_params::{GroupParams, ROWS_PER_PASS};
use super::super::isa::avx512::Avx512Vnni;
use super::super::matrix::PackedMatrix;
use super::super::row_gemv::scales::{with_stored, Stored, WithStored};
use super::super::row_gemv::{load, LANES};
use super::codes::IntegerCodes;
use super::gemm::{Chunk, Sums};
use super::magnitudes::Magnitudes;
use super::outliers::Outlier;
use super::panel_columns::Columns;
use super::tables::{with_codes, AFFINE};
use super::units::unit_of_limbs;
use super::unpack::unpack;
use super::weight_panels::{rows_of_panel, transposed_packed, Panel, PanelParams, Panels, DEPTH};
use super::x_tiles::{Layout, Tile, COLUMNS, LARGEST_GROUP};
use crate::format::{Scale, ZeroPoint};
use std::arch::x86_64::*;
use std::ops::Range;

/// A group in digits: `[digit, highest first]`, bytes in the order of panels.
type Bytes = [[u8; LARGEST_GROUP]; 3];

impl Panels for Avx512Vnni {
    fn magnitudes(self) -> impl Magnitudes {
        self.avx512
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,gfni,f16c")]
    unsafe fn load(
        params: &mut PanelParams,
        matrix: &PackedMatrix,
        codes: &IntegerCodes,
        (first_row, rows): (usize, usize),
        of_rows: &mut GroupParams,
    ) {
        // Bytes by themselves, which few formats have, are not read sixteen at a time.
        if matches!(matrix.format.scale(), Scale::E8m0 | Scale::E4m3) {
            of_rows.load(matrix, first_row, rows);
            for first in (0..params.scales.len()).step_by(LANES) {
                let mut values = [[_mm512_setzero_ps(); 16]; 2];
                for row in 0..ROWS_PER_PASS {
                    let (scales, biases) = of_rows.row(row);
                    for (values, of_row) in values.iter_mut().zip([scales, biases]) {
                        let sixteen = of_row.get(first..).and_then(|values| values.first_chunk::<LANES>());
                        if let Some(sixteen) = sixteen {
                            // SAFETY: a chunk has the sixteen numbers of a vector.
                            values[row] = unsafe { _mm512_loadu_ps(sixteen.as_ptr()) };
                        }
                    }
                }
                let [scales, biases] = values;
                put_groups(params, codes, first, scales, biases);
            }
            return;
        }
        let mut units = std::mem::take(&mut params.units);
        let what = Transpose { matrix, codes, rows, params };
        with_stored(matrix, (first_row, rows), &mut units, what);
        params.units = units;
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx2,fma,gfni,f16c")]
    unsafe fn unpack(
        (of, layout): (&IntegerCodes, Layout),
        matrix: &PackedMatrix,
        rows: (usize, usize),
        first: usize,
        panel: &mut Panel,
    ) {
        // SAFETY: the caller vouches for the rows; codes have the width that their kind says.
        unsafe {
            with_codes!(of.kind, unpack_rows(matrix, rows, first, panel));
        }
        if layout != Layout::Words {
            let center = _mm512_set1_epi8(of.center as i8);
            for codes in panel {
                // SAFETY: the array has the bytes of a vector.
                unsafe {
                    let unsigned = _mm512_loadu_si512(codes.as_ptr().cast());
                    _mm512_storeu_si512(codes.as_mut_ptr().cast(), _mm512_sub_epi8(unsigned, center));
                }
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    unsafe fn add_outliers(
        columns: Columns,
        chunk: Chunk,
        outliers: (&[Outlier], Range<usize>),
        sums: &mut Sums,
    ) {
        columns.add_outliers(chunk, outliers, sums);
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma")]
    unsafe fn fill<const DIGITS: usize>(
        tile: &mut Tile,
        (group, row): (usize, usize),
        x: &[f32],
        center: i32,
        (order, layout): (&[u8; 64], Layout),
    ) {
        let mut bytes: Bytes = [[0; LARGEST_GROUP]; 3];
        let mut largest = _mm512_setzero_ps();
        let mut sum = _mm512_setzero_ps();
        for x in x.chunks_exact(16) {
            // SAFETY: a chunk has the sixteen numbers of a vector.
            let x = unsafe { _mm512_loadu_ps(x.as_ptr()) };
            largest = _mm512_max_ps(largest, _mm512_abs_ps(x));
            sum = _mm512_add_ps(sum, x);
        }
        let unit = unit_of_limbs(_mm512_reduce_max_ps(largest), DIGITS);
        let inverse = _mm512_set1_ps(1. / unit);
        let mut totals = [_mm512_setzero_si512(); DIGITS];
        for (index, x) in x.chunks_exact(16).enumerate() {
            // SAFETY: a chunk has the sixteen numbers of a vector.
            let x = _mm512_mul_ps(unsafe { _mm512_loadu_ps(x.as_ptr()) }, inverse);
            let mut rest = _mm512_cvtps_epi32(x);
            for digit in (0..DIGITS).rev() {
                // The lowest byte, signed, is subtracted, and the rest shifted.
                let value = _mm512_srai_epi32::<24>(_mm512_slli_epi32::<24>(rest));
                totals[digit] = _mm512_add_epi32(totals[digit], value);
                if let Some(to) = bytes[digit].chunks_exact_mut(16).nth(index) {
                    // SAFETY: a chunk has the sixteen bytes that are written.
                    unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(value)) };
                }
                rest = _mm512_srai_epi32::<8>(_mm512_sub_epi32(rest, value));
            }
        }
        // SAFETY: the table has the bytes of a vector.
        let order = unsafe { _mm512_loadu_si512(order.as_ptr().cast()) };
        let first_word = group * x.len() / 4;
        for digit in 0..DIGITS {
            for (half, bytes) in bytes[digit].chunks_exact_mut(64).enumerate().take(x.len().div_ceil(64)) {
                // SAFETY: a chunk has the bytes of a vector, and so has the array.
                let words: [i32; 16] = unsafe {
                    let natural = _mm512_loadu_si512(bytes.as_ptr().cast());
                    std::mem::transmute::<__m512i, [i32; 16]>(_mm512_permutexvar_epi8(order, natural))
                };
                let words = &words[..(x.len() / 4 - 16 * half).min(16)];
                let first = first_word + 16 * half;
                let at = layout.place(first, (row, tile.size), (digit, DIGITS));
                let apart = match layout {
                    Layout::Words => tile.size * DIGITS,
                    Layout::Rows(_) => 1,
                    Layout::Columns => COLUMNS,
                };
                for index in 0..words.len() {
                    if let Some(to) = tile.words.get_mut(at + index * apart) {
                        *to = words[index];
                    }
                }
            }
            if let Some(offset) = tile.offsets.get_mut((group * tile.size + row) * DIGITS + digit) {
                *offset = -center * _mm512_reduce_add_epi32(totals[digit]);
            }
        }
        if let Some(to) = tile.units.get_mut(group * tile.size + row) {
            *to = unit;
        }
        if let Some(to) = tile.sums.get_mut(group * tile.size + row) {
            *to = _mm512_reduce_add_ps(sum);
        }
    }
}

/// Scales and biases of up to sixteen rows, as they are stored, become those of a panel.
struct Transpose<'a> {
    matrix: &'a PackedMatrix<'a>,
    codes: &'a IntegerCodes,
    rows: usize,
    params: &'a mut PanelParams,
}

impl WithStored for Transpose<'_> {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn call<S: Stored, B: Stored>(self, scales: S, biases: B) {
        let Self { matrix, codes, rows, params } = self;
        let groups = matrix.groups_per_row();
        assert!(scales.count() == rows * groups && (!B::ANY || biases.count() == rows * groups));
        let midpoint = match matrix.format.zero_point() {
            ZeroPoint::Midpoint => _mm512_set1_ps(-matrix.format.midpoint()),
            ZeroPoint::Bias | ZeroPoint::None => _mm512_setzero_ps(),
        };
        for first in (0..groups).step_by(LANES) {
            let mask = u16::MAX >> (LANES - (groups - first).min(LANES));
            let (mut of_scales, mut of_biases) = ([_mm512_setzero_ps(); 16], [_mm512_setzero_ps(); 16]);
            for row in 0..rows.min(LANES) {
                // SAFETY: the assertion: each row has the groups in the mask.
                unsafe {
                    of_scales[row] = scales.load(mask, row * groups + first);
                    of_biases[row] = match B::ANY {
                        true => biases.load(mask, row * groups + first),
                        false => _mm512_mul_ps(midpoint, of_scales[row]),
                    };
                }
            }
            put_groups(params, codes, first, of_scales, of_biases);
        }
    }
}

/// Scales and biases of sixteen groups from `first` on, of sixteen rows.
#[inline]
#[target_feature(enable = "avx512f")]
fn put_groups(
    params: &mut PanelParams,
    codes: &IntegerCodes,
    first: usize,
    scales: [__m512; 16],
    biases: [__m512; 16],
) {
    let unit = _mm512_set1_ps(codes.unit);
    let center = _mm512_set1_ps(codes.center as f32);
    let mut of_rows = [[_mm512_setzero_si512(); 16]; 2];
    for row in 0..16 {
        of_rows[0][row] = _mm512_castps_si512(scales[row]);
        of_rows[1][row] = _mm512_castps_si512(biases[row]);
    }
    let [scales, biases] = [transposed(of_rows[0]), transposed(of_rows[1])];
    for index in 0..16 {
        let scales = _mm512_mul_ps(_mm512_castsi512_ps(scales[index]), unit);
        let biases = _mm512_castsi512_ps(biases[index]);
        // SAFETY: an array has the sixteen numbers of a vector.
        unsafe {
            if let Some(to) = params.scales.get_mut(first + index) {
                _mm512_storeu_ps(to.as_mut_ptr(), scales);
            }
            if let Some(to) = params.stored_biases.get_mut(first + index) {
                _mm512_storeu_ps(to.as_mut_ptr(), biases);
            }
            if let Some(to) = params.biases.get_mut(first + index) {
                _mm512_storeu_ps(to.as_mut_ptr(), _mm512_fmadd_ps(scales, center, biases));
            }
        }
    }
}

/// Bytes of a row that are unpacked at a time, for [`DEPTH`] elements or a part of them.
const fn step_bytes(bits: usize) -> usize {
    if transposed_packed(bits) {
        64
    } else {
        16 * bits
    }
}

/// See [`Panels::unpack`](super::weight_panels::Panels::unpack).
///
/// # Safety
/// The caller enables the features, and vouches for what that asks for; codes have `BITS` bits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,gfni,f16c")]
unsafe fn unpack_rows<const BITS: usize, const KIND: u8>(
    matrix: &PackedMatrix,
    rows: (usize, usize),
    first: usize,
    panel: &mut Panel,
) {
    let step = const { step_bytes(BITS) };
    let vectors = const { step_bytes(BITS) * 8 / BITS / 4 };
    let row_bytes = matrix.k * BITS / 8;
    let (mut from, present) = rows_of_panel(matrix, rows, first, BITS);
    assert!(panel.len() * 4 >= DEPTH);
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
