//! Strips of the weight, and how they are unpacked: rows of matrix tiles, chunk by chunk.

use super::super::super::isa::amx_tile::{Line, ROWS};
use super::super::super::row_gemv::load;
use super::super::codes::IntegerCodes;
use super::super::unpack::unpack_vector;
use super::super::x_tiles::CHUNK;
use std::arch::x86_64::*;

/// Elements of a row that are unpacked at a time: a strip of sixteen rows, another one, and what they are multiplied with have room in
/// the first-level cache.
pub(super) const STRIP: usize = 256;

/// Elements that come from one block of codes.
pub(super) const BLOCK: usize = 2 * CHUNK;

/// The lines of a strip that is unpacked.
pub(super) const LINES: usize = STRIP / CHUNK * ROWS;

/// Quadwords of two vectors, the second from 8 on: in turn a quarter of each, the first two of both, and the last two.
const QUARTERS: [[u64; 8]; 2] = [[0, 1, 8, 9, 2, 3, 10, 11], [4, 5, 12, 13, 6, 7, 14, 15]];

/// The element of each byte of a chunk, as [`unpack_row`] has them: two vectors of a block in turn, a quarter of each.
pub(super) fn order(codes: &IntegerCodes) -> [u8; CHUNK] {
    std::array::from_fn(|byte| {
        if codes.bits().get() == 8 {
            return byte as u8;
        }
        let (unit, vector) = (byte / 32 * 4 + byte % 16 / 4, byte / 16 % 2);
        (unit * 8 + codes.element_of_unit(vector, byte % 4)) as u8
    })
}

/// Rows of a weight that are multiplied.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub(super) first: *const u8,
    pub(super) count: usize,
    pub(super) row_bytes: usize,
    /// What is subtracted from codes.
    pub(super) center: i8,
}

impl Rows {
    /// Where a strip of a row begins, and how many bytes there are to the end of the row. Behind the last row is the last one again.
    #[inline(always)]
    pub(super) fn strip<const BITS: usize>(
        &self,
        Strip { panel, index }: Strip,
        row: usize,
    ) -> (*const u8, usize) {
        let (row, start) = ((panel * ROWS + row).min(self.count - 1), index * STRIP * BITS / 8);
        (self.first.wrapping_add(row * self.row_bytes + start), self.row_bytes - start)
    }
}

/// Some elements of sixteen rows.
#[derive(Clone, Copy)]
pub(super) struct Strip {
    pub(super) panel: usize,
    pub(super) index: usize,
}

impl Strip {
    /// The one behind it, in rows of so many strips.
    pub(super) fn next(self, strips: usize) -> Self {
        let Self { panel, index } = self;
        match index + 1 == strips {
            true => Self { panel: panel + 1, index: 0 },
            false => Self { panel, index: index + 1 },
        }
    }
}

/// What is unpacked while a strip is multiplied.
pub(super) struct Ahead<'a> {
    pub(super) rows: Rows,
    /// The strip, and the one that is fetched.
    pub(super) strips: (Strip, Strip),
    /// Rows for each group.
    pub(super) at_once: usize,
    pub(super) done: usize,
    pub(super) to: &'a mut [Line],
}

impl Ahead<'_> {
    /// Unpacks a few rows more.
    ///
    /// # Safety
    /// As [`unpack_row`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    pub(super) unsafe fn unpack<const BITS: usize, const KIND: u8>(&mut self) {
        let end = (self.done + self.at_once).min(ROWS);
        for row in self.done..end {
            // SAFETY: as the caller vouches.
            unsafe { unpack_row::<BITS, KIND>(self.rows, self.strips, row, self.to) };
        }
        self.done = end;
    }
}

/// Unpacks a row of a strip, and begins to fetch that of another one.
///
/// # Safety
/// The weight has the strip; the caller enables the features.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
pub(super) unsafe fn unpack_row<const BITS: usize, const KIND: u8>(
    rows: Rows,
    (strip, fetched): (Strip, Strip),
    row: usize,
    to: &mut [Line],
) {
    let block_bytes = const { BLOCK * BITS / 8 };
    let (ahead, _) = rows.strip::<BITS>(fetched, row);
    // Rows begin anywhere in a line.
    for line in (0..=const { STRIP * BITS / 8 }).step_by(64) {
        prefetch(ahead.wrapping_add(line));
    }
    let (from, rest) = rows.strip::<BITS>(strip, row);
    assert!(to.len() >= LINES && row < ROWS);
    let center = _mm512_set1_epi8(rows.center);
    for block in 0..const { STRIP / BLOCK } {
        let start = block * block_bytes;
        // SAFETY: the row has `rest` bytes, and zeros take the place of those behind them; `to` has room for the chunks of the block.
        unsafe {
            let rest = rest.saturating_sub(start).min(block_bytes);
            let from = from.wrapping_add(start);
            let (first, second) = match rest == block_bytes {
                // Lengths are constants.
                true => halves::<BITS>(from, block_bytes),
                false => halves::<BITS>(from, rest),
            };
            let chunks = match BITS {
                8 => [first, second],
                _ => {
                    let low = unpack_vector::<BITS, KIND>(0, first, second);
                    let high = unpack_vector::<BITS, KIND>(1, first, second);
                    let [first, second] = [
                        _mm512_loadu_si512(QUARTERS[0].as_ptr().cast()),
                        _mm512_loadu_si512(QUARTERS[1].as_ptr().cast()),
                    ];
                    [
                        _mm512_permutex2var_epi64(low, first, high),
                        _mm512_permutex2var_epi64(low, second, high),
                    ]
                }
            };
            for chunk in 0..2 {
                let to = to.as_mut_ptr().add((2 * block + chunk) * ROWS + row);
                _mm512_store_si512(to.cast(), _mm512_sub_epi8(chunks[chunk], center));
            }
        }
    }
}

/// Prefetches a cache line into all levels.
#[inline(always)]
fn prefetch(address: *const u8) {
    // SAFETY: a prefetch of any address is harmless: it neither faults nor changes what a program sees.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
}

/// The first 64 bytes of a block, or as many as there are, and those behind them.
///
/// # Safety
/// The block has `rest` bytes; the caller enables the features.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn halves<const BITS: usize>(from: *const u8, rest: usize) -> (__m512i, __m512i) {
    let block_bytes = const { BLOCK * BITS / 8 };
    // SAFETY: as the caller vouches.
    unsafe {
        (load(from, 0, block_bytes.min(64), rest), load(from, 64, block_bytes.saturating_sub(64), rest))
    }
}
