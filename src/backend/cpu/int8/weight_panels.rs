//! Sixteen packed rows as a *panel*: vectors in which lane r has four codes of row r, as bytes.
//!
//! Rows are transposed four bytes at a time, packed where codes are 1, 2, 4 or 8 bits wide, else unpacked.

use super::super::group_params::{GroupParams, ROWS_PER_PASS};
use super::super::matrix::PackedMatrix;
use super::codes::IntegerCodes;
use super::gemm::{Chunk, Sums};
use super::magnitudes::Magnitudes;
use super::outliers::Outlier;
use super::panel_columns::Columns;
use super::x_tiles::{Layout, Tile};
use crate::format::SUPER_BLOCK;
use std::ops::Range;

/// Rows of a panel, one to a lane.
pub(super) const LANES: usize = ROWS_PER_PASS;

/// Elements along K of a panel: a multiple of all groups and of what is unpacked at a time.
pub(super) const DEPTH: usize = 512;

/// Whether codes of this width are transposed packed: some of them fill four bytes.
pub(super) const fn transposed_packed(bits: usize) -> bool {
    matches!(bits, 1 | 2 | 4 | 8)
}

/// The element, counted from the first of a panel, in a byte of a vector of the panel.
pub(super) const fn element(bits: usize, vector: usize, byte: usize) -> usize {
    if transposed_packed(bits) {
        let vectors = 8 / bits;
        vector / vectors * 4 * vectors + byte * vectors + vector % vectors
    } else {
        4 * vector + byte
    }
}

/// The vector and the byte of each lane in which an element is: the inverse of [`element`].
pub(super) const fn place(bits: usize, element: usize) -> (usize, usize) {
    if transposed_packed(bits) {
        let vectors = 8 / bits;
        let within = element % (4 * vectors);
        (element / (4 * vectors) * vectors + within % vectors, within / vectors)
    } else {
        (element / 4, element % 4)
    }
}

/// Codes of a panel, four elements to a vector.
pub(super) type Panel = [[u8; 64]];

/// Scales and biases of a panel's rows, a vector of sixteen rows for each group.
pub(in super::super) struct PanelParams {
    /// Times the unit of the codes.
    pub(super) scales: Vec<[f32; LANES]>,
    /// Of codes less their center: `q * s + b = (q - center) * s + (b + center * s)`. None where the format has none.
    pub(super) biases: Vec<[f32; LANES]>,
    /// Of codes as they are.
    pub(super) stored_biases: Vec<[f32; LANES]>,
    /// Room for what those of super-blocks count, twice.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub(super) units: Vec<f32>,
}

impl PanelParams {
    pub(super) fn new(matrix: &PackedMatrix, has_biases: bool) -> Self {
        let groups = matrix.groups_per_row();
        let zeros = |any: bool| vec![[0.; LANES]; if any { groups } else { 0 }];
        let blocks = matrix.super_blocks.map_or(0, |_| matrix.k / SUPER_BLOCK);
        Self {
            scales: zeros(true),
            biases: zeros(has_biases),
            stored_biases: zeros(has_biases),
            units: vec![0.; 2 * LANES * blocks],
        }
    }

    /// Takes over scales and biases of sixteen rows. Inlined with the instructions that the caller may use.
    #[inline(always)]
    pub(super) fn fill(&mut self, codes: &IntegerCodes, of_rows: &GroupParams) {
        let center = codes.center as f32;
        for row in 0..LANES {
            let (scales, biases) = of_rows.row(row);
            for (to, scale) in self.scales.iter_mut().zip(scales) {
                to[row] = scale * codes.unit;
            }
            let to = self.biases.iter_mut().zip(&mut self.stored_biases).zip(&self.scales);
            for (((centered, stored), scales), bias) in to.zip(biases) {
                centered[row] = scales[row].mul_add(center, *bias);
                stored[row] = *bias;
            }
        }
    }
}

/// What fills panels and tiles of x, and the proof that the CPU has its instructions.
pub(in super::super) trait Panels: Copy + Send + Sync + 'static {
    /// What finds outliers.
    fn magnitudes(self) -> impl Magnitudes;

    /// Reads scales and biases of up to sixteen rows, for codes that are integers as `codes` says; `of_rows` is room for them.
    ///
    /// # Safety
    /// The CPU has the features that a value proves, here and below.
    unsafe fn load(
        params: &mut PanelParams,
        matrix: &PackedMatrix,
        codes: &IntegerCodes,
        rows: (usize, usize),
        of_rows: &mut GroupParams,
    );

    /// Unpacks [`DEPTH`] elements of up to sixteen rows, from element `first` of each on, or as many as there are; zeros follow
    /// them to the end of what is unpacked at a time. Where there are fewer rows, the last one is taken again. For
    /// layouts other than [`Layout::Words`], which multiply signed bytes, codes are less their center, and some of their vectors lie
    /// [interleaved](Layout::interleaved).
    ///
    /// # Safety
    /// The matrix has `rows` rows, at least one, from `first_row` on. `panel` has the vectors of [`DEPTH`] elements.
    unsafe fn unpack(
        of: (&IntegerCodes, Layout),
        matrix: &PackedMatrix,
        rows: (usize, usize),
        first: usize,
        panel: &mut Panel,
    );

    /// Adds the products of outliers, those in columns of the chunk and in some rows of x, to their sums.
    ///
    /// # Safety
    /// See [`Self::load`].
    unsafe fn add_outliers(
        columns: Columns,
        chunk: Chunk,
        outliers: (&[Outlier], Range<usize>),
        sums: &mut Sums,
    );

    /// Fills in a group of a tile's row: a multiple of 16 numbers up to 128.
    ///
    /// # Safety
    /// See [`Self::load`].
    unsafe fn fill<const DIGITS: usize>(
        tile: &mut Tile,
        group_and_row: (usize, usize),
        x: &[f32],
        center: i32,
        order: (&[u8; 64], Layout),
    );
}

/// Where the codes of up to sixteen rows begin, from element `first` of each on, the last row again where there are fewer; and
/// how many bytes of each belong to a panel.
///
/// # Panics
/// If a row has other bytes than K codes of so many bits.
#[inline(always)]
pub(super) fn rows_of_panel(
    matrix: &PackedMatrix,
    (first_row, rows): (usize, usize),
    first: usize,
    bits: usize,
) -> ([*const u8; LANES], usize) {
    let (start, row_bytes) = (first * bits / 8, matrix.k * bits / 8);
    let from = std::array::from_fn(|row| {
        let words = matrix.row_words(first_row + row.min(rows - 1));
        assert_eq!(words.len() * 4, row_bytes, "bytes of a row");
        words.as_ptr().cast::<u8>().wrapping_add(start)
    });
    (from, (row_bytes - start).min(DEPTH * bits / 8))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_has_its_place() {
        for bits in [1, 2, 3, 4, 5, 6, 8] {
            let places: Vec<_> = (0..DEPTH).map(|element| place(bits, element)).collect();
            for (index, (vector, byte)) in places.iter().enumerate() {
                assert!(*vector < DEPTH / 4 && *byte < 4, "{bits} bits, element {index}");
                assert_eq!(element(bits, *vector, *byte), index, "{bits} bits");
            }
        }
    }
}
