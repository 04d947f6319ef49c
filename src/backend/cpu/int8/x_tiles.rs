//! Rows of x as fixed-point numbers, for weights in panels: a few rows to a *tile*.

use super::super::aligned::Aligned;
use super::super::fast_kernel::{Digits, NotRepresentable};
use super::super::tasks::{self, Threads};
use super::codes::IntegerCodes;
use super::gemm::Multiplier;
use super::outliers::{most_by_columns, Found, Outliers};
use super::weight_panels::{element, Panels};
use crate::QuantFormat;

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
        let found = Found::new(
            multiplier.panels().magnitudes(),
            (x, k),
            group_size,
            (digits, most_by_columns(k)),
            threads,
        )?;
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
                    (smaller.unwrap_or(largest), k / 4, groups)
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
