//! Panels times tiles of x, on AMX: the lanes of a panel are the columns of a matrix tile, rows of x are its rows.
//!
//! A matrix tile multiplies sixteen rows of signed bytes with sixteen columns in as many cycles: 1024 multiply-adds a cycle,
//! where two vector units have 32 in f32. Sums of a group are scaled by vectors while the next group is multiplied: vectors
//! that read what a tile has just written wait long.

#![allow(clippy::needless_range_loop)] // Iterators are calls in functions that have more instructions than theirs.

use super::super::isa::amx_tile::{self, Amx, Line, Tiles, LEFT, RIGHT, ROWS};
use super::super::isa::avx512::Avx512Vnni;
use super::gemm::{Chunk, Multiplier, Sums};
use super::gemm_vnni::scaled;
use super::units::LIMBS;
use super::weight_panels::DEPTH;
use super::x_tiles::{Layout, Tile};
use std::arch::x86_64::*;

/// Words of a row of x in a block: a row of a matrix tile.
const WORDS_OF_BLOCK: usize = 16;

/// Sums of a group for each panel and digit: `[panel][digit][row of x]`, as long as there are rows.
type Counts = [[[Line; ROWS]; LIMBS]; 2];

/// A group of one or two panels, multiplied with a tile, whose sums are to be scaled next.
#[derive(Clone, Copy)]
struct Waiting<'a> {
    first_panel: usize,
    panels: usize,
    tile: &'a Tile,
    group: usize,
}

impl Multiplier for Amx {
    type Panels = Avx512Vnni;

    const LAYOUT: Layout = Layout::Rows(WORDS_OF_BLOCK);
    const LARGEST_TILE: [usize; 3] = [ROWS; 3];
    const SMALLER_TILES: &'static [usize] = &[];
    const ALL_OF_ONE_SIZE: bool = true;
    const TOGETHER: usize = 2;
    // Smaller ones fill a quarter of a tile, and sums are scaled as often.
    const LEAST_GROUP: usize = 32;
    type InUse = Tiles;

    fn panels(self) -> Avx512Vnni {
        self.vnni
    }

    unsafe fn begin(self, size: usize, group_size: usize) -> Tiles {
        // SAFETY: the thread has no other tiles, as the caller vouches.
        unsafe { Tiles::configure(self, size, group_size.min(64)) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx2,fma,gfni,f16c")]
    unsafe fn add<const DIGITS: usize>(chunk: Chunk, tiles: &[Tile], sums: &mut Sums) {
        let Chunk { codes, params, elements: (first, count), group_size, .. } = chunk;
        let (first_group, groups) = (first / group_size, count / group_size);
        let end = first_group + groups;
        assert!(codes.len() >= params.len() * (DEPTH / 4) && groups * group_size <= DEPTH);
        for params in params {
            assert!(params.scales.len() >= end && (params.biases.is_empty() || params.biases.len() >= end));
        }
        let mut counts: [Counts; 2] = [[[[Line::ZERO; ROWS]; LIMBS]; 2]; 2];
        let mut turn = 0;
        let mut waiting: Option<Waiting> = None;
        // Two panels stay in the first-level cache, while all rows of x pass by.
        for first_panel in (0..params.len()).step_by(2) {
            let panels = (params.len() - first_panel).min(2);
            let right = codes[first_panel * (DEPTH / 4)..].as_ptr();
            for tile in tiles {
                let blocks = (first + count).div_ceil(4 * WORDS_OF_BLOCK);
                assert!(tile.words.len() >= blocks * DIGITS * tile.size * WORDS_OF_BLOCK);
                assert!(tile.units.len() >= end * tile.size && tile.sums.len() >= end * tile.size);
                for group in 0..groups {
                    // SAFETY: tiles are configured for `tile.size` rows and these groups. The assertions: panels and tile have
                    // all groups.
                    unsafe {
                        let element = group * group_size;
                        let right = right.add(element / 4);
                        let right = [right.cast(), right.wrapping_add(DEPTH / 4).cast()];
                        let left = Left::of::<DIGITS>(tile, first + element);
                        match panels {
                            2 => multiply::<DIGITS, 2>(left, right, (group_size, turn), &mut counts[turn]),
                            _ => multiply::<DIGITS, 1>(left, right, (group_size, turn), &mut counts[turn]),
                        }
                        turn ^= 1;
                        let next = Waiting { first_panel, panels, tile, group: first_group + group };
                        if let Some(waiting) = waiting.replace(next) {
                            flush::<DIGITS>(chunk, waiting, &counts[turn], sums);
                        }
                    }
                }
            }
        }
        if let Some(waiting) = waiting {
            // SAFETY: as above.
            unsafe { flush::<DIGITS>(chunk, waiting, &counts[turn ^ 1], sums) };
        }
    }
}

/// Rows of x from an element on.
#[derive(Clone, Copy)]
struct Left {
    /// Of the highest digit.
    first: *const u8,
    /// Bytes from a digit to the next one, and from a block of elements to the next one.
    digit: usize,
    block: usize,
}

impl Left {
    /// # Safety
    /// The tile has the element.
    #[inline(always)]
    unsafe fn of<const DIGITS: usize>(tile: &Tile, element: usize) -> Self {
        let digit = tile.size * WORDS_OF_BLOCK * 4;
        let block = DIGITS * digit;
        let (blocks, within) = (element / (4 * WORDS_OF_BLOCK), element % (4 * WORDS_OF_BLOCK));
        // SAFETY: the tile has the block of the element, as the caller vouches.
        let first = unsafe { tile.words.as_ptr().cast::<u8>().add(blocks * block + within) };
        Self { first, digit, block }
    }
}

/// Multiplies a group of one or two panels with rows of x.
///
/// # Safety
/// Tiles are configured for the rows and the group; the pointers are valid for its elements, those of the second panel if there
/// is one.
#[inline(always)]
unsafe fn multiply<const DIGITS: usize, const PANELS: usize>(
    left: Left,
    right: [*const u8; 2],
    (group_size, turn): (usize, usize),
    counts: &mut Counts,
) {
    let parts = group_size.div_ceil(64);
    // SAFETY: tiles are configured, and the offsets stay inside the group, for which the pointers are valid.
    unsafe {
        for digit in 0..DIGITS {
            // By turns, so that one may be written while the next ones are computed.
            match (digit + DIGITS * turn) % 2 {
                0 => multiply_digit::<0, 1, PANELS>(left, right, (digit, parts), counts),
                _ => multiply_digit::<2, 3, PANELS>(left, right, (digit, parts), counts),
            }
        }
    }
}

/// The same with one digit.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
unsafe fn multiply_digit<const S0: u8, const S1: u8, const PANELS: usize>(
    left: Left,
    right: [*const u8; 2],
    (digit, parts): (usize, usize),
    counts: &mut Counts,
) {
    // SAFETY: as the caller vouches.
    unsafe {
        amx_tile::zero::<S0>();
        if PANELS > 1 {
            amx_tile::zero::<S1>();
        }
        for part in 0..parts {
            amx_tile::load::<LEFT>(left.first.add(digit * left.digit + part * left.block), 64);
            let from = part * 64 * WORDS_OF_BLOCK;
            if digit == 0 || parts > 1 {
                amx_tile::load::<{ RIGHT[0] }>(right[0].add(from), 64);
            }
            amx_tile::multiply_int8::<S0, LEFT, { RIGHT[0] }>();
            if PANELS > 1 {
                if digit == 0 || parts > 1 {
                    amx_tile::load::<{ RIGHT[1] }>(right[1].add(from), 64);
                }
                amx_tile::multiply_int8::<S1, LEFT, { RIGHT[1] }>();
            }
        }
        amx_tile::store::<S0>(counts[0][digit].as_mut_ptr());
        if PANELS > 1 {
            amx_tile::store::<S1>(counts[1][digit].as_mut_ptr());
        }
    }
}

/// Adds what waits, scaled.
///
/// # Safety
/// The caller enables the features; panels and tile have the group.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx2,fma,gfni,f16c")]
unsafe fn flush<const DIGITS: usize>(chunk: Chunk, waiting: Waiting, counts: &Counts, sums: &mut Sums) {
    // SAFETY: as the caller vouches.
    unsafe {
        match waiting.panels {
            2 => flush_panels::<DIGITS, 2>(chunk, waiting, counts, sums),
            _ => flush_panels::<DIGITS, 1>(chunk, waiting, counts, sums),
        }
    }
}

/// The same for so many panels: what belongs to a row of x is read once for them.
///
/// # Safety
/// As [`flush`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx2,fma,gfni,f16c")]
unsafe fn flush_panels<const DIGITS: usize, const PANELS: usize>(
    chunk: Chunk,
    Waiting { first_panel, tile, group, .. }: Waiting,
    counts: &Counts,
    sums: &mut Sums,
) {
    let to = sums.rows_of_panels::<PANELS>(first_panel, (tile.first, tile.size));
    let mut scales = [_mm512_setzero_ps(); PANELS];
    let mut biases = [_mm512_setzero_ps(); PANELS];
    for panel in 0..PANELS {
        let params = &chunk.params[first_panel + panel];
        // SAFETY: the panel has the group, as the caller vouches.
        unsafe {
            scales[panel] = _mm512_loadu_ps(params.scales.as_ptr().add(group).cast());
            if !params.biases.is_empty() {
                biases[panel] = _mm512_loadu_ps(params.biases.as_ptr().add(group).cast());
            }
        }
    }
    for row in 0..tile.size {
        // SAFETY: the tile has the group, as the caller vouches, and `to` its rows; a line is an aligned vector.
        unsafe {
            let of_row = (
                *tile.units.as_ptr().add(group * tile.size + row),
                *tile.sums.as_ptr().add(group * tile.size + row),
            );
            for panel in 0..PANELS {
                let mut digits = [_mm512_setzero_si512(); DIGITS];
                for digit in 0..DIGITS {
                    digits[digit] = _mm512_load_si512(counts[panel][digit].as_ptr().add(row).cast());
                }
                let at = to[panel].add(row).cast::<f32>();
                let params = (scales[panel], biases[panel]);
                _mm512_storeu_ps(at, scaled(digits, of_row, params, _mm512_loadu_ps(at)));
            }
        }
    }
}
