//! What the AVX-512 kernels for one row of x share: they take rows of the weight, some at a time ([`Pass`]), with their
//! scales and biases prepared ([`scales`]).

pub(super) mod scales;
mod stored;

use super::aligned::Aligned;
use super::group_params::ROWS_PER_PASS;
use super::isa::avx512::Avx512;
use super::isa::{has_large_first_cache, is_of_intel};
use super::matrix::PackedMatrix;
use crate::format::SUPER_BLOCK;
use scales::{scale_rows, Scaling};
use std::arch::x86_64::*;

/// 32-bit lanes of a vector.
pub(super) const LANES: usize = 16;

/// Rows whose lanes are summed together.
pub(super) const ROWS: usize = 4;

/// How many bytes ahead of the codes that are multiplied others are fetched; an equal part of them in each stream.
const AHEAD: usize = 8192;

/// How many rows ahead scales and biases are fetched at most, those of a few rows at a time: all of a pass at once would be waited for.
const ROWS_AHEAD: usize = 4 * ROWS_PER_PASS;

/// How many bytes of scales and biases are on the way at most, unless a pass has more: the first cache has to hold them beside x and
/// codes that were fetched ([`AHEAD`]).
const SCALES_AHEAD: usize = 8192;

/// In which order a kernel takes the rows of its share. What it computes does not depend on that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// [`ROWS`] neighbours together, which load x once.
    Neighbours,
    /// Long rows one after the other. Two cores of Zen 5 read codes up to 1.18 times as fast in the order of memory
    /// (benches/results/2026-11-30-epyc-vnni-2-cores/order.md).
    Alone,
    /// [`ROWS`] together, one of each quarter of the share: streams of memory that the CPU follows by itself, as it seems. A core of
    /// Granite Rapids reads 15 GB/s so, and 10 where it takes neighbours and codes are fetched in the order of memory
    /// (benches/results/2026-11-30-xeon-2-cores/streams.md).
    Quarters,
}

impl Order {
    /// All of them.
    #[cfg(test)]
    pub(super) const ALL: [Self; 3] = [Self::Neighbours, Self::Alone, Self::Quarters];

    /// What is best on this CPU.
    pub(super) fn best() -> Self {
        match (has_large_first_cache(), is_of_intel()) {
            (true, _) => Self::Alone,
            (_, true) => Self::Quarters,
            _ => Self::Neighbours,
        }
    }

    /// How many rows of each quarter of a share are multiplied beside those of the others: whole passes of so many rows; none where
    /// quarters are short, or rows are not taken so.
    pub(super) fn rows_of_quarter(self, share: usize, row_bytes: usize, rows_of_pass: usize) -> usize {
        let len = (rows_of_pass / ROWS).max(1);
        let rows = share / ROWS / len * len;
        match self {
            Self::Quarters if rows * row_bytes >= LONG_STREAM => rows,
            Self::Neighbours | Self::Alone | Self::Quarters => 0,
        }
    }
}

/// Bytes of codes from which on a quarter of a share is worth a stream of its own: what is fetched ahead is little of it.
const LONG_STREAM: usize = 8192;

/// Some rows of a weight, with scales and biases as [`scale_rows`] prepares them.
pub(super) struct Pass<'a> {
    words: &'a [u32],
    scaled: &'a [f32],
    row_words: usize,
    stride: usize,
    count: usize,
    between: Between,
    /// Where scales, biases and those of super-blocks lie of the rows that are fetched, and how many bytes each row has.
    ahead: [(*const u8, usize); 4],
    pub(super) fetch: Fetch,
}

/// How far apart the rows of a pass are, in rows.
#[derive(Clone, Copy)]
struct Between {
    /// Those that are summed together: in the weight, and among those that are prepared.
    together: (usize, usize),
    /// The first of those, and of the next that are, in both.
    in_turn: usize,
}

impl Between {
    const NEIGHBOURS: Self = Self { together: (1, 1), in_turn: ROWS };
}

impl<'a> Pass<'a> {
    /// The bytes of a row's codes.
    #[inline(always)]
    pub(super) fn row_bytes(&self) -> usize {
        self.row_words * 4
    }

    /// How many scales a row has, with the zeros behind them.
    #[inline(always)]
    pub(super) fn scales_per_row(&self) -> usize {
        self.stride - LANES
    }

    /// Whether rows that are summed together are streams of their own.
    #[inline(always)]
    pub(super) fn has_streams(&self) -> bool {
        self.between.in_turn == 1
    }

    /// Begins to fetch scales and biases of rows behind those of the pass, as many as are summed together.
    #[inline(always)]
    pub(super) fn fetch_ahead(&self, part: usize) {
        let (apart, first) = (self.between.together.0, part * self.between.in_turn);
        for (start, bytes) in self.ahead {
            let of_row = |row: usize| start.wrapping_add(row * bytes);
            match self.has_streams() {
                true => (0..ROWS).for_each(|row| self.fetch.bytes(of_row(first + row * apart), bytes)),
                false => self.fetch.bytes(of_row(first), ROWS * bytes),
            }
        }
    }

    /// A row, those that are summed together next to each other; behind the last, the last one again.
    #[inline(always)]
    pub(super) fn row(&self, index: usize) -> Row<'a> {
        let index = index.min(self.count.saturating_sub(1));
        let Between { together: (of_weight, of_scaled), in_turn } = self.between;
        let place = |between| index / ROWS * in_turn + index % ROWS * between;
        let (biases, scales) = self.scaled[place(of_scaled) * self.stride..][..self.stride].split_at(LANES);
        Row { words: &self.words[place(of_weight) * self.row_words..][..self.row_words], biases, scales }
    }
}

/// A packed row, and its scales and biases as [`scale_rows`] prepares them.
#[derive(Clone, Copy)]
pub(super) struct Row<'a> {
    pub(super) words: &'a [u32],
    /// 16 partial sums; add them to get the bias term.
    pub(super) biases: &'a [f32],
    pub(super) scales: &'a [f32],
}

/// What scales and biases of the rows of a pass, at most [`ROWS_PER_PASS`], are prepared in, and how far ahead others are fetched.
pub(super) struct Room {
    scaled: Aligned<f32>,
    /// What those of super-blocks count.
    pub(super) units: Aligned<f32>,
    /// Whole passes.
    rows_ahead: usize,
}

impl Room {
    pub(super) fn new(matrix: &PackedMatrix, scaling: &Scaling, rows_of_pass: usize) -> Self {
        let blocks = matrix.super_blocks.map_or(0, |_| matrix.k / SUPER_BLOCK);
        let row_bytes: usize = matrix.scales_from(0).iter().map(|&(_, bytes)| bytes).sum();
        let passes = SCALES_AHEAD / row_bytes.max(1) / rows_of_pass;
        Self {
            scaled: Aligned::new(ROWS_PER_PASS * scaling.stride),
            units: Aligned::new(2 * ROWS_PER_PASS * blocks),
            rows_ahead: (passes * rows_of_pass).clamp(rows_of_pass, ROWS_AHEAD),
        }
    }

    /// Begins to fetch what the first of so many rows need, for which nothing was fetched on the way, and which are one of some streams.
    pub(super) fn fetch_first(&self, matrix: &PackedMatrix, first_row: usize, rows: usize, streams: usize) {
        let fetch = Fetch::best();
        let (words, rows) = matrix.rows_words(first_row, rows);
        fetch.bytes(words.as_ptr().cast(), (AHEAD / streams).min(words.len() * 4));
        let rows = (self.rows_ahead / streams).min(rows);
        for (first, bytes) in matrix.scales_from(first_row) {
            fetch.bytes(first, rows * bytes);
        }
    }
}

/// Rows that are multiplied before anything else is: no more than the first cache has room for beside x and what is fetched, since
/// outliers need their codes once more, and no fewer than are summed together.
pub(super) fn rows_of_pass(matrix: &PackedMatrix) -> usize {
    const BYTES: usize = 16384;
    let row_bytes = matrix.k * matrix.format.bits() / 8;
    (BYTES / row_bytes.max(1) / ROWS * ROWS).clamp(ROWS, ROWS_PER_PASS)
}

/// The sums of at most [`ROWS_PER_PASS`] rows from `first_row` on, one for each of `output`, by `dot`.
pub(super) fn dot_rows(
    isa: Avx512,
    matrix: &PackedMatrix,
    (scaling, room): (&Scaling, &mut Room),
    (first_row, output): (usize, &mut [f32]),
    dot: impl Fn(&Pass, &mut [f32]),
) {
    let (words, count) = matrix.rows_words(first_row, output.len());
    let scaled = &mut room.scaled[..count * scaling.stride];
    scale_rows(isa, (matrix, first_row), scaling, scaled, &mut room.units);
    let ahead = matrix.scales_from(first_row + room.rows_ahead);
    let (row_words, stride) = (words.len() / count.max(1), scaling.stride);
    let between = Between::NEIGHBOURS;
    let pass = Pass { words, scaled, row_words, stride, count, between, ahead, fetch: Fetch::best() };
    dot(&pass, &mut output[..count]);
}

/// As [`dot_rows`], of [`ROWS`] runs of rows, each of which begins so many rows behind the one before; sums run by run.
///
/// # Panics
/// If the weight lacks some of the rows, or they are more than [`ROWS_PER_PASS`].
pub(super) fn dot_runs(
    isa: Avx512,
    matrix: &PackedMatrix,
    (scaling, room): (&Scaling, &mut Room),
    (first_row, apart, sums): (usize, usize, &mut [f32]),
    dot: impl Fn(&Pass, &mut [f32]),
) {
    let (count, len, stride) = (sums.len(), sums.len() / ROWS, scaling.stride);
    let scaled = &mut room.scaled[..count * stride];
    for (run, scaled) in scaled.chunks_mut((len * stride).max(1)).enumerate() {
        scale_rows(isa, (matrix, first_row + run * apart), scaling, scaled, &mut room.units);
    }
    let all = (ROWS - 1) * apart + len;
    let (words, found) = matrix.rows_words(first_row, all);
    assert_eq!((found, count), (all, len * ROWS), "rows of runs");
    let ahead = matrix.scales_from(first_row + room.rows_ahead / ROWS);
    let between = Between { together: (apart, len), in_turn: 1 };
    let row_words = words.len() / all.max(1);
    let pass = Pass { words, scaled, row_words, stride, count, between, ahead, fetch: Fetch::best() };
    let mut together = [0.; ROWS_PER_PASS];
    dot(&pass, &mut together[..count]);
    for (index, sum) in together[..count].iter().enumerate() {
        sums[index % ROWS * len + index / ROWS] = *sum;
    }
}

/// The sum of the lanes of each vector.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub(super) fn sums_of_lanes([a, b, c, d]: [__m512; ROWS]) -> [f32; ROWS] {
    // Lanes of two vectors are interleaved, so that one addition serves both.
    let pairs = |a, b| _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    let (ab, cd) = (_mm512_castps_pd(pairs(a, b)), _mm512_castps_pd(pairs(c, d)));
    let (low, high) = (_mm512_unpacklo_pd(ab, cd), _mm512_unpackhi_pd(ab, cd));
    let all = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    let half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps::<1>(all));
    let quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps::<1>(half));
    let mut sums = [0.; ROWS];
    // SAFETY: `sums` has room for the four numbers that are written.
    unsafe { _mm_storeu_ps(sums.as_mut_ptr(), quarter) };
    sums
}

/// Which cache codes and scales are fetched to, which are read once.
#[derive(Clone, Copy)]
pub(super) enum Fetch {
    /// The first level alone, where x and what is fetched have room.
    First,
    /// The second level. Beside a row of x, the first one of Zen 4, of 32 KiB, takes half as much of them
    /// (benches/results/2026-11-27-epyc-2-cores/prefetch.md).
    Second,
}

impl Fetch {
    /// What is best on this CPU.
    pub(super) fn best() -> Self {
        match has_large_first_cache() {
            true => Self::First,
            false => Self::Second,
        }
    }

    /// So many bytes from an address on.
    #[inline(always)]
    pub(super) fn bytes(self, at: *const u8, len: usize) {
        for line in (0..len).step_by(64) {
            let at = at.wrapping_add(line).cast();
            // SAFETY: a prefetch of any address is harmless: it neither faults nor changes what a program sees.
            unsafe {
                match self {
                    Self::First => _mm_prefetch::<_MM_HINT_NTA>(at),
                    Self::Second => _mm_prefetch::<_MM_HINT_T1>(at),
                }
            }
        }
    }

    /// What lies ahead of a block of some rows, the first of which begins at an address, and whose blocks are of so many bytes together:
    /// as much as is multiplied, but in the order of memory, which is read up to 1.35 times as fast as the same places of
    /// rows that come later (benches/results/2026-11-29-epyc-vnni-2-cores/prefetch.md).
    #[inline(always)]
    pub(super) fn ahead_of_rows(self, first: *const u8, block: usize, block_bytes: usize) {
        self.bytes(first.wrapping_add(block * block_bytes + AHEAD), block_bytes);
    }

    /// What lies ahead of a block in one of [`ROWS`] streams.
    #[inline(always)]
    pub(super) fn ahead_in_stream(self, row: *const u8, block: usize, block_bytes: usize) {
        self.bytes(row.wrapping_add(block * block_bytes + AHEAD / ROWS), block_bytes);
    }
}

/// `len` bytes (at most 64) from byte `start` of a block on. The row ends `rest` bytes behind the start of the block; the
/// vector has zeros from there on.
///
/// # Safety
/// `block` is valid for `rest` bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn load(block: *const u8, start: usize, len: usize, rest: usize) -> __m512i {
    let present = len.min(rest.saturating_sub(start));
    debug_assert!(len <= 64);
    // SAFETY: each arm reads `present` bytes from `start` on, which are among the `rest` bytes of the row.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quarters_are_whole_passes_and_long() {
        let rows = |share, row_bytes, rows_of_pass| {
            Order::ALL.map(|order| order.rows_of_quarter(share, row_bytes, rows_of_pass))
        };
        assert_eq!(rows(768, 1024, 16), [0, 0, 192]);
        // 9 rows of each are three passes of 3, or two of 4 and one that is left.
        assert_eq!(rows(37, 4224, 12), [0, 0, 9]);
        assert_eq!(rows(37, 4224, 16), [0, 0, 8]);
        assert_eq!([rows(32, 1024, 16), rows(31, 1024, 16), rows(3, 9000, 4)], [[0, 0, 8], [0; 3], [0; 3]]);
    }
}
