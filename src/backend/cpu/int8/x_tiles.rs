//! Rows of x as fixed-point numbers, for weights in panels: a few rows to a *tile*.

#![allow(clippy::needless_range_loop)] // Loops of constant length over arrays that have to become vectors.

use super::super::aligned::Aligned;
use super::super::fast_kernel::{Digits, NotRepresentable};
use super::super::tasks::{self, Threads};
use super::codes::IntegerCodes;
use super::gemm::Multiplier;
use super::outliers::{most_by_columns, Found, Outliers};
use super::units::{unit_of_limbs, LIMB_BITS};
use super::weight_panels::{element, Panels};
use crate::QuantFormat;

/// How the digits of a tile lie: words of four, for the four elements of a panel's vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Layout {
    /// `[vector][row][digit]`: what meets a vector of the panel lies together. Codes are unsigned.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    Words,
    /// `[block][digit][row][vector of the block]`, for codes less their center: blocks of so many vectors are rows of matrix tiles.
    Rows(usize),
    /// `[chunk][matrix tile][vector of the chunk][column of the tile]`, for codes less their center: chunks of [`CHUNK`] elements are
    /// the rows of matrix tiles, whose columns are [digits of rows of x](Tile::column).
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    Columns,
}

/// Elements that four bytes of each of sixteen vectors have.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(super) const CHUNK: usize = 64;

/// Columns of a matrix tile, and vectors of a chunk.
pub(super) const COLUMNS: usize = 16;

impl Layout {
    /// Vectors of a panel that lie interleaved, lane by lane: the two that a row of the smallest matrix tiles has.
    pub(super) fn interleaved(self) -> usize {
        match self {
            Self::Rows(2) => 2,
            Self::Words | Self::Rows(_) | Self::Columns => 1,
        }
    }

    /// Where the word of a digit of a row, for a vector, is among those of a tile of so many rows and digits.
    #[inline(always)]
    pub(super) fn place(
        self,
        vector: usize,
        (row, rows): (usize, usize),
        (digit, digits): (usize, usize),
    ) -> usize {
        match self {
            Self::Words => (vector * rows + row) * digits + digit,
            Self::Rows(vectors) => {
                ((vector / vectors * digits + digit) * rows + row) * vectors + vector % vectors
            }
            Self::Columns => {
                let column = digit * rows + row;
                let tile = vector / COLUMNS * (digits * rows).div_ceil(COLUMNS) + column / COLUMNS;
                (tile * COLUMNS + vector % COLUMNS) * COLUMNS + column % COLUMNS
            }
        }
    }

    /// Words of a tile of so many rows and digits, for `vectors` vectors.
    fn words(self, vectors: usize, rows: usize, digits: usize) -> usize {
        match self {
            Self::Words => vectors * rows * digits,
            Self::Rows(of_block) => vectors.next_multiple_of(of_block) * rows * digits,
            Self::Columns => vectors.next_multiple_of(COLUMNS) * (digits * rows).next_multiple_of(COLUMNS),
        }
    }
}

/// Rows of x.
pub(super) struct XTiles {
    /// Digits of a number.
    pub(super) digits: usize,
    pub(super) m: usize,
    pub(super) tiles: Vec<Tile>,
    pub(super) outliers: Outliers,
}

/// Some rows of x, with rows of zeros behind the last.
pub(in super::super) struct Tile {
    pub(super) first: usize,
    /// Rows that there are, and those that are multiplied.
    pub(super) rows: usize,
    pub(super) size: usize,
    /// See [`Layout`]; the highest digit first.
    pub(super) words: Aligned<i32>,
    /// `[group][row][digit]`: `-center *` the sum of the digits. Sums of products begin with them; none but in [`Layout::Words`],
    /// since other codes are less their center.
    pub(super) offsets: Aligned<i32>,
    /// `[group][row]`: numbers are multiples of it.
    pub(super) units: Aligned<f32>,
    /// `[group][row]`: the sum of the numbers.
    pub(super) sums: Aligned<f32>,
}

/// Numbers of the largest group.
pub(super) const LARGEST_GROUP: usize = 128;

/// A tile's first row of x, its rows, and how many are multiplied.
type Extent = (usize, usize, usize);

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
        let m = x.len() / k;
        let largest = M::LARGEST_TILE.get(digits.count - 1).copied().unwrap_or(1);
        let largest = if M::ALL_OF_ONE_SIZE { m.min(largest) } else { largest };
        let extent = |first: usize| {
            let rows = (m - first).min(largest);
            let smaller = M::SMALLER_TILES.iter().copied().find(|size| *size >= rows);
            (first, rows, smaller.unwrap_or(largest))
        };
        let extents = (0..m).step_by(largest).map(extent).collect();
        let order = std::array::from_fn(|byte| element(format.bits(), byte / 4, byte % 4) as u8);
        Self::of(
            multiplier.panels(),
            (codes, format),
            (x, k),
            (digits, threads),
            (M::LAYOUT, &order, extents),
        )
    }

    /// Tiles of these extents. `order` has the element of each byte of sixteen vectors.
    ///
    /// # Errors
    /// See [`Self::new`].
    pub(super) fn of<P: Panels>(
        panels: P,
        (codes, format): (&IntegerCodes, QuantFormat),
        (x, k): (&[f32], usize),
        (digits, threads): (Digits, Threads),
        (layout, order, extents): (Layout, &[u8; 64], Vec<Extent>),
    ) -> Result<Self, NotRepresentable> {
        let group_size = format.group_size();
        let most = (digits, most_by_columns(k));
        let found = Found::new(panels.magnitudes(), (x, k), group_size, most, threads)?;
        let digits = digits.count;
        let tile = |(first, rows, size): Extent| {
            let groups = k / group_size;
            let offsets = if layout == Layout::Words { groups } else { 0 };
            Tile {
                first,
                rows,
                size,
                words: Aligned::new(layout.words(k / 4, size, digits)),
                offsets: Aligned::new(offsets * size * digits),
                units: Aligned::new(groups * size),
                sums: Aligned::new(groups * size),
            }
        };
        let mut tiles: Vec<Tile> = extents.into_iter().map(tile).collect();
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
                    let (at, order) = ((group, row), (order, layout));
                    // SAFETY: `panels` proves that the CPU has the features of the functions.
                    unsafe {
                        match digits {
                            1 => P::fill::<1>(tile, at, x, codes.center, order),
                            2 => P::fill::<2>(tile, at, x, codes.center, order),
                            _ => P::fill::<3>(tile, at, x, codes.center, order),
                        }
                    }
                }
            }
        };
        match threads {
            Threads::All => tasks::for_each(&mut tiles, fill),
            Threads::This => tiles.iter_mut().for_each(|tile| fill(0, tile)),
        }
        Ok(Self { digits, m: x.len() / k, tiles, outliers: found.by_columns() })
    }
}

impl Tile {
    /// The column of a digit of a row, where [they are columns](Layout::Columns): the highest digits of all rows come first.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub(super) fn column(&self, row: usize, digit: usize) -> usize {
        digit * self.size + row
    }

    /// Fills in a group of a row: its numbers as multiples of a unit, and their sum. `order` has the element of each byte of sixteen
    /// words. Inlined with the instructions that the caller may use.
    #[inline(always)]
    pub(super) fn put<const DIGITS: usize>(
        &mut self,
        (group, row): (usize, usize),
        integers: &mut [i32],
        (unit, sum): (f32, f32),
        center: i32,
        (order, layout): (&[u8; 64], Layout),
    ) {
        let (size, words) = (self.size, integers.len() / 4);
        for digit in (0..DIGITS).rev() {
            // The lowest byte, signed, is subtracted, and the rest shifted.
            let mut bytes = [0u8; LARGEST_GROUP];
            let mut total = 0;
            for (to, integer) in bytes.iter_mut().zip(&mut *integers) {
                let value = *integer as i8;
                *to = value as u8;
                *integer = (*integer - i32::from(value)) >> LIMB_BITS;
                total += i32::from(value);
            }
            for word in 0..words {
                let natural = &bytes[word / 16 * 64..][..64];
                let order = &order[4 * (word % 16)..][..4];
                let bytes = std::array::from_fn(|byte| natural[usize::from(order[byte] % 64)]);
                let at = layout.place(group * words + word, (row, size), (digit, DIGITS));
                if let Some(to) = self.words.get_mut(at) {
                    *to = i32::from_le_bytes(bytes);
                }
            }
            if let Some(offset) = self.offsets.get_mut((group * size + row) * DIGITS + digit) {
                *offset = -center * total;
            }
        }
        if let Some(to) = self.units.get_mut(group * size + row) {
            *to = unit;
        }
        if let Some(to) = self.sums.get_mut(group * size + row) {
            *to = sum;
        }
    }
}

/// The unit of a group of x with so many digits, and the sum of its numbers.
#[inline(always)]
pub(super) fn unit_and_sum(x: &[f32], digits: usize) -> (f32, f32) {
    let bits = x.iter().fold(0, |largest, x| largest.max(x.to_bits() & 0x7FFF_FFFF));
    let mut sums = [0f32; 8];
    for eight in x.as_chunks::<8>().0 {
        for lane in 0..8 {
            sums[lane] += eight[lane];
        }
    }
    (unit_of_limbs(f32::from_bits(bits), digits), sums.iter().sum())
}
