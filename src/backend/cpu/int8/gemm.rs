//! Several rows of x times integer codes: what the kernels for vectors and for tiles share.
//!
//! Sixteen rows of the weight are unpacked once into a panel ([`Panels`]), one row to a lane, and multiplied with all
//! rows of x, which are fixed-point numbers ([`XTiles`]). Products of a whole group are summed up in integers, exactly, before
//! the sum is scaled: for each group and digit one conversion, where the kernel of one row has one for every eight codes.
//!
//! Every output is computed by itself, in the order of K: it does not depend on the rows of the weight or of x beside it, nor
//! on the kernel.

use super::super::aligned::Aligned;
use super::super::fast_kernel::{Digits, FastKernel, NotRepresentable, PreparedMany, PreparedX, RowKernel};
use super::super::group_params::GroupParams;
use super::super::matrix::PackedMatrix;
use super::super::output::in_parts_of;
use super::super::tasks::Threads;
use super::codes::IntegerCodes;
use super::panel_columns::Columns;
use super::weight_panels::{Panel, PanelParams, Panels, DEPTH, LANES};
use super::x_tiles::{Layout, Tile, XTiles};
use crate::QuantFormat;
use std::ops::Range;

/// What multiplies panels with tiles of x, and the proof that the CPU has its instructions.
pub(in super::super) trait Multiplier: Copy + Send + Sync + 'static {
    /// What fills its panels and tiles.
    type Panels: Panels;

    /// How it reads rows of x.
    const LAYOUT: Layout;

    /// The most rows of a tile, for one, two and three digits.
    const LARGEST_TILE: [usize; 3];

    /// The rows that smaller ones may have, ascending.
    const SMALLER_TILES: &'static [usize];

    /// Whether all tiles of some rows of x have the same size, which is smaller where there are fewer rows.
    const ALL_OF_ONE_SIZE: bool = false;

    /// Panels that it multiplies together.
    const TOGETHER: usize;

    /// The smallest groups with which it takes less time than f32.
    const LEAST_GROUP: usize;

    /// What a thread holds while it multiplies.
    type InUse;

    /// The proof that the CPU has what else is used here.
    fn panels(self) -> Self::Panels;

    /// Whether it has room for products of these integers.
    fn has_room(_codes: &IntegerCodes) -> bool {
        true
    }

    /// Gets ready for tiles of `size` rows and groups of `group_size`.
    ///
    /// # Safety
    /// The thread holds nothing else of this kind.
    unsafe fn begin(self, size: usize, group_size: usize) -> Self::InUse;

    /// Adds the products of all panels with all tiles to their sums.
    ///
    /// # Safety
    /// The CPU has the features that a value proves; [`Self::begin`] has got ready for these tiles and groups.
    unsafe fn add<const DIGITS: usize>(chunk: Chunk, tiles: &[Tile], sums: &mut Sums);
}

/// Some elements along K of one or more panels.
#[derive(Clone, Copy)]
pub(in super::super) struct Chunk<'a> {
    /// [`DEPTH`] elements of each panel.
    pub(super) codes: &'a Panel,
    /// Of each panel.
    pub(super) params: &'a [PanelParams],
    /// The first, and how many: whole groups.
    pub(super) elements: (usize, usize),
    pub(super) group_size: usize,
    #[cfg_attr(target_arch = "aarch64", allow(dead_code))]
    pub(super) of: &'a IntegerCodes,
}

/// A panel and a tile of `M` rows, of which some elements along K are multiplied by vectors.
#[derive(Clone, Copy)]
pub(super) struct Task<'a> {
    pub(super) codes: &'a Panel,
    pub(super) params: &'a PanelParams,
    pub(super) tile: &'a Tile,
    /// The first, and how many: whole groups.
    pub(super) elements: (usize, usize),
    pub(super) group_size: usize,
}

impl Task<'_> {
    /// The groups, for each of which the panel has codes, scales, and biases if it has any, and the tile words, units and sums.
    ///
    /// # Panics
    /// If one of these is missing.
    #[inline(always)]
    pub(super) fn groups<const DIGITS: usize, const M: usize>(&self) -> Range<usize> {
        let Self { codes, params, tile, elements: (first, count), group_size } = self;
        let (groups, vectors) = (first / group_size..(first + count) / group_size, count / 4);
        assert!(codes.len() >= vectors && tile.size == M);
        assert!(tile.words.len() >= (first / 4 + vectors) * M * DIGITS);
        assert!(tile.units.len() >= groups.end * M && tile.sums.len() >= groups.end * M);
        assert!(params.scales.len() >= groups.end);
        assert!(params.biases.is_empty() || params.biases.len() >= groups.end);
        groups
    }
}

/// The kernel.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Int8Gemm<M> {
    multiplier: M,
}

impl<M: Multiplier> Int8Gemm<M> {
    pub(in super::super) fn new(multiplier: M) -> Self {
        Self { multiplier }
    }

    /// The codes of a format that is multiplied.
    fn codes_of(format: QuantFormat) -> Option<IntegerCodes> {
        let codes = IntegerCodes::of(format).filter(|_| format.group_size() >= M::LEAST_GROUP);
        codes.filter(M::has_room)
    }

    fn prepared(
        &self,
        format: QuantFormat,
        (x, k): (&[f32], usize),
        digits: Digits,
        threads: Threads,
    ) -> Result<Prepared<M>, NotRepresentable> {
        let codes = Self::codes_of(format).ok_or(NotRepresentable)?;
        let x = XTiles::new(self.multiplier, (&codes, format), (x, k), digits, threads)?;
        Ok(Prepared { multiplier: self.multiplier, codes, x })
    }
}

impl<M: Multiplier> RowKernel for Int8Gemm<M> {
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
        Ok(Box::new(self.prepared(format, (x, k), digits, Threads::This)?))
    }
}

impl<M: Multiplier> FastKernel for Int8Gemm<M> {
    fn supports(&self, format: QuantFormat) -> bool {
        Self::codes_of(format).is_some()
    }

    fn prepare(
        &self,
        format: QuantFormat,
        k: usize,
        x: &[f32],
        digits: Digits,
    ) -> Result<Box<dyn PreparedMany>, NotRepresentable> {
        Ok(Box::new(self.prepared(format, (x, k), digits, Threads::All)?))
    }
}

/// Rows of the weight, and of x, that a task takes at most: panels of the first stay in the second-level cache.
const ROWS_OF_TASK: usize = 4 * LANES;
const X_OF_TASK: usize = 48 * 12;

/// The most rows of x with which the weight is read row by row.
const MAX_STREAMED: usize = 31;

/// Rows of x as fixed-point numbers for these codes.
struct Prepared<M> {
    multiplier: M,
    codes: IntegerCodes,
    x: XTiles,
}

impl<M: Multiplier> PreparedMany for Prepared<M> {
    fn matmul(&self, matrix: &PackedMatrix, out: &mut [f32]) -> Result<(), NotRepresentable> {
        let m = self.x.m;
        assert_eq!(out.len(), m * matrix.rows, "an output has M * N numbers");
        // A weight of few rows is unpacked several times, so that every thread has something to do.
        let tasks = 4 * rayon::current_num_threads();
        let rows = (matrix.rows / tasks).next_multiple_of(LANES).clamp(LANES, ROWS_OF_TASK);
        let bands = m.div_ceil(X_OF_TASK).max(tasks.div_ceil(matrix.rows.div_ceil(rows)));
        // Every size of tiles divides it.
        let part_m = m.div_ceil(bands).next_multiple_of(48);
        in_parts_of(out, matrix.rows, (part_m, rows), |mut part| {
            let first_row = part.first_row;
            let (rows, first_x, count) = (part.rows(), part.first_x, part.slots.len());
            let tiles = self.tiles(first_x, count);
            self.multiply(matrix, (first_row, rows), tiles, |sums, first| {
                for (row, slots) in part.slots.iter_mut().enumerate() {
                    sums.copy_row(row, slots.get_mut(first..).unwrap_or_default());
                }
            });
        });
        Ok(())
    }
}

impl<M: Multiplier> PreparedX for Prepared<M> {
    fn m(&self) -> usize {
        self.x.m
    }

    fn rows(&self, matrix: &PackedMatrix, first_row: usize, out: &mut [f32]) {
        let m = self.x.m;
        let rows = out.len() / m.max(1);
        self.multiply(matrix, (first_row, rows), &self.x.tiles, |sums, first| {
            for (row, out) in out.chunks_exact_mut(m).skip(first).enumerate() {
                sums.copy_column(row, out);
            }
        });
    }
}

impl<M: Multiplier> Prepared<M> {
    /// The tiles of some rows of x.
    fn tiles(&self, first: usize, count: usize) -> &[Tile] {
        let tiles = &self.x.tiles;
        let start = tiles.partition_point(|tile| tile.first < first);
        let end = tiles.partition_point(|tile| tile.first < first + count);
        tiles.get(start..end).unwrap_or_default()
    }

    /// Multiplies rows of the weight with the rows of tiles. `each` gets the sums of some rows of the weight at a
    /// time, and the first of these, counted from the first of all.
    fn multiply(
        &self,
        matrix: &PackedMatrix,
        rows: (usize, usize),
        tiles: &[Tile],
        each: impl FnMut(&Sums, usize),
    ) {
        match self.x.digits {
            1 => self.multiply_codes::<1>(matrix, rows, tiles, each),
            2 => self.multiply_codes::<2>(matrix, rows, tiles, each),
            _ => self.multiply_codes::<3>(matrix, rows, tiles, each),
        }
    }

    /// See [`Self::multiply`].
    fn multiply_codes<const DIGITS: usize>(
        &self,
        matrix: &PackedMatrix,
        (first_row, rows): (usize, usize),
        tiles: &[Tile],
        mut each: impl FnMut(&Sums, usize),
    ) {
        let (has_biases, group_size) = (self.codes.has_biases(), matrix.format.group_size());
        let panels = rows.div_ceil(LANES);
        let (Some(first_tile), Some(last_tile)) = (tiles.first(), tiles.last()) else { return };
        let first_x = first_tile.first;
        let count: usize = tiles.iter().map(|tile| tile.rows).sum();
        let lanes_of = |panel: usize| (first_row + panel * LANES, (rows - panel * LANES).min(LANES));
        let mut params: Vec<PanelParams> = Vec::new();
        let mut of_rows = GroupParams::new(matrix);
        // Few rows of x take few panels at a time, so that rows of the weight are read from their beginning to their end.
        let together = if count <= MAX_STREAMED { M::TOGETHER } else { ROWS_OF_TASK / LANES };
        for panel in 0..panels.min(together) {
            let mut of_panel = PanelParams::new(matrix, has_biases);
            // SAFETY: `multiplier` proves that the CPU has the features.
            unsafe { M::Panels::load(&mut of_panel, matrix, &self.codes, lanes_of(panel), &mut of_rows) };
            params.push(of_panel);
        }
        let mut codes = Aligned::<u8>::new(params.len() * DEPTH * LANES);
        let of = &self.codes;
        let columns = Columns { format: matrix.format, codes: of, layout: M::LAYOUT };
        // Tiles may have rows of zeros at their ends, whose sums the next tile takes.
        let stride = count + last_tile.size;
        let of_panels = vec![[0f32; LANES]; params.len() * stride];
        let mut sums = Sums { first_x, stride, of_panels };
        // SAFETY: this thread multiplies nothing else meanwhile; all tiles of several rows have the same size.
        let _in_use = unsafe { self.multiplier.begin(last_tile.size, group_size) };
        for first_panel in (0..panels).step_by(params.len().max(1)) {
            let some = (panels - first_panel).min(params.len());
            if first_panel > 0 {
                for (panel, params) in params.iter_mut().take(some).enumerate() {
                    // SAFETY: as above.
                    unsafe {
                        M::Panels::load(params, matrix, of, lanes_of(first_panel + panel), &mut of_rows)
                    };
                }
                sums.of_panels.fill([0.; LANES]);
            }
            for first in (0..matrix.k).step_by(DEPTH) {
                let codes = &mut codes.as_chunks_mut::<64>().0[..some * (DEPTH / 4)];
                for (panel, codes) in codes.chunks_exact_mut(DEPTH / 4).enumerate() {
                    let rows = lanes_of(first_panel + panel);
                    // SAFETY: as above; the weight has the panel's rows.
                    unsafe { M::Panels::unpack((of, M::LAYOUT), matrix, rows, first, codes) };
                }
                let elements = (first, (matrix.k - first).min(DEPTH));
                let chunk = Chunk { codes, params: &params[..some], elements, group_size, of };
                let outliers = self.x.outliers.in_columns(elements.0..elements.0 + elements.1);
                // SAFETY: as above; `begin` has been called for tiles of this size and these groups.
                unsafe {
                    M::add::<DIGITS>(chunk, tiles, &mut sums);
                    let outliers = (outliers, first_x..first_x + count);
                    M::Panels::add_outliers(columns, chunk, outliers, &mut sums);
                }
            }
            each(&sums, first_panel * LANES);
        }
    }
}

/// Sums of some panels for some rows of x.
pub(in super::super) struct Sums {
    first_x: usize,
    /// Rows of x, and one tile more.
    stride: usize,
    /// `[panel][stride]`.
    of_panels: Vec<[f32; LANES]>,
}

impl Sums {
    /// Those of a panel, from a row of x on.
    #[inline(always)]
    pub(super) fn rows_from(&mut self, panel: usize, row: usize) -> &mut [[f32; LANES]] {
        let (first, end) = (panel * self.stride + row - self.first_x, (panel + 1) * self.stride);
        &mut self.of_panels[first..end]
    }

    /// Where those of some panels begin, for `rows` rows of x from `row` on.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(super) fn rows_of_panels<const PANELS: usize>(
        &mut self,
        first_panel: usize,
        (row, rows): (usize, usize),
    ) -> [*mut [f32; LANES]; PANELS] {
        let (first, last) = (first_panel * self.stride + row - self.first_x, (PANELS - 1) * self.stride);
        let all = self.of_panels[first..][..last + rows].as_mut_ptr();
        std::array::from_fn(|panel| all.wrapping_add(panel * self.stride))
    }

    /// Copies what belongs to a row of x, counted from the first, into slots, one for each row of the weight.
    fn copy_row(&self, row: usize, slots: &mut [f32]) {
        let (whole, rest) = slots.as_chunks_mut::<LANES>();
        let mut at = row;
        for slots in whole {
            let Some(sums) = self.of_panels.get(at) else { return };
            *slots = *sums;
            at += self.stride;
        }
        if let Some(sums) = self.of_panels.get(at) {
            rest.iter_mut().zip(sums).for_each(|(slot, sum)| *slot = *sum);
        }
    }

    /// Copies what belongs to a row of the weight into slots, one for each row of x, if there is such a row.
    fn copy_column(&self, row: usize, slots: &mut [f32]) {
        let sums = self.of_panels.iter().skip(row / LANES * self.stride);
        slots.iter_mut().zip(sums).for_each(|(slot, sums)| *slot = sums[row % LANES]);
    }
}
