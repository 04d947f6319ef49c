//! A few rows of x times integer codes, on AMX: sixteen rows of the weight are the rows of a matrix tile, as they lie in memory,
//! and digits of rows of x the columns of another.
//!
//! Nothing is transposed, as panels are, and whatever has up to sixteen columns is multiplied in the same time: five rows of x in three
//! digits, or sixteen in one. While a *strip* of the weight is multiplied, the next one is unpacked, row by row, and the one two behind
//! that fetched. Sums of a group are scaled while the next one is multiplied.

#![allow(clippy::needless_range_loop)] // Iterators are calls in functions that have more instructions than theirs.

mod outliers;
mod strips;

use super::super::aligned::Aligned;
use super::super::fast_kernel::{Digits, NotRepresentable, PreparedX, RowKernel};
use super::super::group_params::GroupParams;
use super::super::isa::amx_tile::{self, Amx, Line, Tiles, LEFT, RIGHT, ROWS};
use super::super::isa::avx512::Avx512Vnni;
use super::super::matrix::PackedMatrix;
use super::super::row_gemv::Fetch;
use super::super::tasks::Threads;
use super::codes::{IntegerCodes, Kind};
use super::outliers::{Outlier, Outliers};
use super::tables::{with_codes, AFFINE};
use super::units::LIMB_BITS;
use super::weight_panels::{PanelParams, Panels};
use super::x_tiles::{Layout, Tile, XTiles, CHUNK, COLUMNS};
use crate::QuantFormat;
use outliers::add_outliers;
use std::arch::x86_64::*;
use std::ops::Range;
use strips::{order, unpack_row, Ahead, Rows, Strip, BLOCK, LINES, STRIP};

/// Words of a matrix tile.
const OF_TILE: usize = ROWS * COLUMNS;

/// The kernel, and the proof that the CPU has its instructions.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Int8FewAmx {
    isa: Amx,
}

impl Int8FewAmx {
    pub(in super::super) fn new(isa: Amx) -> Self {
        Self { isa }
    }

    /// The codes of a format that is multiplied: blocks of them are two vectors, groups half as deep as a matrix tile or deeper. MXFP4 is
    /// left to tiles of bf16, whatever the rows of x: experts have few of them or many.
    fn codes_of(format: QuantFormat) -> Option<IntegerCodes> {
        let codes = IntegerCodes::of(format).filter(|_| matches!(format.group_size(), 32 | 64 | 128));
        codes.filter(|codes| codes.block() == BLOCK && !matches!(codes.kind, Kind::Mxfp4))
    }
}

impl RowKernel for Int8FewAmx {
    fn supports(&self, format: QuantFormat) -> bool {
        Self::codes_of(format).is_some()
    }

    fn prepare(
        &self,
        format: QuantFormat,
        k: usize,
        x: &[f32],
        digits: Digits,
    ) -> Result<Box<dyn PreparedX>, NotRepresentable> {
        let codes = Self::codes_of(format).ok_or(NotRepresentable)?;
        let m = x.len() / k;
        let (order, extents) = (order(&codes), vec![(0, m, m)]);
        let layout = (Layout::Columns, &order, extents);
        let x = XTiles::of(self.isa.vnni, (&codes, format), (x, k), (digits, Threads::This), layout)?;
        let XTiles { digits, mut tiles, outliers, .. } = x;
        let x = tiles.pop().ok_or(NotRepresentable)?;
        Ok(Box::new(Prepared::new(self.isa, codes, (x, digits, outliers))))
    }
}

/// Rows of x as columns of matrix tiles.
struct Prepared {
    isa: Amx,
    codes: IntegerCodes,
    digits: usize,
    x: Tile,
    outliers: Outliers,
    /// Rows of x that have some.
    with_outliers: Vec<usize>,
    /// Matrix tiles for all columns.
    tiles: usize,
    /// `[group][column]`: the unit of a digit.
    units: Aligned<f32>,
    /// `[group][column]`: for the highest digits, sums of the numbers; else zero.
    sums: Aligned<f32>,
}

impl Prepared {
    fn new(isa: Amx, codes: IntegerCodes, (x, digits, outliers): (Tile, usize, Outliers)) -> Self {
        let (m, tiles) = (x.size, (x.size * digits).div_ceil(COLUMNS));
        let groups = x.units.len() / m.max(1);
        let columns = tiles * COLUMNS;
        let (mut units, mut sums) = (Aligned::new(groups * columns), Aligned::new(groups * columns));
        for group in 0..groups {
            for row in 0..m {
                let (unit, sum) = (x.units[group * m + row], x.sums[group * m + row]);
                for digit in 0..digits {
                    let power = 1u32 << ((digits - 1 - digit) as u32 * LIMB_BITS);
                    units[group * columns + x.column(row, digit)] = unit * power as f32;
                }
                sums[group * columns + x.column(row, 0)] = sum;
            }
        }
        let mut with_outliers: Vec<usize> = outliers.all().iter().map(Outlier::row).collect();
        with_outliers.sort_unstable();
        with_outliers.dedup();
        Self { isa, codes, digits, x, outliers, with_outliers, tiles, units, sums }
    }
}

impl PreparedX for Prepared {
    fn m(&self) -> usize {
        self.x.size
    }

    fn rows(&self, matrix: &PackedMatrix, first_row: usize, out: &mut [f32]) {
        if out.is_empty() {
            return;
        }
        // SAFETY: `isa` proves that the CPU has the features; codes have the width and the kind that they say.
        unsafe { with_codes!(self.codes.kind, multiply(self, matrix, first_row, out)) }
    }
}

/// Multiplies rows of the weight with all rows of x; see [`PreparedX::rows`].
///
/// # Safety
/// The CPU has the features, the codes `BITS` bits and this kind.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx2,fma,gfni,f16c")]
unsafe fn multiply<const BITS: usize, const KIND: u8>(
    prepared: &Prepared,
    matrix: &PackedMatrix,
    first_row: usize,
    out: &mut [f32],
) {
    let Prepared { isa, codes, x, tiles, .. } = prepared;
    let (m, group_size, strips) = (x.size, matrix.format.group_size(), matrix.k.div_ceil(STRIP));
    let (words, count) = matrix.rows_words(first_row, out.len() / m.max(1));
    assert!(count * m == out.len() && words.len() * 32 == count * matrix.k * BITS, "rows of the weight");
    let (row_bytes, center) = (matrix.k * BITS / 8, codes.center as i8);
    let rows = Rows { first: words.as_ptr().cast(), count, row_bytes, center };
    let mut unpacked = [(); 2].map(|()| vec![Line::ZERO; LINES]);
    let mut counts = [[Line::ZERO; ROWS]; 2];
    let (mut sums, mut columns) = (Aligned::<f32>::new(tiles * OF_TILE), vec![0.; tiles * COLUMNS]);
    let mut params = PanelParams::new(matrix, codes.has_biases());
    let groups = matrix.groups_per_row();
    assert!(groups * group_size == matrix.k && params.scales.len() == groups, "scales of the weight");
    assert!(x.words.len() >= matrix.k.div_ceil(CHUNK) * tiles * OF_TILE, "words of x");
    assert!(prepared.units.len().min(prepared.sums.len()) >= groups * tiles * COLUMNS, "units of x");
    let mut of_rows = GroupParams::new(matrix);
    let mut strip = Strip { panel: 0, index: 0 };
    // SAFETY: this thread multiplies nothing else meanwhile, and has the features; the weight has the rows, and `unpacked` room for a
    // strip each. Groups are those of the weight, as are those that `prepared` has.
    unsafe {
        let _in_use = Tiles::configure(*isa, ROWS, group_size.min(CHUNK));
        for row in 0..ROWS {
            unpack_row::<BITS, KIND>(rows, (strip, strip.next(strips)), row, &mut unpacked[0]);
        }
        for (panel, out) in out.chunks_mut(ROWS * m).enumerate() {
            let first_row = first_row + panel * ROWS;
            Avx512Vnni::load(&mut params, matrix, codes, (first_row, out.len() / m), &mut of_rows);
            fetch_params(matrix, first_row + ROWS);
            sums.fill(0.);
            for index in 0..strips {
                let groups = index * STRIP / group_size..((index + 1) * STRIP).min(matrix.k) / group_size;
                let (at_once, next) = (ROWS.div_ceil(groups.len()), strip.next(strips));
                let [now, then] = &mut unpacked;
                for (tile, sums) in sums.chunks_exact_mut(OF_TILE).enumerate() {
                    let has_rows = tile == 0 && next.panel * ROWS < count;
                    let mut ahead = Ahead {
                        rows,
                        strips: (next, next.next(strips).next(strips)),
                        at_once: if has_rows { at_once } else { 0 },
                        done: 0,
                        to: then,
                    };
                    let strip = OfStrip { prepared, params: &params, unpacked: now, group_size, tile };
                    if KIND == AFFINE && tile * COLUMNS < m {
                        strip.multiply::<BITS, KIND, true>(groups.clone(), &mut ahead, (&mut counts, sums));
                    } else {
                        strip.multiply::<BITS, KIND, false>(groups.clone(), &mut ahead, (&mut counts, sums));
                    }
                }
                unpacked.swap(0, 1);
                strip = next;
            }
            write(&sums, (m, prepared.digits), &mut columns, out);
            if !prepared.with_outliers.is_empty() {
                let panel = Strip { panel, index: 0 };
                add_outliers::<BITS, KIND>(prepared, matrix.format, (rows, panel), &params, out);
            }
        }
    }
}

/// A strip, unpacked, and the columns that are multiplied with it.
#[derive(Clone, Copy)]
struct OfStrip<'a> {
    prepared: &'a Prepared,
    params: &'a PanelParams,
    unpacked: &'a [Line],
    group_size: usize,
    /// Of columns.
    tile: usize,
}

impl OfStrip<'_> {
    /// Adds the products of groups to sums.
    ///
    /// # Safety
    /// As [`multiply`]; the strip has the groups, and tiles are configured for them.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx2,fma,gfni,f16c")]
    unsafe fn multiply<const BITS: usize, const KIND: u8, const BIASES: bool>(
        self,
        groups: Range<usize>,
        ahead: &mut Ahead,
        (counts, sums): (&mut [[Line; ROWS]; 2], &mut [f32]),
    ) {
        assert!(sums.len() == OF_TILE);
        let mut totals = [_mm512_setzero_ps(); ROWS];
        for row in 0..ROWS {
            // SAFETY: the assertion: there are the numbers of a vector for each row, and so below.
            totals[row] = unsafe { _mm512_loadu_ps(sums.as_ptr().add(row * COLUMNS)) };
        }
        let (first, last) = (groups.start, groups.end);
        for group in groups {
            // SAFETY: as the caller vouches.
            unsafe {
                self.count(group);
                ahead.unpack::<BITS, KIND>();
                if group > first {
                    totals = self.scale::<BIASES>(group - 1, &counts[(group - 1) % 2], totals);
                }
                amx_tile::store::<0>(counts[group % 2].as_mut_ptr());
            }
        }
        // SAFETY: as above.
        totals = unsafe { self.scale::<BIASES>(last - 1, &counts[(last - 1) % 2], totals) };
        for row in 0..ROWS {
            // SAFETY: as above.
            unsafe { _mm512_storeu_ps(sums.as_mut_ptr().add(row * COLUMNS), totals[row]) };
        }
    }

    /// Multiplies a group, in tile 0.
    ///
    /// # Safety
    /// As [`Self::multiply`].
    #[inline(always)]
    unsafe fn count(self, group: usize) {
        let (tiles, element) = (self.prepared.tiles, group * self.group_size);
        // SAFETY: as the caller vouches: the strip and the tile of x have the elements.
        unsafe {
            amx_tile::zero::<0>();
            for element in (element..element + self.group_size).step_by(CHUNK) {
                let (chunk, within) = (element / CHUNK, element % CHUNK);
                let lines = &self.unpacked[chunk % (STRIP / CHUNK) * ROWS..][..ROWS];
                let left = amx_tile::bytes(lines).add(within);
                let words = (chunk * tiles + self.tile) * OF_TILE + within / 4 * COLUMNS;
                let right = self.prepared.x.words.as_ptr().add(words).cast();
                amx_tile::load::<LEFT>(left, 64);
                amx_tile::load::<{ RIGHT[0] }>(right, 64);
                amx_tile::multiply_int8::<0, LEFT, { RIGHT[0] }>();
            }
        }
    }

    /// Adds what was counted of a group.
    ///
    /// # Safety
    /// As [`Self::multiply`].
    #[inline(always)]
    unsafe fn scale<const BIASES: bool>(
        self,
        group: usize,
        counts: &[Line; ROWS],
        mut totals: [__m512; ROWS],
    ) -> [__m512; ROWS] {
        let columns = (group * self.prepared.tiles + self.tile) * COLUMNS;
        // SAFETY: `x` and the weight have the group; lines are aligned vectors.
        unsafe {
            let units = _mm512_loadu_ps(self.prepared.units.as_ptr().add(columns));
            let scales = &*self.params.scales.as_ptr().add(group);
            for row in 0..ROWS {
                let count = _mm512_cvtepi32_ps(_mm512_load_si512(counts.as_ptr().add(row).cast()));
                // Units first: scales may have any exponent that f32 has.
                let product = _mm512_mul_ps(count, units);
                totals[row] = _mm512_fmadd_ps(product, _mm512_set1_ps(scales[row]), totals[row]);
            }
            if BIASES {
                let sums = _mm512_loadu_ps(self.prepared.sums.as_ptr().add(columns));
                let biases = &*self.params.biases.as_ptr().add(group);
                for row in 0..ROWS {
                    totals[row] = _mm512_fmadd_ps(_mm512_set1_ps(biases[row]), sums, totals[row]);
                }
            }
        }
        totals
    }
}

/// Begins to fetch scales and biases of the rows of a panel.
#[inline(always)]
fn fetch_params(matrix: &PackedMatrix, first_row: usize) {
    for (first, bytes) in matrix.scales_from(first_row) {
        Fetch::best().bytes(first, ROWS * bytes);
    }
}

/// Adds up the digits of each row of x, the smallest first: `out` is `[rows, m]`. `columns` is room for those of a row.
#[inline]
#[target_feature(enable = "avx512f")]
fn write(sums: &[f32], (m, digits): (usize, usize), columns: &mut [f32], out: &mut [f32]) {
    assert!(columns.len() >= m * digits && sums.len() == columns.len() * ROWS && out.len() <= ROWS * m);
    for row in 0..out.len() / m {
        // SAFETY: the assertion: each tile has a vector for the row, for which there is room; masks keep to the rows of x.
        unsafe {
            for first in (0..columns.len()).step_by(COLUMNS) {
                let of_tile = _mm512_loadu_ps(sums.as_ptr().add(first * ROWS + row * COLUMNS));
                _mm512_storeu_ps(columns.as_mut_ptr().add(first), of_tile);
            }
            for first in (0..m).step_by(COLUMNS) {
                let mask = u16::MAX >> (COLUMNS - (m - first).min(COLUMNS));
                let mut total = _mm512_setzero_ps();
                for digit in (0..digits).rev() {
                    let of_digit = columns.as_ptr().add(digit * m + first);
                    total = _mm512_add_ps(total, _mm512_maskz_loadu_ps(mask, of_digit));
                }
                _mm512_mask_storeu_ps(out.as_mut_ptr().add(row * m + first), mask, total);
            }
        }
    }
}
