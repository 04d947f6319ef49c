//! bf16 weights x bf16x3 activations on AMX; only the f32 accumulation rounds.
//!
//! A tile multiplies sixteen rows of bf16 with sixteen columns in as many cycles: 512 multiply-adds a cycle. Two tiles of rows
//! and two of columns share their loads. Sums along K stay in tiles for a *chunk*, and are added in vectors while the next
//! chunk is multiplied: vectors that read what a tile has just written wait long.

use super::super::fast_kernel::{Digits, FastKernel, NotRepresentable, PreparedMany};
use super::super::isa::amx_tile::{self, Amx, Line, Tiles, ROWS};
use super::super::matrix::PackedMatrix;
use super::super::output::OutputPtr;
use super::super::tasks;
use super::split_activations::{Panel, SplitActivations, PANEL};
use super::weights::{Mxfp4, Mxfp8, Nvfp4, RowBlock, Weights};
use crate::QuantFormat;
use std::arch::x86_64::*;
use std::cell::Cell;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// Steps of K for which sums stay in tiles: the tiles of two blocks of columns fill most of the first-level cache.
const CHUNK_STEPS: usize = 8;

/// Rows of x that are multiplied in one pass over the weights: their chunk stays in the second-level cache.
const M_PER_PASS: usize = 128;

/// Lines of a tile.
const LINES: usize = ROWS;

/// Lines that a chunk of a tile's rows or columns fills, at most.
const CHUNK_LINES: usize = 2 * CHUNK_STEPS * LINES;

/// Sums of four tiles: of `[2]` blocks of rows and `[2]` of columns, or of `[4]` blocks of rows.
type Four = [[Line; LINES]; 4];

/// Blocks of rows that are multiplied together, at most.
const BLOCKS: usize = 4;

thread_local! {
    /// Unpacked rows, and sums, of this thread's last task: fresh memory costs a page fault for every 4 KiB.
    static BUFFERS: Cell<(Vec<Line>, Vec<Line>)> = const { Cell::new((Vec::new(), Vec::new())) };
}

/// The kernel, and the proof that the CPU has its instructions.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Bf16Amx {
    isa: Amx,
}

impl Bf16Amx {
    pub(in super::super) fn new(isa: Amx) -> Self {
        Self { isa }
    }
}

impl FastKernel for Bf16Amx {
    fn supports(&self, format: QuantFormat) -> bool {
        [Nvfp4::FORMAT, Mxfp4::FORMAT, Mxfp8::FORMAT].contains(&format)
    }

    fn prepare(
        &self,
        _format: QuantFormat,
        k: usize,
        x: &[f32],
        _digits: Digits,
    ) -> Result<Box<dyn PreparedMany>, NotRepresentable> {
        let split = |x: &[f32]| SplitActivations::new(self.isa.vnni.avx512, k, x, CHUNK_STEPS);
        let passes = x.chunks(M_PER_PASS * k).map(split).collect::<Result<_, _>>()?;
        Ok(Box::new(Prepared { isa: self.isa, m: x.len() / k, passes }))
    }
}

/// Rows of x, those of each pass over the weights by themselves.
struct Prepared {
    isa: Amx,
    m: usize,
    passes: Vec<SplitActivations>,
}

impl PreparedMany for Prepared {
    fn matmul(&self, matrix: &PackedMatrix, out: &mut [f32]) -> Result<(), NotRepresentable> {
        if matrix.format == Nvfp4::FORMAT {
            self.matmul_as(Nvfp4::new(), matrix, out)
        } else if matrix.format == Mxfp4::FORMAT {
            self.matmul_as(Mxfp4::new(), matrix, out)
        } else if matrix.format == Mxfp8::FORMAT {
            self.matmul_as(Mxfp8, matrix, out)
        } else {
            Err(NotRepresentable)
        }
    }
}

impl Prepared {
    fn matmul_as<W: Weights + Send + Sync>(
        &self,
        weights: W,
        matrix: &PackedMatrix,
        out: &mut [f32],
    ) -> Result<(), NotRepresentable> {
        let (isa, n) = (self.isa, matrix.rows);
        assert_eq!(out.len(), self.m * n, "an output has M * N numbers");
        for (split, out) in self.passes.iter().zip(out.chunks_mut(M_PER_PASS * n)) {
            let rows = rows_of_task(n, split.units.len());
            let output = OutputPtr { first: out.as_mut_ptr(), stride: n };
            let all_done = AtomicBool::new(true);
            tasks::for_each(0..n.div_ceil(rows), |_, task| {
                let rows = task * rows..((task + 1) * rows).min(n);
                // SAFETY: `isa` proves the features. `split` was made with K. `output` is a buffer of all rows of x, which is
                // not used otherwise meanwhile, and tasks have different rows of the weight.
                if unsafe { multiply_rows(isa, weights, matrix, split, rows, output) }.is_err() {
                    all_done.store(false, Ordering::Relaxed);
                }
            });
            if !all_done.into_inner() {
                return Err(NotRepresentable);
            }
        }
        Ok(())
    }
}

/// Rows of the weight that a task takes: all columns pass by once for each task.
fn rows_of_task(n: usize, m: usize) -> usize {
    const LEAST: usize = BLOCKS * ROWS;
    let most = if m <= PANEL { LEAST } else { 4 * LEAST };
    (n / (8 * rayon::current_num_threads())).next_multiple_of(LEAST).clamp(LEAST, most)
}

/// Writes the output of some rows of the weight for all rows of x.
///
/// # Errors
/// If the rows have scales that are too large.
///
/// # Safety
/// `isa` proves the features. `split` has the matrix's K; `output` is valid for the slots of the rows in every row of x,
/// and nobody else uses them.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,gfni")]
unsafe fn multiply_rows<W: Weights>(
    isa: Amx,
    weights: W,
    matrix: &PackedMatrix,
    split: &SplitActivations,
    rows: Range<usize>,
    output: OutputPtr,
) -> Result<(), NotRepresentable> {
    let mut blocks = Vec::with_capacity(rows.len().div_ceil(ROWS));
    for first_row in rows.clone().step_by(ROWS) {
        blocks.push(RowBlock::new(matrix, first_row)?);
    }
    let (mut left, mut sums) = BUFFERS.take();
    let all_blocks = blocks.len().next_multiple_of(BLOCKS);
    left.resize(left.len().max(all_blocks * CHUNK_LINES), Line::ZERO);
    sums.clear();
    sums.resize(all_blocks * ROWS * split.tiles, Line::ZERO);
    let mut fours = [[[Line::ZERO; LINES]; 4]; 2];
    // SAFETY: a task has one `Tiles` at a time, and calls nothing that makes another. The buffers have room for the chunk and
    // the sums of all blocks; `output` is valid for the slots of the rows, as the caller vouches.
    unsafe {
        let tiles = Tiles::configure(isa, ROWS, 64);
        for chunk in split.chunks() {
            for (block, left) in blocks.iter().zip(left.chunks_exact_mut(CHUNK_LINES)) {
                block.unpack(weights, chunk.0, chunk.1, left.as_mut_ptr());
            }
            add_chunk(split, chunk, &left[..all_blocks * CHUNK_LINES], &mut fours, &mut sums);
        }
        drop(tiles);
        for panel in &split.panels {
            let mut factors = [0.; PANEL];
            let units = split.units.iter().skip(panel.first);
            factors.iter_mut().zip(units).for_each(|(factor, unit)| *factor = unit * W::UNIT);
            for (block, sums) in sums.chunks_exact(ROWS * split.tiles).take(blocks.len()).enumerate() {
                let first = rows.start + block * ROWS;
                let rows = first..rows.end.min(first + ROWS);
                finish(panel, (sums, split.tiles), (&factors, matrix.global_scale), rows, output);
            }
        }
    }
    BUFFERS.set((left, sums));
    Ok(())
}

/// Multiplies a chunk, `[block][step]` tiles of rows, and adds the products to `sums`, `[block][row][tile of columns]`.
///
/// # Safety
/// Tiles are configured for 64 bytes, and the caller enables the features.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,gfni")]
unsafe fn add_chunk(
    split: &SplitActivations,
    chunk: (usize, usize),
    left: &[Line],
    fours: &mut [Four; 2],
    sums: &mut [Line],
) {
    let depth = 2 * chunk.1;
    let left = |block: usize| amx_tile::bytes(&left[block * CHUNK_LINES..]);
    let blocks = sums.len() / (ROWS * split.tiles);
    let mut turn = 0;
    let mut waiting: Option<[usize; 4]> = None;
    for first_tile in (0..split.tiles).step_by(2) {
        let right = |tile: usize| amx_tile::bytes(split.tile(chunk, tile));
        // Where the sums of a block and a tile of columns begin.
        let start = |block: usize, tile: usize| block * ROWS * split.tiles + tile;
        let pair = first_tile + 1 < split.tiles;
        for block in (0..blocks).step_by(if pair { 2 } else { 4 }) {
            // SAFETY: `left` has the chunk's tiles of each block, and so has `split` of each tile of columns; `depth` is their
            // number.
            let starts = unsafe {
                if pair {
                    let right = [right(first_tile), right(first_tile + 1)];
                    multiply_pairs([left(block), left(block + 1)], right, depth, &mut fours[turn]);
                    let start = |block, tile| start(block, first_tile + tile);
                    [start(block, 0), start(block, 1), start(block + 1, 0), start(block + 1, 1)]
                } else {
                    let left = std::array::from_fn(|index| left(block + index));
                    multiply_four(left, right(first_tile), depth, &mut fours[turn]);
                    std::array::from_fn(|index| start(block + index, first_tile))
                }
            };
            turn ^= 1;
            if let Some(starts) = waiting.replace(starts) {
                add(&fours[turn], starts, split.tiles, sums);
            }
        }
    }
    if let Some(starts) = waiting {
        add(&fours[turn ^ 1], starts, split.tiles, sums);
    }
}

/// Multiplies two tiles of rows with two of columns along a chunk.
///
/// # Safety
/// Tiles are configured for 64 bytes; each pointer is valid for `depth` tiles.
#[inline(always)]
unsafe fn multiply_pairs(left: [*const u8; 2], right: [*const u8; 2], depth: usize, sums: &mut Four) {
    // SAFETY: `at` is the offset of a tile below `depth`, for which the pointers are valid; tiles are configured.
    unsafe {
        zero();
        for at in (0..depth).map(|tile| tile * LINES * size_of::<Line>()) {
            amx_tile::load::<4>(left[0].add(at), 64);
            amx_tile::load::<6>(right[0].add(at), 64);
            amx_tile::load::<5>(left[1].add(at), 64);
            amx_tile::load::<7>(right[1].add(at), 64);
            amx_tile::multiply_bf16::<0, 4, 6>();
            amx_tile::multiply_bf16::<2, 5, 6>();
            amx_tile::multiply_bf16::<1, 4, 7>();
            amx_tile::multiply_bf16::<3, 5, 7>();
        }
        store(sums);
    }
}

/// Multiplies four tiles of rows with one of columns along a chunk.
///
/// # Safety
/// Tiles are configured for 64 bytes; each pointer is valid for `depth` tiles.
#[inline(always)]
unsafe fn multiply_four(left: [*const u8; 4], right: *const u8, depth: usize, sums: &mut Four) {
    // SAFETY: `at` is the offset of a tile below `depth`, for which the pointers are valid; tiles are configured.
    unsafe {
        zero();
        for at in (0..depth).map(|tile| tile * LINES * size_of::<Line>()) {
            amx_tile::load::<6>(right.add(at), 64);
            amx_tile::load::<4>(left[0].add(at), 64);
            amx_tile::multiply_bf16::<0, 4, 6>();
            amx_tile::load::<5>(left[1].add(at), 64);
            amx_tile::multiply_bf16::<1, 5, 6>();
            amx_tile::load::<4>(left[2].add(at), 64);
            amx_tile::multiply_bf16::<2, 4, 6>();
            amx_tile::load::<5>(left[3].add(at), 64);
            amx_tile::multiply_bf16::<3, 5, 6>();
        }
        store(sums);
    }
}

/// Zeros the tiles of sums.
///
/// # Safety
/// Tiles are configured.
#[inline(always)]
unsafe fn zero() {
    // SAFETY: zeroing a configured tile touches no memory.
    unsafe {
        amx_tile::zero::<0>();
        amx_tile::zero::<1>();
        amx_tile::zero::<2>();
        amx_tile::zero::<3>();
    }
}

/// Writes the tiles of sums.
///
/// # Safety
/// Tiles are configured.
#[inline(always)]
unsafe fn store(sums: &mut Four) {
    // SAFETY: each array has the sixteen lines of a tile.
    unsafe {
        amx_tile::store::<0>(sums[0].as_mut_ptr());
        amx_tile::store::<1>(sums[1].as_mut_ptr());
        amx_tile::store::<2>(sums[2].as_mut_ptr());
        amx_tile::store::<3>(sums[3].as_mut_ptr());
    }
}

/// Adds the sums of four tiles to lines that are `stride` apart and begin at `starts`.
#[inline]
#[target_feature(enable = "avx512f")]
fn add(four: &Four, starts: [usize; 4], stride: usize, sums: &mut [Line]) {
    for (lines, start) in four.iter().zip(starts) {
        let sums = &mut sums[start..start + (LINES - 1) * stride + 1];
        for (row, line) in lines.iter().enumerate() {
            // SAFETY: a line is an aligned vector.
            unsafe {
                let sum = sums[row * stride].0.as_mut_ptr().cast();
                _mm512_store_ps(
                    sum,
                    _mm512_add_ps(_mm512_load_ps(sum), _mm512_load_ps(line.0.as_ptr().cast())),
                );
            }
        }
    }
}

/// Writes the output of up to sixteen rows for a panel: the sum of the three columns of a row of x, times its factor and the
/// global scale.
///
/// # Safety
/// The caller enables the features; `output` is valid for the slots of the rows.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn finish(
    panel: &Panel,
    (sums, tiles): (&[Line], usize),
    (factors, global_scale): (&[f32; PANEL], f32),
    rows: Range<usize>,
    output: OutputPtr,
) {
    let mut outputs = [[0f32; PANEL]; ROWS];
    let all = ((1u32 << panel.m) - 1) as u16;
    for (sums, outputs) in sums.chunks_exact(tiles).zip(&mut outputs) {
        let columns = sums[panel.first_tile..].as_ptr().cast::<f32>();
        // SAFETY: the panel has three columns for each row of x, one behind the other; masks keep reads inside them.
        unsafe {
            let third = _mm512_maskz_loadu_ps(all, columns.add(2 * panel.m));
            let second = _mm512_maskz_loadu_ps(all, columns.add(panel.m));
            let first = _mm512_maskz_loadu_ps(all, columns);
            let sum = _mm512_add_ps(_mm512_add_ps(third, second), first);
            let scaled = _mm512_mul_ps(sum, _mm512_loadu_ps(factors.as_ptr()));
            _mm512_storeu_ps(outputs.as_mut_ptr(), _mm512_mul_ps(scaled, _mm512_set1_ps(global_scale)));
        }
    }
    for index in 0..panel.m {
        let to = (panel.first + index) * output.stride + rows.start;
        for (row, outputs) in outputs.iter().enumerate().take(rows.len()) {
            // SAFETY: `output` is valid for this slot, as the caller vouches.
            unsafe { *output.first.add(to + row) = outputs[index] };
        }
    }
}
