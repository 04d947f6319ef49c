//! One row of x times integer codes, with AVX-512 VNNI.
//!
//! An f32 kernel is bound by its arithmetic here: sixteen multiply-adds an instruction, plus the dequantization. `vpdpbusd`
//! multiplies 64 bytes an instruction. So x becomes fixed-point numbers of three signed limbs, each a byte
//! ([`FixedPoint`]), and codes are multiplied as the integers that they are:
//! `sum(q * x) = sum(q * x2) * 256^2 + sum(q * x1) * 256 + sum(q * x0)`, exactly. Only the fixed point rounds: the
//! activations that meet a group of weights have a unit of their own, a power of two, and keep 23 bits, about as many as
//! f32 keeps.
//!
//! Codes are taken relative to a zero point z in the middle of their range,
//! `q * s + b = (2 * q - z) * (s / 2) + (b + z * s / 2)`, so that sums stay small even where all activations have one
//! sign: `z * sum(x)` is subtracted in integers, and the second term is a short dot product over the groups of a row.
//! E2M1 elements, doubled, are integers too. E4M3 elements are not: MXFP8 has a kernel in `f32/mxfp8_gemv.rs`.

#![allow(clippy::needless_range_loop)] // Loops of constant length over arrays that have to stay in registers.

use super::super::fast_kernel::{Digits, NotRepresentable, PreparedX, RowKernel};
use super::super::group_params::ROWS_PER_PASS;
use super::super::isa::avx512::Avx512Vnni;
use super::super::matrix::PackedMatrix;
use super::super::row_gemv::scales::{output_multiplier, Scaling};
use super::super::row_gemv::{self, each_row_of_x, load, prefetch, sums_of_lanes, Row, LANES, ROWS};
use super::codes::{IntegerCodes, Kind};
use super::fixed_point::{splits_sum, FixedPoint, LIMB_BITS};
use super::outliers::Outliers;
use super::unpack_vnni::{unpack, AFFINE, MXFP4, NVFP4};
use crate::format::Bits;
use crate::QuantFormat;
use std::arch::x86_64::*;

/// The kernel, and the proof that the CPU has its instructions.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Int8Gemv {
    isa: Avx512Vnni,
}

impl Int8Gemv {
    pub(in super::super) fn new(isa: Avx512Vnni) -> Self {
        Self { isa }
    }
}

impl RowKernel for Int8Gemv {
    fn supports(&self, format: QuantFormat) -> bool {
        IntegerCodes::of(format).is_some()
    }

    fn prepare(
        &self,
        format: QuantFormat,
        k: usize,
        x: &[f32],
        digits: Digits,
    ) -> Result<Box<dyn PreparedX>, NotRepresentable> {
        let codes = IntegerCodes::of(format).ok_or(NotRepresentable)?;
        let (isa, group_size) = (self.isa.avx512, format.group_size());
        let (x, outliers) = Outliers::split(isa, (x, k), group_size, digits)?;
        let fixed = |x| FixedPoint::new(isa, &codes, group_size, x, digits.count);
        let rows = x.chunks_exact(k).map(fixed).collect::<Result<_, _>>()?;
        Ok(Box::new(Prepared { isa: self.isa, codes, rows, outliers }))
    }
}

/// Rows of x as fixed-point numbers for these codes.
struct Prepared {
    isa: Avx512Vnni,
    codes: IntegerCodes,
    rows: Vec<FixedPoint>,
    outliers: Outliers,
}

impl PreparedX for Prepared {
    fn m(&self) -> usize {
        self.rows.len()
    }

    fn rows(&self, matrix: &PackedMatrix, first_row: usize, out: &mut [f32]) {
        let m = self.rows.len().max(1);
        // Every row of x meets a few rows of the weight while these are in a near cache.
        let together = if m == 1 { out.len().max(1) } else { ROWS_PER_PASS * m };
        for (pass, out) in out.chunks_mut(together).enumerate() {
            self.multiply_pass(matrix, first_row + pass * ROWS_PER_PASS, out);
        }
        self.outliers.for_each(|index, k, x| {
            for (row, sums) in out.chunks_exact_mut(m).enumerate() {
                if let Some(sum) = sums.get_mut(index) {
                    *sum = x.mul_add(matrix.weight(first_row + row, k), *sum);
                }
            }
        });
    }
}

impl Prepared {
    /// The products without those of outliers, see [`PreparedX::rows`].
    fn multiply_pass(&self, matrix: &PackedMatrix, first_row: usize, out: &mut [f32]) {
        let codes = &self.codes;
        each_row_of_x(self.rows.len(), out, |index, sums| {
            let Some(x) = self.rows.get(index) else { return };
            let scaling = Scaling::by_groups(&x.groups, codes.center as f32 * codes.unit);
            let unit = x.unit * output_multiplier(matrix);
            row_gemv::dot_rows(self.isa.avx512, matrix, &scaling, (first_row, sums), |rows| {
                // SAFETY: `self.isa` proves that the CPU has the features of the functions.
                unsafe {
                    match x.count {
                        1 => dot_rows::<1>(codes, x, rows, unit),
                        2 => dot_rows::<2>(codes, x, rows, unit),
                        _ => dot_rows::<3>(codes, x, rows, unit),
                    }
                }
            });
        });
    }
}

/// Dot products of rows and `x`; `unit` is that of scaled sums.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx2,fma,gfni")]
fn dot_rows<const LIMBS: usize>(
    codes: &IntegerCodes,
    x: &FixedPoint,
    rows: [Row<'_>; ROWS],
    unit: f32,
) -> [f32; ROWS] {
    match codes.kind {
        Kind::Uint(Bits::One) => dot_blocks::<1, 8, AFFINE, LIMBS>(x, rows, unit),
        Kind::Uint(Bits::Two) => dot_blocks::<2, 4, AFFINE, LIMBS>(x, rows, unit),
        Kind::Uint(Bits::Three) => dot_blocks::<3, 2, AFFINE, LIMBS>(x, rows, unit),
        Kind::Uint(Bits::Four) => dot_blocks::<4, 2, AFFINE, LIMBS>(x, rows, unit),
        Kind::Uint(Bits::Five) => dot_blocks::<5, 2, AFFINE, LIMBS>(x, rows, unit),
        Kind::Uint(Bits::Six) => dot_blocks::<6, 2, AFFINE, LIMBS>(x, rows, unit),
        Kind::Uint(Bits::Eight) => dot_blocks::<8, 2, AFFINE, LIMBS>(x, rows, unit),
        Kind::Mxfp4 => dot_blocks::<4, 2, MXFP4, LIMBS>(x, rows, unit),
        Kind::Nvfp4 => dot_blocks::<4, 2, NVFP4, LIMBS>(x, rows, unit),
    }
}

/// See [`dot_rows`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx2,fma,gfni")]
fn dot_blocks<const BITS: usize, const VECTORS: usize, const KIND: u8, const LIMBS: usize>(
    x: &FixedPoint,
    rows: [Row<'_>; ROWS],
    unit: f32,
) -> [f32; ROWS] {
    let block_bytes = const { 8 * VECTORS * BITS };
    let row_bytes = rows[0].words.len() * 4;
    let blocks = row_bytes.div_ceil(block_bytes);
    assert!(x.count == LIMBS && x.limbs.len() >= blocks * LIMBS * 64 * VECTORS);
    assert!(x.offsets.len() >= blocks * 2 * LANES);
    assert!(KIND != MXFP4 || x.lane_units.len() >= blocks * LANES);
    let last_group = (blocks.saturating_sub(1) * 64 * VECTORS) >> x.group_shift;
    for row in &rows {
        assert!(row.words.len() * 4 == row_bytes && row.scales.len() >= last_group + LANES);
        assert!(row.biases.len() >= LANES);
    }
    // SAFETY: the assertions cover every block. Full blocks lie in the rows; what the last one lacks is masked. The vectors
    // of `biases` have the length that is asserted.
    unsafe {
        let mut totals = [_mm512_setzero_ps(); ROWS];
        let full = row_bytes / block_bytes;
        for block in 0..full {
            add_block::<BITS, VECTORS, KIND, LIMBS, true>(x, &rows, block, &mut totals);
        }
        if full < blocks {
            add_block::<BITS, VECTORS, KIND, LIMBS, false>(x, &rows, full, &mut totals);
        }
        for row in 0..ROWS {
            totals[row] = _mm512_add_ps(totals[row], _mm512_loadu_ps(rows[row].biases.as_ptr()));
        }
        sums_of_lanes(totals).map(|sum| sum * unit)
    }
}

/// Multiplies a block, which lies in the rows (`WHOLE`) or is their incomplete last one, and adds the products.
///
/// # Safety
/// `x` and scales cover the block; the rows are equally long, and have it, or a part of it.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx2,fma,gfni")]
unsafe fn add_block<
    const BITS: usize,
    const VECTORS: usize,
    const KIND: u8,
    const LIMBS: usize,
    const WHOLE: bool,
>(
    x: &FixedPoint,
    rows: &[Row<'_>; ROWS],
    block: usize,
    totals: &mut [__m512; ROWS],
) {
    let block_bytes = const { 8 * VECTORS * BITS };
    let row_bytes = rows[0].words.len() * 4;
    let rest = if WHOLE { block_bytes } else { row_bytes - block * block_bytes };
    // SAFETY: `x` and scales cover the block, as the caller vouches; `load` reads only codes that lie in the row.
    unsafe {
        let mut integers = [[_mm512_setzero_si512(); VECTORS]; ROWS];
        for row in 0..ROWS {
            let at = rows[row].words.as_ptr().cast::<u8>().add(block * block_bytes);
            prefetch(at, block_bytes, row_bytes);
            let first = load(at, 0, block_bytes.min(64), rest);
            let second = load(at, 64, block_bytes.saturating_sub(64), rest);
            integers[row] = unpack::<BITS, VECTORS, KIND>(first, second);
        }
        let limbs = x.limbs.as_ptr().add(block * LIMBS * 64 * VECTORS);
        let offsets = x.offsets.as_ptr().add(block * 2 * LANES);
        let (highest, lowest) =
            (_mm512_loadu_si512(offsets.cast()), _mm512_loadu_si512(offsets.add(LANES).cast()));
        // A sum for each limb: instructions that share one would wait for each other.
        let mut first = [_mm512_setzero_si512(); LIMBS];
        first[0] = highest;
        first[LIMBS - 1] = lowest;
        let mut sums = [first; ROWS];
        for limb in 0..LIMBS {
            for vector in 0..VECTORS {
                let x = _mm512_loadu_si512(limbs.add((limb * VECTORS + vector) * 64).cast());
                for row in 0..ROWS {
                    sums[row][limb] = _mm512_dpbusd_epi32(sums[row][limb], integers[row][vector], x);
                }
            }
        }
        let group_of_lane = _mm512_loadu_si512(x.group_of_lane.as_ptr().cast());
        let first_group = (block * 64 * VECTORS) >> x.group_shift;
        for row in 0..ROWS {
            let low = sums[row][LIMBS - 1];
            let mut sum = if LIMBS == 3 && splits_sum(BITS) {
                let high = _mm512_add_epi32(_mm512_slli_epi32::<LIMB_BITS>(sums[row][0]), sums[row][1]);
                let limb = _mm512_set1_ps((1 << LIMB_BITS) as f32);
                _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), limb, _mm512_cvtepi32_ps(low))
            } else {
                let mut all = sums[row][0];
                for limb in 1..LIMBS {
                    all = _mm512_add_epi32(_mm512_slli_epi32::<LIMB_BITS>(all), sums[row][limb]);
                }
                _mm512_cvtepi32_ps(all)
            };
            if KIND == MXFP4 {
                sum = _mm512_mul_ps(sum, _mm512_loadu_ps(x.lane_units.as_ptr().add(block * LANES)));
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
