//! AVX-512 with VNNI: one vector of activations against integer codes.
//!
//! With one column an f32 kernel is bound by its arithmetic: sixteen products an instruction, plus the
//! decode. `vpdpbusd` multiplies 64 bytes an instruction. So the activations become fixed-point numbers
//! of three signed digits, each digit a byte ([`Digits`]), and the codes are multiplied as the integers
//! that they are: `sum(q * x) = sum(q * d2) * 256^2 + sum(q * d1) * 256 + sum(q * d0)`, exactly. Nothing is
//! lost but what the fixed point cuts off: the activations that meet a group of weights have a power of two of
//! their own, and keep 23 bits below it, which is about what f32 keeps.
//!
//! Codes are centred, `q * s + b = (2 * q - c) * (s / 2) + (b + c * s / 2)`, so that sums stay small even
//! where all activations have one sign: `c * sum(x)` is subtracted in integers, and the second term is a
//! short product over the groups of a row. E2M1 elements, doubled, are integers too. E4M3 elements are
//! not: MXFP8 has a kernel of its own (`mxfp8.rs`).

#![allow(clippy::needless_range_loop)] // Loops of constant length over arrays that have to stay in registers.

use super::super::kernels::{DecodeRows, DotRows, Parameters};
use super::super::matrix::PackedMatrix;
use super::digits::{doubled, splits_sum, Codes, Digits, DIGITS, DIGIT_BITS, LANES};
use super::rows::{load, prefetch, products, sums_of_lanes, Row, ROWS};
use super::scales::{factor_of_scales, Scaling};
use super::{avx512, mxfp8, InstructionSet};
use std::arch::x86_64::*;

/// Whether the CPU has what the functions below enable.
pub(in crate::backend::cpu) fn detected() -> bool {
    avx512::detected() && is_x86_feature_detected!("avx512vnni")
}

/// The kernels of `avx512.rs`, and for single columns the one of this file and that of [`mxfp8`].
pub(in crate::backend::cpu) struct Kernels;

impl InstructionSet for Kernels {
    fn name(&self) -> &'static str {
        "avx512vnni"
    }
    fn block(&self) -> usize {
        avx512::Kernels.block()
    }
    fn lanes(&self) -> usize {
        avx512::Kernels.lanes()
    }
    fn slab_widths(&self) -> &'static [usize] {
        avx512::Kernels.slab_widths()
    }
    fn load_parameters(&self, to: &mut Parameters, matrix: &PackedMatrix, first_row: usize, rows: usize) {
        avx512::Kernels.load_parameters(to, matrix, first_row, rows);
    }
    fn dot_rows(&self, task: DotRows<'_>) {
        avx512::Kernels.dot_rows(task);
    }
    fn decode_rows(&self, task: DecodeRows<'_>) {
        avx512::Kernels.decode_rows(task);
    }

    fn has_product(&self, m: usize) -> bool {
        m == 1
    }
    fn product(&self, matrix: &PackedMatrix, x: &[f32]) -> Option<Vec<f32>> {
        let Some(codes) = Codes::of(matrix.format) else { return mxfp8::product(matrix, x) };
        let digits = Digits::new(&codes, matrix.format.group_size(), x)?;
        let scaling = Scaling::new(&codes, &digits);
        let unit = digits.unit * factor_of_scales(matrix);
        // SAFETY (both calls): `Kernels` is handed out only after its features were detected.
        Some(unsafe { products(matrix, &scaling, |rows| dot_rows(&codes, &digits, rows, unit)) })
    }
}

/// What codes and scales are.
const AFFINE: u8 = 0;
const NVFP4: u8 = 1;
const MXFP4: u8 = 2;

/// The products of rows and the activations; `unit` is that of products of scaled integers.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx2,fma,gfni")]
unsafe fn dot_rows(codes: &Codes, digits: &Digits, rows: [Row<'_>; ROWS], unit: f32) -> [f32; ROWS] {
    // SAFETY: the features are those of this function.
    unsafe {
        match (codes.bits, codes.e2m1) {
            (1, _) => dot_blocks::<1, 8, AFFINE>(digits, rows, unit),
            (2, _) => dot_blocks::<2, 4, AFFINE>(digits, rows, unit),
            (3, _) => dot_blocks::<3, 2, AFFINE>(digits, rows, unit),
            (4, false) => dot_blocks::<4, 2, AFFINE>(digits, rows, unit),
            (4, true) if codes.any_scale => dot_blocks::<4, 2, MXFP4>(digits, rows, unit),
            (4, true) => dot_blocks::<4, 2, NVFP4>(digits, rows, unit),
            (5, _) => dot_blocks::<5, 2, AFFINE>(digits, rows, unit),
            (6, _) => dot_blocks::<6, 2, AFFINE>(digits, rows, unit),
            _ => dot_blocks::<8, 2, AFFINE>(digits, rows, unit),
        }
    }
}

/// See [`dot_rows`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx2,fma,gfni")]
unsafe fn dot_blocks<const BITS: usize, const VECTORS: usize, const KIND: u8>(
    digits: &Digits,
    rows: [Row<'_>; ROWS],
    unit: f32,
) -> [f32; ROWS] {
    let block_bytes = const { 8 * VECTORS * BITS };
    let row_bytes = rows[0].words.len() * 4;
    let blocks = row_bytes.div_ceil(block_bytes);
    assert!(digits.digits.len() >= blocks * DIGITS * 64 * VECTORS);
    assert!(digits.centred.len() >= blocks * 2 * LANES);
    assert!(KIND != MXFP4 || digits.lane_units.len() >= blocks * LANES);
    let last_group = (blocks.saturating_sub(1) * 64 * VECTORS) >> digits.group_shift;
    for row in &rows {
        assert!(row.words.len() * 4 == row_bytes && row.scales.len() >= last_group + LANES);
        assert!(row.biases.len() >= LANES);
    }
    // SAFETY: the assertions cover every block; full blocks lie in the row, the last one is masked.
    unsafe {
        let mut totals = [_mm512_setzero_ps(); ROWS];
        let full = row_bytes / block_bytes;
        for block in 0..full {
            add_block::<BITS, VECTORS, KIND, true>(digits, &rows, block, &mut totals);
        }
        if full < blocks {
            add_block::<BITS, VECTORS, KIND, false>(digits, &rows, full, &mut totals);
        }
        for row in 0..ROWS {
            totals[row] = _mm512_add_ps(totals[row], _mm512_loadu_ps(rows[row].biases.as_ptr()));
        }
        sums_of_lanes(totals).map(|sum| sum * unit)
    }
}

/// Adds the products of a block, which lies in the rows (`WHOLE`) or is their incomplete last one.
///
/// # Safety
/// Digits and scales cover the block; the rows are equally long, and have it, or a part of it.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx2,fma,gfni")]
unsafe fn add_block<const BITS: usize, const VECTORS: usize, const KIND: u8, const WHOLE: bool>(
    digits: &Digits,
    rows: &[Row<'_>; ROWS],
    block: usize,
    totals: &mut [__m512; ROWS],
) {
    let block_bytes = const { 8 * VECTORS * BITS };
    let row_bytes = rows[0].words.len() * 4;
    let rest = if WHOLE { block_bytes } else { row_bytes - block * block_bytes };
    // SAFETY: the caller's promise; of codes that are not in the row none is loaded.
    unsafe {
        let mut integers = [[_mm512_setzero_si512(); VECTORS]; ROWS];
        for row in 0..ROWS {
            let at = rows[row].words.as_ptr().cast::<u8>().add(block * block_bytes);
            prefetch(at, block_bytes, row_bytes);
            let first = load(at, 0, block_bytes.min(64), rest);
            let second = load(at, 64, block_bytes.saturating_sub(64), rest);
            integers[row] = unpack::<BITS, VECTORS, KIND>(first, second);
        }
        let place = digits.digits.as_ptr().add(block * DIGITS * 64 * VECTORS);
        let centred = digits.centred.as_ptr().add(block * 2 * LANES);
        let (highest, lowest) =
            (_mm512_loadu_si512(centred.cast()), _mm512_loadu_si512(centred.add(LANES).cast()));
        // A sum for each digit: instructions of one for all would wait for one another.
        let mut sums = [[highest, _mm512_setzero_si512(), lowest]; ROWS];
        for digit in 0..DIGITS {
            for vector in 0..VECTORS {
                let digits = _mm512_loadu_si512(place.add((digit * VECTORS + vector) * 64).cast());
                for row in 0..ROWS {
                    sums[row][digit] = _mm512_dpbusd_epi32(sums[row][digit], integers[row][vector], digits);
                }
            }
        }
        let group_of_lane = _mm512_loadu_si512(digits.group_of_lane.as_ptr().cast());
        let first_group = (block * 64 * VECTORS) >> digits.group_shift;
        for row in 0..ROWS {
            let [high, middle, low] = sums[row];
            let high = _mm512_add_epi32(_mm512_slli_epi32::<DIGIT_BITS>(high), middle);
            let mut sum = if splits_sum(BITS) {
                let digit = _mm512_set1_ps((1 << DIGIT_BITS) as f32);
                _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), digit, _mm512_cvtepi32_ps(low))
            } else {
                _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<DIGIT_BITS>(high), low))
            };
            if KIND == MXFP4 {
                sum = _mm512_mul_ps(sum, _mm512_loadu_ps(digits.lane_units.as_ptr().add(block * LANES)));
            }
            let scales = rows[row].scales.as_ptr().add(first_group);
            // Blocks of 128 have at most eight groups; shorter loads are less often two cache lines.
            let scales = match VECTORS {
                2 => _mm512_broadcast_f32x8(_mm256_loadu_ps(scales)),
                _ => _mm512_loadu_ps(scales),
            };
            let scales = _mm512_permutexvar_ps(group_of_lane, scales);
            totals[row] = _mm512_fmadd_ps(sum, scales, totals[row]);
        }
    }
}

/// Byte indices, from 64 on into the second load, that put together, in each lane, the bytes with the first (`vector` 0)
/// or the last four of its eight codes of 3, 5 or 6 bits. No code has bits in the fourth byte of a lane, which may be one
/// behind the block.
const fn gather_bytes(bits: usize, vector: usize) -> [u8; 64] {
    let mut index = [0; 64];
    let mut byte = 0;
    while byte < 64 {
        index[byte] = (byte / 4 * bits + vector * 4 * bits / 8 + byte % 4) as u8;
        byte += 1;
    }
    index
}

/// Bit offsets of these codes in a quadword of two lanes; one less, modulo 64, for doubled ones.
const fn code_offsets(bits: usize, vector: usize) -> [u8; 64] {
    let mut offsets = [0; 64];
    let mut byte = 0;
    while byte < 64 {
        let first = byte % 8 / 4 * 32 + vector * 4 * bits % 8;
        offsets[byte] = ((first + byte % 4 * bits + 64 - doubled(bits) as usize) % 64) as u8;
        byte += 1;
    }
    offsets
}

/// For each code of a byte, the bit matrix (as GF2P8AFFINEQB wants it: byte `7 - i` for bit `i`) that
/// selects it, doubled where [`doubled`], as it is for E2M1.
const fn select_code(bits: usize, e2m1: bool) -> [i64; 8] {
    let mut matrices = [0; 8];
    let first = if e2m1 { 0 } else { doubled(bits) as usize };
    let mut code = 0;
    while code < 8 / bits {
        let mut rows = [0; 8];
        let mut bit = 0;
        while bit < bits && first + bit < 8 {
            rows[7 - first - bit] = 1 << (code * bits + bit);
            bit += 1;
        }
        matrices[code] = i64::from_le_bytes(rows);
        code += 1;
    }
    matrices
}

/// `2 * e2m1 + 12` of every code.
const DOUBLED_E2M1: [i8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

/// The integers of a block's codes as bytes; `first` has up to 64 bytes of the block, `second` those behind them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
unsafe fn unpack<const BITS: usize, const VECTORS: usize, const KIND: u8>(
    first: __m512i,
    second: __m512i,
) -> [__m512i; VECTORS] {
    let double = doubled(BITS) && KIND == AFFINE;
    let mask = _mm512_set1_epi8((((1u32 << BITS) - 1) << u32::from(double)) as u8 as i8);
    let mut codes = [first; VECTORS];
    // SAFETY: the tables have 64 (16) bytes.
    unsafe {
        if matches!(BITS, 3 | 5 | 6) {
            for vector in 0..VECTORS {
                let index = &const { [gather_bytes(BITS, 0), gather_bytes(BITS, 1)] }[vector];
                let offsets = &const { [code_offsets(BITS, 0), code_offsets(BITS, 1)] }[vector];
                let index = _mm512_loadu_si512(index.as_ptr().cast());
                let offsets = _mm512_loadu_si512(offsets.as_ptr().cast());
                let together = match BITS {
                    3 => _mm512_permutexvar_epi8(index, first),
                    _ => _mm512_permutex2var_epi8(first, index, second),
                };
                codes[vector] = _mm512_and_si512(_mm512_multishift_epi64_epi8(offsets, together), mask);
            }
            return codes;
        }
        if BITS == 8 {
            // The lower four codes of every quadword, and the upper four.
            let [first, second] = [_mm512_castsi512_ps(first), _mm512_castsi512_ps(second)];
            codes[0] = _mm512_castps_si512(_mm512_shuffle_ps::<0x88>(first, second));
            codes[1] = _mm512_castps_si512(_mm512_shuffle_ps::<0xDD>(first, second));
            return codes;
        }
        for vector in 0..VECTORS {
            let matrix = _mm512_set1_epi64(const { select_code(BITS, KIND != AFFINE) }[vector]);
            codes[vector] = _mm512_gf2p8affine_epi64_epi8::<0>(first, matrix);
        }
        if KIND != AFFINE {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(DOUBLED_E2M1.as_ptr().cast()));
            for vector in 0..VECTORS {
                codes[vector] = _mm512_shuffle_epi8(table, codes[vector]);
            }
        }
    }
    codes
}
