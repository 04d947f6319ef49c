//! One row of x times weights of E4M3 elements, with AVX-512: what the f32 kernel of `dot.rs` computes, in fewer instructions.
//!
//! Codes become f32 numbers by moving bits, but for the few that stand for zero, subnormal numbers and NaN: one test
//! finds them in four rows together. Scales multiply the sums of blocks instead of weights, and x is brought into the
//! order in which bytes are unpacked.

#![allow(clippy::needless_range_loop)] // Loops of constant length over arrays that have to stay in registers.

use super::super::aligned::Aligned;
use super::super::fast_kernel::{each_row_of_x, Digits, NotRepresentable, PreparedX, RowKernel};
use super::super::group_params::ROWS_PER_PASS;
use super::super::isa::avx512::Avx512;
use super::super::isa::avx512_e4m3::{any_rare, by_bits, by_tables, numbers, rank};
use super::super::matrix::PackedMatrix;
use super::super::row_gemv::scales::{output_multiplier, Scaling};
use super::super::row_gemv::{self, load, sums_of_lanes, Pass, Room, Row, LANES, ROWS};
use crate::format::{Element, Scale, ZeroPoint};
use crate::QuantFormat;
use std::arch::x86_64::*;
use std::ops::RangeInclusive;

/// Elements of a row that are multiplied at a time: up to two groups.
const BLOCK: usize = 64;

/// The range of the largest activation in which sums of products, before they are scaled, neither overflow nor lose bits
/// as subnormal numbers.
const RANGE: RangeInclusive<f32> = 1e-18..=1e18;

/// The kernel, and the proof that the CPU has its instructions.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Fp8Gemv {
    isa: Avx512,
}

impl Fp8Gemv {
    pub(in super::super) fn new(isa: Avx512) -> Self {
        Self { isa }
    }
}

impl RowKernel for Fp8Gemv {
    fn supports(&self, format: QuantFormat) -> bool {
        let scales = match format.scale() {
            Scale::Float => QuantFormat::AFFINE_GROUP_SIZES.contains(&format.group_size()),
            Scale::E8m0 => format.group_size() == 32,
            Scale::E4m3 | Scale::SuperBlock => false,
        };
        format.element() == Element::E4m3 && format.zero_point() == ZeroPoint::None && scales
    }

    fn prepare(
        &self,
        _format: QuantFormat,
        k: usize,
        x: &[f32],
        _digits: Digits,
    ) -> Result<Box<dyn PreparedX>, NotRepresentable> {
        let in_range = |x: &[f32]| {
            let largest = x.iter().fold(0u32, |largest, x| largest.max(x.abs().to_bits()));
            RANGE.contains(&f32::from_bits(largest))
        };
        if !x.chunks_exact(k).all(in_range) {
            return Err(NotRepresentable);
        }
        let rows = x.chunks_exact(k).map(unpacking_order).collect();
        Ok(Box::new(Prepared { isa: self.isa, rows }))
    }
}

/// Rows of x in [`unpacking_order`].
struct Prepared {
    isa: Avx512,
    rows: Vec<Aligned<f32>>,
}

impl PreparedX for Prepared {
    fn m(&self) -> usize {
        self.rows.len()
    }

    fn rows(&self, matrix: &PackedMatrix, first_row: usize, out: &mut [f32]) {
        let scaling = Scaling::none(matrix.groups_per_row());
        let multiplier = output_multiplier(matrix);
        let group_shift = matrix.format.group_size().trailing_zeros();
        let mut room = Room::new(matrix, &scaling, ROWS_PER_PASS);
        room.fetch_first(matrix, first_row, out.len() / self.rows.len().max(1), 1);
        for (pass, out) in out.chunks_mut(ROWS_PER_PASS * self.rows.len().max(1)).enumerate() {
            let first_row = first_row + pass * ROWS_PER_PASS;
            each_row_of_x(self.rows.len(), out, |index, sums| {
                let Some(x) = self.rows.get(index) else { return };
                row_gemv::dot_rows(
                    self.isa,
                    matrix,
                    (&scaling, &mut room),
                    (first_row, sums),
                    |pass, sums| {
                        // SAFETY: `self.isa` proves that the CPU has the features of the function.
                        unsafe { dot_pass(pass, x, group_shift, (multiplier, sums)) }
                    },
                );
            });
        }
    }
}

/// Blocks of x in the order in which [`numbers`] leaves weights; zeros behind the last.
fn unpacking_order(x: &[f32]) -> Aligned<f32> {
    let mut ordered = Aligned::new(x.len().next_multiple_of(BLOCK));
    for (ordered, x) in ordered.chunks_exact_mut(BLOCK).zip(x.chunks(BLOCK)) {
        for (element, x) in x.iter().enumerate() {
            let (quarter, within) = (element / 16, element % 16);
            let (vector, lane) = (within / 8 * 2 + within % 2, 4 * quarter + within % 8 / 2);
            ordered[vector * LANES + lane] = *x;
        }
    }
    ordered
}

/// Dot products of the rows of a pass and `x`, times `multiplier`. A scale serves `2^group_shift` elements, 32 or more.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma")]
fn dot_pass(pass: &Pass<'_>, x: &[f32], group_shift: u32, (multiplier, sums): (f32, &mut [f32])) {
    let row_bytes = pass.row_bytes();
    let (blocks, whole) = (row_bytes.div_ceil(BLOCK), row_bytes / BLOCK);
    let groups = (blocks * BLOCK) >> group_shift;
    assert!(group_shift >= 5 && x.len() >= blocks * BLOCK);
    assert!(pass.scales_per_row() >= groups.max(1).next_multiple_of(LANES));
    for (part, sums) in sums.chunks_mut(ROWS).enumerate() {
        pass.fetch_ahead(part);
        let rows: [Row; ROWS] = std::array::from_fn(|row| pass.row(part * ROWS + row));
        let mut totals = [_mm512_setzero_ps(); ROWS];
        // SAFETY: the assertion covers every block. Whole blocks lie in the rows; what the last one lacks is masked.
        unsafe {
            for block in 0..whole {
                pass.fetch.ahead_of_rows(rows[0].words.as_ptr().cast(), block, ROWS * BLOCK);
                add_block::<true>(&rows, x.as_ptr(), (block, group_shift), &mut totals);
            }
            if whole < blocks {
                add_block::<false>(&rows, x.as_ptr(), (whole, group_shift), &mut totals);
            }
        }
        for (sum, total) in sums.iter_mut().zip(sums_of_lanes(totals)) {
            *sum = total * multiplier;
        }
    }
}

/// Multiplies a block, which lies in the rows (`WHOLE`) or is their incomplete last one, and adds the products.
///
/// # Safety
/// `x` and scales cover the block; the rows are equally long, and have it, or a part of it.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma")]
unsafe fn add_block<const WHOLE: bool>(
    rows: &[Row<'_>; ROWS],
    x: *const f32,
    (block, group_shift): (usize, u32),
    totals: &mut [__m512; ROWS],
) {
    let row_bytes = rows[0].words.len() * 4;
    let rest = if WHOLE { BLOCK } else { row_bytes - block * BLOCK };
    // SAFETY: `x` and scales cover the block, as the caller vouches; `load` reads only codes that lie in the row.
    unsafe {
        let mut codes = [_mm512_setzero_si512(); ROWS];
        let mut least_rank = _mm512_set1_epi8(-1);
        for row in 0..ROWS {
            let at = rows[row].words.as_ptr().cast::<u8>().add(block * BLOCK);
            codes[row] = load(at, 0, BLOCK, rest);
            least_rank = _mm512_min_epu8(least_rank, rank(codes[row]));
        }
        let x: [__m512; 4] = [
            _mm512_loadu_ps(x.add(block * BLOCK)),
            _mm512_loadu_ps(x.add(block * BLOCK + LANES)),
            _mm512_loadu_ps(x.add(block * BLOCK + 2 * LANES)),
            _mm512_loadu_ps(x.add(block * BLOCK + 3 * LANES)),
        ];
        // The upper lanes belong to the second half of the block, which may have a group of its own.
        let group_of = |half: usize| (block * BLOCK + half * BLOCK / 2) >> group_shift;
        let lane = |half| (group_of(half) % LANES) as i32;
        let group_of_lane = _mm512_mask_set1_epi32(_mm512_set1_epi32(lane(0)), 0xFF00, lane(1));
        let any_rare = any_rare(least_rank);
        for row in 0..ROWS {
            let halves = if any_rare { by_tables(codes[row]) } else { by_bits(codes[row]) };
            let weights = numbers(halves);
            let mut sum = _mm512_mul_ps(weights[0], x[0]);
            for vector in 1..4 {
                sum = _mm512_fmadd_ps(weights[vector], x[vector], sum);
            }
            let sixteen = rows[row].scales.as_ptr().add(group_of(0) / LANES * LANES);
            let scales = _mm512_permutexvar_ps(group_of_lane, _mm512_loadu_ps(sixteen));
            totals[row] = _mm512_fmadd_ps(sum, scales, totals[row]);
        }
    }
}
