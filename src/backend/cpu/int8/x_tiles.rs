//! Rows of x as fixed-point numbers, for weights in panels: a few rows to a *tile*.

use super::super::aligned::Aligned;
use super::super::fast_kernel::{Digits, NotRepresentable};
use super::super::tasks::{self, Threads};
use super::codes::IntegerCodes;
use super::fixed_point::unit_of_limbs;
use super::gemm::{Multiplier, Panels};
use super::outliers::{Found, Outliers};
use super::weight_panels::element;
use crate::QuantFormat;
use std::arch::x86_64::*;

/// How the digits of a tile lie: words of four, for the four elements of a panel's vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Layout {
    /// `[vector][row][digit]`: what meets a vector of the panel lies together.
    Words,
    /// `[block][digit][row][vector of the block]`: blocks of [`WORDS_OF_BLOCK`] vectors are rows of matrix tiles.
    Rows,
}

/// Words of a row in a block.
pub(super) const WORDS_OF_BLOCK: usize = 16;

/// Rows of x.
pub(super) struct XTiles {
    /// Digits of a number.
    pub(super) digits: usize,
    pub(super) m: usize,
    pub(super) tiles: Vec<Tile>,
    pub(super) outliers: Outliers,
}

/// Up to sixteen rows of x, with rows of zeros behind the last.
pub(in super::super) struct Tile {
    pub(super) first: usize,
    /// Rows that there are, and those that are multiplied.
    pub(super) rows: usize,
    pub(super) size: usize,
    /// See [`Layout`]; the highest digit first.
    pub(super) words: Aligned<i32>,
    /// `[group][row][digit]`: `-center *` the sum of the digits. Sums of products begin with them; none in [`Layout::Rows`],
    /// whose weights are less their center.
    pub(super) offsets: Aligned<i32>,
    /// `[group][row]`: numbers are multiples of it.
    pub(super) units: Aligned<f32>,
    /// `[group][row]`: the sum of the numbers.
    pub(super) sums: Aligned<f32>,
}

/// Numbers of the largest group.
pub(super) const LARGEST_GROUP: usize = 128;

/// A group in digits: `[digit, highest first]`, bytes in the order of panels.
type Bytes = [[u8; LARGEST_GROUP]; 3];

impl XTiles {
    /// # Errors
    /// If there is a number that is no fixed-point number, or too many are outliers.
    pub(super) fn new<M: Multiplier>(
        multiplier: M,
        (codes, format): (&IntegerCodes, QuantFormat),
        (x, k): (&[f32], usize),
        digits: Digits,
        threads: Threads,
    ) -> Result<Self, NotRepresentable> {
        let (group_size, layout) = (format.group_size(), M::LAYOUT);
        let found = Found::new(multiplier.panels().magnitudes(), (x, k), group_size, digits, threads)?;
        let (m, digits) = (x.len() / k, digits.count);
        let largest = M::LARGEST_TILE.get(digits - 1).copied().unwrap_or(1);
        let largest = match layout {
            Layout::Words => largest,
            Layout::Rows => m.min(largest),
        };
        let tile = |first: usize| {
            let rows = (m - first).min(largest);
            let groups = k / group_size;
            let (size, words, offsets) = match layout {
                Layout::Words => {
                    let smaller = M::SMALLER_TILES.iter().copied().find(|size| *size >= rows);
                    (smaller.unwrap_or(largest).min(largest), k / 4, groups)
                }
                Layout::Rows => (largest, (k / 4).next_multiple_of(WORDS_OF_BLOCK), 0),
            };
            Tile {
                first,
                rows,
                size,
                words: Aligned::new(words * size * digits),
                offsets: Aligned::new(offsets * size * digits),
                units: Aligned::new(groups * size),
                sums: Aligned::new(groups * size),
            }
        };
        let mut tiles: Vec<Tile> = (0..m).step_by(largest).map(tile).collect();
        let order: [u8; 64] = std::array::from_fn(|byte| element(format.bits(), byte / 4, byte % 4) as u8);
        let fill = |_: usize, tile: &mut Tile| {
            let rows = x.chunks_exact(k).skip(tile.first).take(tile.rows);
            for (row, x) in rows.enumerate() {
                let mut outliers = found.of_row(tile.first + row);
                for (group, mut x) in x.chunks_exact(group_size).enumerate() {
                    let mut rest = [0f32; LARGEST_GROUP];
                    if outliers.any_below((group + 1) * group_size) {
                        let rest = &mut rest[..group_size];
                        rest.copy_from_slice(x);
                        outliers.take_out(group * group_size, rest);
                        x = rest;
                    }
                    let (at, order) = ((group, row), (&order, layout));
                    // SAFETY: `multiplier` proves that the CPU has the features of the functions.
                    unsafe {
                        match digits {
                            1 => M::Panels::fill::<1>(tile, at, x, codes.center, order),
                            2 => M::Panels::fill::<2>(tile, at, x, codes.center, order),
                            _ => M::Panels::fill::<3>(tile, at, x, codes.center, order),
                        }
                    }
                }
            }
        };
        match threads {
            Threads::All => tasks::for_each(&mut tiles, fill),
            Threads::This => tiles.iter_mut().for_each(|tile| fill(0, tile)),
        }
        Ok(Self { digits, m, tiles, outliers: found.by_columns() })
    }
}

impl Tile {
    /// Fills in a group of a row, a multiple of 16 numbers up to 128.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma")]
    pub(super) fn fill<const DIGITS: usize>(
        &mut self,
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
                match layout {
                    Layout::Words => {
                        let mut at = (first * self.size + row) * DIGITS + digit;
                        for word in words {
                            if let Some(to) = self.words.get_mut(at) {
                                *to = *word;
                            }
                            at += self.size * DIGITS;
                        }
                    }
                    Layout::Rows => {
                        let (block, within) = (first / WORDS_OF_BLOCK, first % WORDS_OF_BLOCK);
                        let at = ((block * DIGITS + digit) * self.size + row) * WORDS_OF_BLOCK + within;
                        if let Some(to) = self.words.get_mut(at..at + words.len()) {
                            to.copy_from_slice(words);
                        }
                    }
                }
            }
            if let Some(offset) = self.offsets.get_mut((group * self.size + row) * DIGITS + digit) {
                *offset = -center * _mm512_reduce_add_epi32(totals[digit]);
            }
        }
        if let Some(to) = self.units.get_mut(group * self.size + row) {
            *to = unit;
        }
        if let Some(to) = self.sums.get_mut(group * self.size + row) {
            *to = _mm512_reduce_add_ps(sum);
        }
    }
}
