//! Several rows of x times integer codes, with AVX-512 VNNI.
//!
//! Sixteen rows of the weight are unpacked once into a panel ([`unpack_rows`]), one row to a lane, and multiplied with all
//! rows of x, which are fixed-point numbers ([`XTiles`]). A lane sums up a whole group in integers, exactly, before the sum
//! is scaled: for each group and digit one conversion, where the kernel of one row has one for every eight codes.
//!
//! Every output is computed by itself, in the order of K: it does not depend on the rows of the weight or of x beside it.

#![allow(clippy::needless_range_loop)] // Loops of constant length over arrays that have to stay in registers.

use super::super::aligned::Aligned;
use super::super::fast_kernel::{Digits, FastKernel, NotRepresentable, PreparedX, RowKernel};
use super::super::isa::avx512::Avx512Vnni;
use super::super::matrix::PackedMatrix;
use super::super::output::in_parts;
use super::super::row_gemv::LANES;
use super::super::tasks::Threads;
use super::codes::{IntegerCodes, Kind};
use super::fixed_point::LIMB_BITS;
use super::unpack_vnni::{AFFINE, IQ1_M, IQ1_S, IQ2, IQ3_S, IQ3_XXS, IQ4, MXFP4};
use super::weight_panels::{unpack_rows, Panel, PanelParams, DEPTH};
use super::x_tiles::{Tile, XTiles};
use crate::format::{Bits, IqTable};
use crate::QuantFormat;
use std::arch::x86_64::*;

/// The kernel, and the proof that the CPU has its instructions.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Int8Gemm {
    isa: Avx512Vnni,
}

impl Int8Gemm {
    pub(in super::super) fn new(isa: Avx512Vnni) -> Self {
        Self { isa }
    }

    fn prepared(
        &self,
        format: QuantFormat,
        (x, k): (&[f32], usize),
        digits: Digits,
        threads: Threads,
    ) -> Result<Prepared, NotRepresentable> {
        let codes = IntegerCodes::of(format).ok_or(NotRepresentable)?;
        let x = XTiles::new(self.isa, (&codes, format.bits()), format.group_size(), (x, k), digits, threads)?;
        Ok(Prepared { codes, x })
    }
}

impl RowKernel for Int8Gemm {
    fn supports(&self, format: QuantFormat) -> bool {
        IntegerCodes::of(format).is_some()
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

/// Rows of the weight, and of x, that a task takes at most: panels of the first stay in the second-level cache.
const ROWS_OF_TASK: usize = 4 * LANES;
const X_OF_TASK: usize = 48 * 12;

/// The most rows of x with which the weight is read row by row.
const MAX_STREAMED: usize = 31;

impl FastKernel for Int8Gemm {
    fn supports(&self, format: QuantFormat) -> bool {
        IntegerCodes::of(format).is_some()
    }

    fn matmul(&self, matrix: &PackedMatrix, x: &[f32], digits: Digits) -> Result<Vec<f32>, NotRepresentable> {
        let prepared = self.prepared(matrix.format, (x, matrix.k), digits, Threads::All)?;
        let m = prepared.x.m;
        // A weight of few rows is unpacked several times, so that every thread has something to do.
        let tasks = 4 * rayon::current_num_threads();
        let rows = (matrix.rows / tasks).next_multiple_of(LANES).clamp(LANES, ROWS_OF_TASK);
        let bands = m.div_ceil(X_OF_TASK).max(tasks.div_ceil(matrix.rows.div_ceil(rows)));
        // Every size of tiles divides it.
        let part_m = m.div_ceil(bands).next_multiple_of(48);
        Ok(in_parts((m, matrix.rows), (part_m, rows), |mut part| {
            let first_row = part.first_row;
            let (rows, first_x, count) = (part.rows(), part.first_x, part.slots.len());
            let tiles = prepared.tiles(first_x, count);
            prepared.multiply(matrix, (first_row, rows), tiles, |panel, sums| {
                for (index, slots) in part.slots.iter_mut().enumerate() {
                    let slots = slots.iter_mut().skip(panel * LANES);
                    slots.zip(&sums[index]).for_each(|(slot, sum)| *slot = *sum);
                }
            });
        }))
    }
}

/// Rows of x as fixed-point numbers for these codes.
struct Prepared {
    codes: IntegerCodes,
    x: XTiles,
}

impl PreparedX for Prepared {
    fn m(&self) -> usize {
        self.x.m
    }

    fn rows(&self, matrix: &PackedMatrix, first_row: usize, out: &mut [f32]) {
        let m = self.x.m;
        let rows = out.len() / m.max(1);
        self.multiply(matrix, (first_row, rows), &self.x.tiles, |panel, sums| {
            let out = out.chunks_exact_mut(m).skip(panel * LANES).take(LANES);
            for (lane, out) in out.enumerate() {
                out.iter_mut().zip(sums).for_each(|(out, sum)| *out = sum[lane]);
            }
        });
    }
}

impl Prepared {
    /// The tiles of some rows of x.
    fn tiles(&self, first: usize, count: usize) -> &[Tile] {
        let tiles = &self.x.tiles;
        let start = tiles.partition_point(|tile| tile.first < first);
        let end = tiles.partition_point(|tile| tile.first < first + count);
        tiles.get(start..end).unwrap_or_default()
    }

    /// Multiplies rows of the weight with the rows of tiles. `each` gets, for each sixteen rows of the weight, their number
    /// and sums for each row of x.
    fn multiply(
        &self,
        matrix: &PackedMatrix,
        rows: (usize, usize),
        tiles: &[Tile],
        each: impl FnMut(usize, &[[f32; LANES]]),
    ) {
        // SAFETY: whoever made a `Prepared` had the proof that the CPU has the features of the functions.
        unsafe {
            match self.x.digits {
                1 => self.multiply_codes::<1>(matrix, rows, tiles, each),
                2 => self.multiply_codes::<2>(matrix, rows, tiles, each),
                _ => self.multiply_codes::<3>(matrix, rows, tiles, each),
            }
        }
    }

    /// See [`Self::multiply`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx2,fma,gfni,f16c")]
    fn multiply_codes<const DIGITS: usize>(
        &self,
        matrix: &PackedMatrix,
        (first_row, rows): (usize, usize),
        tiles: &[Tile],
        mut each: impl FnMut(usize, &[[f32; LANES]]),
    ) {
        let has_biases = self.codes.has_biases();
        let panels = rows.div_ceil(LANES);
        let first_x = tiles.first().map_or(0, |tile| tile.first);
        let count: usize = tiles.iter().map(|tile| tile.rows).sum();
        let lanes_of = |panel: usize| (first_row + panel * LANES, (rows - panel * LANES).min(LANES));
        let mut params: Vec<PanelParams> = Vec::new();
        // Few rows of x take one panel at a time, so that rows of the weight are read from their beginning to their end.
        let together = if count <= MAX_STREAMED { 1 } else { ROWS_OF_TASK / LANES };
        for panel in 0..panels.min(together) {
            let mut of_panel = PanelParams::new(matrix, has_biases);
            of_panel.load(matrix, &self.codes, lanes_of(panel));
            params.push(of_panel);
        }
        let mut codes = Aligned::<u8>::new(params.len() * DEPTH * LANES);
        // Tiles may have rows of zeros at their ends, which the next tile overwrites.
        let padding = tiles.last().map_or(0, |tile| tile.size);
        let stride = count + padding;
        let mut sums = vec![[0f32; LANES]; params.len() * stride];
        for first_panel in (0..panels).step_by(params.len().max(1)) {
            let some = (panels - first_panel).min(params.len());
            if first_panel > 0 {
                for (panel, params) in params.iter_mut().take(some).enumerate() {
                    params.load(matrix, &self.codes, lanes_of(first_panel + panel));
                }
                sums.fill([0.; LANES]);
            }
            for first in (0..matrix.k).step_by(DEPTH) {
                let codes = codes.as_chunks_mut::<64>().0;
                for (panel, codes) in codes.chunks_exact_mut(DEPTH / 4).take(some).enumerate() {
                    // SAFETY: the caller has enabled the features; the weight has the panel's rows.
                    unsafe { self.unpack(matrix, lanes_of(first_panel + panel), first, codes) };
                }
                let codes = &*codes;
                for tile in tiles {
                    for panel in 0..some {
                        let task = Task {
                            codes: &codes[panel * (DEPTH / 4)..][..DEPTH / 4],
                            params: &params[panel],
                            tile,
                            elements: (first, (matrix.k - first).min(DEPTH)),
                            group_size: matrix.format.group_size(),
                        };
                        let sums = &mut sums[panel * stride + tile.first - first_x..][..tile.size];
                        match tile.size {
                            1 => add_tile::<DIGITS, 1>(task, sums),
                            2 => add_tile::<DIGITS, 2>(task, sums),
                            4 => add_tile::<DIGITS, 4>(task, sums),
                            8 => add_tile::<DIGITS, 8>(task, sums),
                            12 if DIGITS < 3 => add_tile::<DIGITS, 12>(task, sums),
                            16 if DIGITS < 2 => add_tile::<DIGITS, 16>(task, sums),
                            other => panic!("{other} rows are no tile of {DIGITS} digits"),
                        }
                    }
                }
            }
            for (panel, sums) in sums.chunks_exact_mut(stride).take(some).enumerate() {
                let sums = &mut sums[..count];
                let rows = (lanes_of(first_panel + panel), first_x..first_x + count);
                self.x.outliers.for_each_column::<LANES>(matrix, rows.0, rows.1, |index, x, weights| {
                    let sums = sums[index - first_x].iter_mut().zip(weights);
                    sums.for_each(|(sum, weight)| *sum = x.mul_add(*weight, *sum));
                });
                each(first_panel + panel, sums);
            }
        }
    }

    /// See [`unpack_rows`].
    ///
    /// # Safety
    /// The conditions of [`unpack_rows`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx2,fma,gfni,f16c")]
    unsafe fn unpack(&self, matrix: &PackedMatrix, rows: (usize, usize), first: usize, codes: &mut Panel) {
        // SAFETY: the caller vouches for the rows; codes have the width that their kind says.
        unsafe {
            match self.codes.kind {
                Kind::Uint(Bits::One) => unpack_rows::<1, AFFINE>(matrix, rows, first, codes),
                Kind::Uint(Bits::Two) => unpack_rows::<2, AFFINE>(matrix, rows, first, codes),
                Kind::Uint(Bits::Three) => unpack_rows::<3, AFFINE>(matrix, rows, first, codes),
                Kind::Uint(Bits::Four) => unpack_rows::<4, AFFINE>(matrix, rows, first, codes),
                Kind::Uint(Bits::Five) => unpack_rows::<5, AFFINE>(matrix, rows, first, codes),
                Kind::Uint(Bits::Six) => unpack_rows::<6, AFFINE>(matrix, rows, first, codes),
                Kind::Uint(Bits::Eight) => unpack_rows::<8, AFFINE>(matrix, rows, first, codes),
                Kind::Mxfp4 | Kind::Nvfp4 => unpack_rows::<4, MXFP4>(matrix, rows, first, codes),
                Kind::Iq4 => unpack_rows::<4, IQ4>(matrix, rows, first, codes),
                Kind::Iq(IqTable::Iq1S) => unpack_rows::<2, IQ1_S>(matrix, rows, first, codes),
                Kind::Iq(IqTable::Iq1M) => unpack_rows::<3, IQ1_M>(matrix, rows, first, codes),
                Kind::Iq(IqTable::Iq2) => unpack_rows::<3, IQ2>(matrix, rows, first, codes),
                Kind::Iq(IqTable::Iq3Xxs) => unpack_rows::<4, IQ3_XXS>(matrix, rows, first, codes),
                Kind::Iq(IqTable::Iq3S) => unpack_rows::<4, IQ3_S>(matrix, rows, first, codes),
            }
        }
    }
}

/// A panel and a tile, of which some elements along K are multiplied.
#[derive(Clone, Copy)]
struct Task<'a> {
    codes: &'a Panel,
    params: &'a PanelParams,
    tile: &'a Tile,
    /// The first, and how many: whole groups.
    elements: (usize, usize),
    group_size: usize,
}

/// Adds the products of a panel with a tile of `M` rows of x to their sums.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx2,fma,gfni,f16c")]
fn add_tile<const DIGITS: usize, const M: usize>(task: Task, sums: &mut [[f32; LANES]]) {
    let Task { codes, params, tile, elements: (first, count), group_size } = task;
    let (first_group, groups, vectors) = (first / group_size, count / group_size, group_size / 4);
    assert!(codes.len() >= groups * vectors && tile.size == M && sums.len() == M);
    assert!(tile.words.len() >= (first / 4 + groups * vectors) * M * DIGITS);
    let end = first_group + groups;
    assert!(
        tile.offsets.len() >= end * M * DIGITS && tile.units.len() >= end * M && tile.sums.len() >= end * M
    );
    assert!(params.scales.len() >= end && (params.biases.is_empty() || params.biases.len() >= end));
    let mut words = tile.words[first / 4 * M * DIGITS..].as_ptr();
    let mut codes = codes.as_ptr();
    for group in first_group..end {
        // SAFETY: the assertions: the tile has words for every vector of the panel's groups, and offsets, units and sums for
        // every group; the panel has scales for every group, and biases if it has any.
        unsafe {
            let offsets = tile.offsets.as_ptr().add(group * M * DIGITS);
            let mut counts = [[_mm512_setzero_si512(); DIGITS]; M];
            for row in 0..M {
                for digit in 0..DIGITS {
                    counts[row][digit] = _mm512_set1_epi32(*offsets.add(row * DIGITS + digit));
                }
            }
            for _ in 0..vectors {
                let weights = _mm512_loadu_si512(codes.cast());
                for row in 0..M {
                    for digit in 0..DIGITS {
                        let x = _mm512_set1_epi32(*words.add(row * DIGITS + digit));
                        counts[row][digit] = _mm512_dpbusd_epi32(counts[row][digit], weights, x);
                    }
                }
                codes = codes.add(1);
                words = words.add(M * DIGITS);
            }
            let scales = _mm512_loadu_ps(params.scales.as_ptr().add(group).cast());
            let biases = match params.biases.is_empty() {
                true => _mm512_setzero_ps(),
                false => _mm512_loadu_ps(params.biases.as_ptr().add(group).cast()),
            };
            let (units, x) = (tile.units.as_ptr().add(group * M), tile.sums.as_ptr().add(group * M));
            // Registers are for counts: sums stay in memory, of which the compiler must not know what it holds.
            let to = std::hint::black_box(sums.as_mut_ptr().cast::<f32>());
            for row in 0..M {
                // Upper digits of a group fit into 32 bits together, all three do not.
                let mut high = counts[row][0];
                if DIGITS > 1 {
                    high = _mm512_add_epi32(_mm512_slli_epi32::<LIMB_BITS>(high), counts[row][1]);
                }
                let mut product = _mm512_cvtepi32_ps(high);
                if DIGITS > 2 {
                    let limb = _mm512_set1_ps((1 << LIMB_BITS) as f32);
                    product = _mm512_fmadd_ps(product, limb, _mm512_cvtepi32_ps(counts[row][DIGITS - 1]));
                }
                // A unit first: scales may have any exponent that f32 has.
                product = _mm512_mul_ps(product, _mm512_set1_ps(*units.add(row)));
                let sum = _mm512_fmadd_ps(
                    biases,
                    _mm512_set1_ps(*x.add(row)),
                    _mm512_loadu_ps(to.add(row * LANES)),
                );
                _mm512_storeu_ps(to.add(row * LANES), _mm512_fmadd_ps(product, scales, sum));
            }
        }
    }
}
