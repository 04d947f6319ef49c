//! MXFP4 rows as the signed bytes that tiles multiply.
//!
//! Doubled E2M1 numbers are integers of up to 12, and scales are powers of two: four groups whose scales are at most a
//! factor of eight apart are integers of up to 96 with one scale. Groups that are smaller than that take another *pass*
//! of their own, in which the others are zero. Activations that meet the four groups share a unit, too: they lose three
//! of 23 bits at most, unless both scales and activations of the four are far apart. Then f32 kernels take over.

use super::super::isa::amx_tile::{self, Line, ROWS};
use super::super::matrix::{GroupValues, PackedMatrix};
use super::affine_codes::{nibbles, STEP};
use super::tile_rows::{full_steps, tails, TileRows};
use std::arch::x86_64::*;
use std::ops::Range;

/// Groups that share a scale, and elements of them.
const SHARING: usize = 4;
const SHARED: usize = SHARING * 32;

/// How many times smaller than the largest of those groups, as log2, one may be.
const RANGE: usize = 3;

/// The ratio, as log2, that stands for a group that a pass leaves out.
const NONE: usize = RANGE + 1;

/// What a step's second group counts in the number of a table.
const SECOND: usize = NONE + 1;

/// log2 of the factor that makes integers of the numbers of the largest group.
const LOG_FACTOR: i32 = 1 + RANGE as i32;

/// The integers of all codes, for a step's two groups.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Table([i8; 64]);

/// For every `first + SECOND * second`, where a group is so many times smaller than the largest, or [`NONE`].
static TABLES: [Table; SECOND * SECOND] = tables();

const fn tables() -> [Table; SECOND * SECOND] {
    const DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];
    let mut tables = [Table([0; 64]); SECOND * SECOND];
    let mut index = 0;
    while index < tables.len() {
        let mut byte = 0;
        while byte < 64 {
            let smaller = if byte < 32 { index % SECOND } else { index / SECOND };
            if smaller != NONE {
                tables[index].0[byte] = DOUBLED[byte % 16] << (RANGE - smaller);
            }
            byte += 1;
        }
        index += 1;
    }
    tables
}

/// Up to sixteen rows.
pub(super) struct Mxfp4Rows<'a> {
    matrix: &'a PackedMatrix<'a>,
    words: &'a [u32],
    rows: usize,
    tail: [Line; ROWS],
    passes: Vec<Pass>,
    /// For each shared scale how many passes there are, in any row.
    counts: Vec<u8>,
    /// For each shared scale whether a group is much smaller than the largest, in any row.
    apart: Vec<bool>,
}

/// What a pass multiplies. Rows are padded, since sixteen or more values are computed and written at once.
#[derive(Clone)]
struct Pass {
    /// Of `[row][step]`, the numbers of tables.
    tables: Vec<u8>,
    /// Of `[row][shared group]`.
    scales: Vec<f32>,
}

/// Scales that are compared together, and the shared scales and steps that result.
const BATCH: usize = 64;
const BATCH_SHARED: usize = BATCH / SHARING;
const BATCH_STEPS: usize = BATCH / 2;

impl Mxfp4Rows<'_> {
    fn batches(&self) -> usize {
        self.matrix.groups_per_row().div_ceil(BATCH)
    }

    fn empty_pass(&self) -> Pass {
        const NOTHING: u8 = (NONE + SECOND * NONE) as u8;
        let batches = ROWS * self.batches();
        Pass { tables: vec![NOTHING; batches * BATCH_STEPS], scales: vec![0.; batches * BATCH_SHARED] }
    }

    /// Finds the shared scales of a row, in the first pass and, where they do not suffice, in others.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c")]
    fn share(&mut self, row: usize, scales: &[u8]) {
        let batches = self.batches();
        for (batch, scales) in scales.chunks(BATCH).enumerate() {
            let at = row * batches + batch;
            let present = u64::MAX >> (BATCH - scales.len());
            let first = &mut self.passes[0];
            let tables = &mut first.tables[at * BATCH_STEPS..][..BATCH_STEPS];
            let shared = &mut first.scales[at * BATCH_SHARED..][..BATCH_SHARED];
            // SAFETY: the mask keeps the read inside `scales`; `tables` has the 32 bytes, `shared` the sixteen numbers that are
            // written.
            let smaller = unsafe {
                let bytes = _mm512_maskz_loadu_epi8(present, scales.as_ptr().cast());
                let largest = _mm512_max_epu8(bytes, _mm512_ror_epi32::<8>(bytes));
                let largest = _mm512_max_epu8(largest, _mm512_ror_epi32::<16>(largest));
                let ratio = _mm512_sub_epi8(largest, bytes);
                let ratio = _mm512_min_epu8(ratio, _mm512_set1_epi8(NONE as i8));
                let weights = _mm512_set1_epi16((SECOND << 8 | 1) as i16);
                let numbers = _mm512_cvtepi16_epi8(_mm512_maddubs_epi16(ratio, weights));
                _mm256_storeu_si256(tables.as_mut_ptr().cast(), numbers);
                let largest = _mm512_and_si512(largest, _mm512_set1_epi32(0xFF));
                _mm512_storeu_ps(shared.as_mut_ptr(), powers_of_two(largest));
                _mm512_mask_cmpeq_epi8_mask(present, ratio, _mm512_set1_epi8(NONE as i8))
            };
            if smaller != 0 {
                self.share_rest(row, batch, scales, smaller);
            }
        }
    }

    /// Gives groups that are much smaller than the largest of their four passes of their own.
    #[cold]
    fn share_rest(&mut self, row: usize, batch: usize, scales: &[u8], smaller: u64) {
        let batches = self.batches();
        let row_words = self.matrix.k / 8;
        for (index, scales) in scales.chunks(SHARING).enumerate() {
            let group = |of_four: usize| batch * BATCH + index * SHARING + of_four;
            let is_zero = |of_four: usize| {
                let words = self.words.iter().skip(row * row_words + group(of_four) * 4).take(4);
                words.into_iter().all(|word| word & 0x7777_7777 == 0)
            };
            let mut left: Vec<usize> = (0..scales.len()).collect();
            left.retain(|of_four| smaller >> (index * SHARING + of_four) & 1 == 1);
            self.apart[batch * BATCH_SHARED + index] |= !left.is_empty();
            left.retain(|of_four| !is_zero(*of_four));
            let mut pass = 0;
            while let Some(largest) = left.iter().map(|of_four| scales[*of_four]).max() {
                pass += 1;
                if self.passes.len() == pass {
                    let empty = self.empty_pass();
                    self.passes.push(empty);
                }
                let shared = batch * BATCH_SHARED + index;
                self.counts[shared] = self.counts[shared].max(pass as u8 + 1);
                let Pass { tables, scales: shared_scales } = &mut self.passes[pass];
                shared_scales[row * batches * BATCH_SHARED + shared] = power_of_two(largest);
                left.retain(|of_four| {
                    let ratio = usize::from(largest - scales[*of_four]);
                    if ratio < NONE {
                        let table = &mut tables[row * batches * BATCH_STEPS + group(*of_four) / 2];
                        *table -= ((NONE - ratio) * if of_four % 2 == 0 { 1 } else { SECOND }) as u8;
                    }
                    ratio >= NONE
                });
            }
        }
    }
}

/// The common power-of-two unit of a group's integers, given its largest (non-NaN) E8M0 scale.
fn power_of_two(byte: u8) -> f32 {
    // As f32, powers below 2^-127 would be the inverse of infinity.
    2f64.powi(i32::from(byte) - 127 - LOG_FACTOR) as f32
}

/// [`power_of_two`] of sixteen scales, and NaN.
#[inline]
#[target_feature(enable = "avx512f")]
fn powers_of_two(bytes: __m512i) -> __m512 {
    let exponents = _mm512_cvtepi32_ps(_mm512_sub_epi32(bytes, _mm512_set1_epi32(127 + LOG_FACTOR)));
    let powers = _mm512_scalef_ps(_mm512_set1_ps(1.), exponents);
    let nan = _mm512_cmpeq_epi32_mask(bytes, _mm512_set1_epi32(0xFF));
    _mm512_mask_mov_ps(powers, nan, _mm512_set1_ps(f32::NAN))
}

/// The shared scales of steps.
fn shared_in(steps: &Range<usize>) -> Range<usize> {
    steps.start * STEP / SHARED..(steps.end * STEP).div_ceil(SHARED)
}

/// Whether activations that meet four groups have similar magnitudes in all of them.
fn are_similar(x: &[f32]) -> bool {
    let largest = |x: &[f32]| x.iter().fold(0f32, |largest, x| largest.max(x.abs()));
    let all = largest(x);
    x.chunks(SHARED / SHARING).map(largest).all(|group| group == 0. || all <= group * (1 << RANGE) as f32)
}

impl<'a> TileRows<'a> for Mxfp4Rows<'a> {
    const UNIT: f32 = 1.;
    const BIASES: bool = false;

    fn group_size(_matrix: &PackedMatrix) -> usize {
        SHARED
    }

    fn new(matrix: &'a PackedMatrix<'a>) -> Self {
        let mut rows = Self {
            matrix,
            words: &[],
            rows: 0,
            tail: [Line::ZERO; ROWS],
            passes: Vec::new(),
            counts: Vec::new(),
            apart: Vec::new(),
        };
        rows.passes.push(rows.empty_pass());
        rows.counts.resize(rows.batches() * BATCH_SHARED, 1);
        rows.apart.resize(rows.batches() * BATCH_SHARED, false);
        rows
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c")]
    unsafe fn load(&mut self, first_row: usize, rows: usize) {
        let groups = self.matrix.groups_per_row();
        (self.words, self.rows) = self.matrix.rows_words(first_row, rows.min(ROWS));
        tails(self.matrix, self.words, &mut self.tail);
        self.passes.truncate(1);
        self.counts.fill(1);
        self.apart.fill(false);
        let GroupValues::Byte(scales) = self.matrix.scales.slice(first_row * groups, self.rows * groups)
        else {
            return;
        };
        for (row, scales) in scales.chunks_exact(groups).enumerate() {
            self.share(row, scales);
        }
    }

    fn keeps_precision(&self, steps: &Range<usize>, x: &[f32]) -> bool {
        let apart = self.apart.get(shared_in(steps)).unwrap_or_default();
        !apart.contains(&true)
            || x.chunks_exact(self.matrix.k).all(|x| {
                let x = x.get(steps.start * STEP..x.len().min(steps.end * STEP)).unwrap_or_default();
                x.chunks(SHARED).all(are_similar)
            })
    }

    fn passes(&self, steps: &Range<usize>) -> usize {
        let counts = self.counts.get(shared_in(steps)).unwrap_or_default();
        usize::from(counts.iter().copied().max().unwrap_or(1))
    }

    #[inline(always)]
    fn params(&self, pass: usize) -> Option<(*const f32, *const f32, usize)> {
        let scales = &self.passes.get(pass)?.scales;
        Some((scales.as_ptr(), scales.as_ptr(), self.batches() * BATCH_SHARED))
    }

    #[inline(always)]
    unsafe fn unpack(&self, steps: Range<usize>, pass: usize, to: *mut Line) {
        const STEP_BYTES: usize = STEP / 2;
        let Some(pass) = self.passes.get(pass) else { return };
        let row_bytes = self.matrix.k / 2;
        let row_tables = self.batches() * BATCH_STEPS;
        let full = full_steps(self.matrix, &steps);
        let mut from = self.words.as_ptr().cast::<u8>().wrapping_add(steps.start * STEP_BYTES);
        let mut tables = pass.tables.as_ptr().wrapping_add(steps.start);
        for row in 0..self.rows {
            // SAFETY: full steps lie in the row, and the tail has the bytes of a step. Every step has the number of a table, which
            // `share` and `share_rest` keep below their count. `to` is valid, as the caller vouches.
            unsafe {
                let unpack = |from: *const u8, step: usize| {
                    let table = TABLES.get_unchecked(usize::from(*tables.add(step)));
                    let table = _mm512_load_si512(table.0.as_ptr().cast());
                    _mm512_store_si512(
                        to.add(step * ROWS + row).cast(),
                        _mm512_shuffle_epi8(table, nibbles(from)),
                    );
                };
                for step in 0..full {
                    unpack(from.add(step * STEP_BYTES), step);
                }
                if full < steps.len() {
                    unpack(amx_tile::bytes(&self.tail[row..]), full);
                }
            }
            from = from.wrapping_add(row_bytes);
            tables = tables.wrapping_add(row_tables);
        }
    }
}
