//! MXFP8 weights and one vector of activations: what the f32 kernel of `kernels/dot.rs` computes, with fewer
//! instructions.
//!
//! Codes become f32 numbers by moving bits, but for the few that stand for zero, subnormal numbers and NaN: four rows
//! are looked through together for those. Scales multiply the sums of blocks instead of weights, and activations are
//! brought into the order in which bytes are unpacked.

#![allow(clippy::needless_range_loop)] // Loops of constant length over arrays that have to stay in registers.

use super::super::aligned::Aligned;
use super::super::matrix::PackedMatrix;
use super::avx512::{e4m3_any_rare, e4m3_by_bits, e4m3_by_tables, e4m3_numbers, e4m3_rank};
use super::digits::LANES;
use super::rows::{load, prefetch, products, sums_of_lanes, Row, ROWS};
use super::scales::{factor_of_scales, Scaling};
use std::arch::x86_64::*;
use std::ops::RangeInclusive;

/// Elements of a row that are multiplied at a time: two groups.
const BLOCK: usize = 64;

/// The largest activations for which sums of products are numbers before they are scaled, and keep what they have.
const RANGE: RangeInclusive<f32> = 1e-18..=1e18;

/// The product of an MXFP8 matrix and a vector `x` of K numbers; `None` if they are not of an ordinary size.
pub(super) fn product(matrix: &PackedMatrix, x: &[f32]) -> Option<Vec<f32>> {
    let largest = x.iter().fold(0u32, |largest, x| largest.max(x.abs().to_bits()));
    if !RANGE.contains(&f32::from_bits(largest)) {
        return None;
    }
    let x = unpacking_order(x);
    let scaling = Scaling::none(matrix.groups_per_row());
    let factor = factor_of_scales(matrix);
    // SAFETY (both calls): this instruction set is in use only where its features were detected.
    Some(unsafe { products(matrix, &scaling, |rows| dot_rows(rows, &x).map(|sum| sum * factor)) })
}

/// Blocks of activations as [`e4m3_numbers`] orders weights; zeros behind the last.
fn unpacking_order(x: &[f32]) -> Aligned<f32> {
    let mut ordered = Aligned::new(x.len().next_multiple_of(BLOCK));
    for (places, x) in ordered.chunks_exact_mut(BLOCK).zip(x.chunks(BLOCK)) {
        for (element, x) in x.iter().enumerate() {
            let (quarter, within) = (element / 16, element % 16);
            let (vector, lane) = (within / 8 * 2 + within % 2, 4 * quarter + within % 8 / 2);
            places[vector * LANES + lane] = *x;
        }
    }
    ordered
}

/// The products of rows and the activations.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma")]
unsafe fn dot_rows(rows: [Row<'_>; ROWS], x: &[f32]) -> [f32; ROWS] {
    let row_bytes = rows[0].words.len() * 4;
    let blocks = row_bytes.div_ceil(BLOCK);
    assert!(x.len() >= blocks * BLOCK);
    for row in &rows {
        assert!(row.words.len() * 4 == row_bytes && row.scales.len() >= (2 * blocks).next_multiple_of(LANES));
    }
    let mut totals = [_mm512_setzero_ps(); ROWS];
    // SAFETY: the assertions cover every block; whole blocks lie in the rows, the last one is masked.
    unsafe {
        let whole = row_bytes / BLOCK;
        for block in 0..whole {
            add_block::<true>(&rows, x.as_ptr(), block, &mut totals);
        }
        if whole < blocks {
            add_block::<false>(&rows, x.as_ptr(), whole, &mut totals);
        }
    }
    sums_of_lanes(totals)
}

/// Adds the products of a block, which lies in the rows (`WHOLE`) or is their incomplete last one.
///
/// # Safety
/// Activations and scales cover the block.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma")]
unsafe fn add_block<const WHOLE: bool>(
    rows: &[Row<'_>; ROWS],
    x: *const f32,
    block: usize,
    totals: &mut [__m512; ROWS],
) {
    let row_bytes = rows[0].words.len() * 4;
    let rest = if WHOLE { BLOCK } else { row_bytes - block * BLOCK };
    // SAFETY: the caller's promise; what is not in the rows is masked.
    unsafe {
        let mut codes = [_mm512_setzero_si512(); ROWS];
        let mut rank = _mm512_set1_epi8(-1);
        for row in 0..ROWS {
            let at = rows[row].words.as_ptr().cast::<u8>().add(block * BLOCK);
            prefetch(at, BLOCK, row_bytes);
            codes[row] = load(at, 0, BLOCK, rest);
            rank = _mm512_min_epu8(rank, e4m3_rank(codes[row]));
        }
        let x: [__m512; 4] = [
            _mm512_loadu_ps(x.add(block * BLOCK)),
            _mm512_loadu_ps(x.add(block * BLOCK + LANES)),
            _mm512_loadu_ps(x.add(block * BLOCK + 2 * LANES)),
            _mm512_loadu_ps(x.add(block * BLOCK + 3 * LANES)),
        ];
        // Of the block's two groups: the upper lanes are of the second.
        let first = (2 * block % LANES) as i32;
        let group_of_lane = _mm512_mask_set1_epi32(_mm512_set1_epi32(first), 0xFF00, first + 1);
        let any_rare = e4m3_any_rare(rank);
        for row in 0..ROWS {
            let halves = if any_rare { e4m3_by_tables(codes[row]) } else { e4m3_by_bits(codes[row]) };
            let weights = e4m3_numbers(halves);
            let mut sum = _mm512_mul_ps(weights[0], x[0]);
            for vector in 1..4 {
                sum = _mm512_fmadd_ps(weights[vector], x[vector], sum);
            }
            let sixteen = rows[row].scales.as_ptr().add(2 * block / LANES * LANES);
            let scales = _mm512_permutexvar_ps(group_of_lane, _mm512_loadu_ps(sixteen));
            totals[row] = _mm512_fmadd_ps(sum, scales, totals[row]);
        }
    }
}
