//! What the kernels for one vector of activations share: rows are taken [`ROWS`] at a time, by all threads.

use super::super::aligned::Aligned;
use super::super::kernels::ROWS_PER_PASS;
use super::super::matrix::PackedMatrix;
use super::super::{rows_per_task, tasks};
use super::digits::LANES;
use super::scales::{scale_rows, Scaling};
use std::arch::x86_64::*;

/// Rows that are multiplied together: they share the loads of the activations.
pub(super) const ROWS: usize = 4;

/// A packed row, and what [`scale_rows`] makes of its scales and biases.
#[derive(Clone, Copy)]
pub(super) struct Row<'a> {
    pub(super) words: &'a [u32],
    /// Sixteen numbers, of which the sum is meant.
    pub(super) biases: &'a [f32],
    pub(super) scales: &'a [f32],
}

/// The products of all rows, of which `dot` multiplies [`ROWS`] at a time; where rows of a pass run out, the last one is
/// multiplied again.
///
/// # Safety
/// The features of [`scale_rows`] are there.
pub(super) unsafe fn products(
    matrix: &PackedMatrix,
    scaling: &Scaling,
    dot: impl Fn([Row<'_>; ROWS]) -> [f32; ROWS] + Send + Sync,
) -> Vec<f32> {
    let rows_of_task = rows_per_task(matrix, 1);
    let mut products = vec![0f32; matrix.rows];
    tasks::for_each(products.chunks_mut(rows_of_task), |task, products| {
        let mut scaled = Aligned::<f32>::new(ROWS_PER_PASS * scaling.stride);
        for (pass, products) in products.chunks_mut(ROWS_PER_PASS).enumerate() {
            let first_row = task * rows_of_task + pass * ROWS_PER_PASS;
            let scaled = &mut scaled[..products.len() * scaling.stride];
            // SAFETY: the caller's promise.
            unsafe { scale_rows(matrix, first_row, scaling, scaled) };
            let last = products.len().saturating_sub(1);
            for (part, products) in products.chunks_mut(ROWS).enumerate() {
                let sums = dot(std::array::from_fn(|row| {
                    let row = (ROWS * part + row).min(last);
                    let (biases, scales) = scaled[row * scaling.stride..][..scaling.stride].split_at(LANES);
                    Row { words: matrix.row_words(first_row + row), biases, scales }
                }));
                products.iter_mut().zip(sums).for_each(|(product, sum)| *product = sum);
            }
        }
    });
    products
}

/// The sum of the lanes of each vector.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub(super) fn sums_of_lanes([a, b, c, d]: [__m512; ROWS]) -> [f32; ROWS] {
    // Lanes of pairs of vectors change places, so that an addition serves both.
    let pairs = |a, b| _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    let (ab, cd) = (_mm512_castps_pd(pairs(a, b)), _mm512_castps_pd(pairs(c, d)));
    let (low, high) = (_mm512_unpacklo_pd(ab, cd), _mm512_unpackhi_pd(ab, cd));
    let all = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    let half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps::<1>(all));
    let quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps::<1>(half));
    let mut sums = [0.; ROWS];
    // SAFETY: four numbers.
    unsafe { _mm_storeu_ps(sums.as_mut_ptr(), quarter) };
    sums
}

/// Asks for as many bytes as the `len` at `at`, which belong to a row of `row_bytes` bytes, in the same place of the row
/// that takes its turn next: soon enough for memory, and not so soon that they leave the first-level cache again unless
/// rows are long.
#[inline(always)]
pub(super) fn prefetch(at: *const u8, len: usize, row_bytes: usize) {
    let next = at.wrapping_add(ROWS * row_bytes);
    for line in (0..len).step_by(64) {
        // SAFETY: any address may be asked for.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(line).cast()) };
    }
}

/// `len` bytes (at most 64) from byte `start` of a block on, of which `rest` are left of the row; zeros
/// behind them.
///
/// # Safety
/// The row has `rest` bytes from the block's first on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn load(block: *const u8, start: usize, len: usize, rest: usize) -> __m512i {
    let present = len.min(rest.saturating_sub(start));
    debug_assert!(len <= 64);
    // SAFETY: `present` bytes are read, which lie in the row.
    unsafe {
        match present {
            0 => _mm512_setzero_si512(),
            // What blocks of 80 and of 96 bytes have behind the first load.
            16 => _mm512_zextsi128_si512(_mm_loadu_si128(block.add(start).cast())),
            32 => _mm512_zextsi256_si512(_mm256_loadu_si256(block.add(start).cast())),
            64 => _mm512_loadu_si512(block.add(start).cast()),
            _ => _mm512_maskz_loadu_epi8(u64::MAX >> (64 - present), block.add(start).cast()),
        }
    }
}
