//! Weights that are bf16 numbers, times activations that are three of them: nothing but sums is rounded.
//!
//! Two tiles of rows and two of columns share their loads. Sums along K stay in tiles for a *chunk*, and are added in
//! vectors while the next ones are multiplied: vectors that read what a tile has just written wait long.

use super::super::matrix::PackedMatrix;
use super::columns::{Columns, Panel, PANEL};
use super::tile::{self, Line, Tiles, ROWS};
use super::weights::{RowBlock, Weights};
use super::Output;
use std::arch::x86_64::*;
use std::cell::Cell;
use std::ops::Range;

/// Steps of K for which sums stay in tiles: the tiles of two blocks of columns fill most of the first-level cache.
pub(super) const CHUNK_STEPS: usize = 8;

/// Vectors of activations that are multiplied in one pass over the weights: their chunk stays in the second-level
/// cache.
pub(super) const SLAB: usize = 128;

/// Lines of a tile.
const LINES: usize = ROWS;

/// Lines that a chunk of a tile's rows or columns fills, at most.
const CHUNK_LINES: usize = 2 * CHUNK_STEPS * LINES;

/// Sums of four tiles: of `[2]` blocks of rows and `[2]` of columns, or of `[4]` blocks of rows.
type Four = [[Line; LINES]; 4];

/// Blocks of rows that are multiplied together, at most.
const BLOCKS: usize = 4;

thread_local! {
    /// Unpacked rows, and sums, of this thread's last product: fresh memory costs a page fault for every 4 KiB.
    static BUFFERS: Cell<(Vec<Line>, Vec<Line>)> = const { Cell::new((Vec::new(), Vec::new())) };
}

/// How many rows a task takes: all columns pass by once for each task.
pub(super) fn rows_of_task(n: usize, vectors: usize) -> usize {
    const LEAST: usize = BLOCKS * ROWS;
    let most = if vectors <= PANEL { LEAST } else { 4 * LEAST };
    (n / (8 * rayon::current_num_threads())).next_multiple_of(LEAST).clamp(LEAST, most)
}

/// Products of some rows and all vectors; false if the rows have scales that are too large for it.
///
/// # Safety
/// [`super::detected`] has returned true; `columns` are of the matrix's K; `output` has the rows' places for every
/// vector, and nobody else uses them.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,gfni")]
pub(super) unsafe fn products<W: Weights>(
    weights: W,
    matrix: &PackedMatrix,
    columns: &Columns,
    rows: Range<usize>,
    output: Output,
) -> bool {
    let mut blocks = Vec::with_capacity(rows.len().div_ceil(ROWS));
    for first_row in rows.clone().step_by(ROWS) {
        let Some(block) = RowBlock::new(matrix, first_row) else { return false };
        blocks.push(block);
    }
    let (mut left, mut sums) = BUFFERS.take();
    let all_blocks = blocks.len().next_multiple_of(BLOCKS);
    left.resize(left.len().max(all_blocks * CHUNK_LINES), Line::ZERO);
    sums.clear();
    sums.resize(all_blocks * ROWS * columns.tiles, Line::ZERO);
    let mut fours = [[[Line::ZERO; LINES]; 4]; 2];
    // SAFETY: the caller's promise; no other tiles are in use here; the buffers have room for all rows.
    unsafe {
        let tiles = Tiles::configure(64);
        for chunk in columns.chunks() {
            for (block, left) in blocks.iter().zip(left.chunks_exact_mut(CHUNK_LINES)) {
                block.unpack(weights, chunk.0, chunk.1, left.as_mut_ptr());
            }
            add_chunk(columns, chunk, &left[..all_blocks * CHUNK_LINES], &mut fours, &mut sums);
        }
        drop(tiles);
        for panel in &columns.panels {
            let mut factors = [0.; PANEL];
            let units = columns.units.iter().skip(panel.first_vector);
            factors.iter_mut().zip(units).for_each(|(factor, unit)| *factor = unit * W::UNIT);
            for (block, sums) in sums.chunks_exact(ROWS * columns.tiles).take(blocks.len()).enumerate() {
                let first = rows.start + block * ROWS;
                let rows = first..rows.end.min(first + ROWS);
                finish(panel, (sums, columns.tiles), (&factors, matrix.global_scale), rows, output);
            }
        }
    }
    BUFFERS.set((left, sums));
    true
}

/// Adds the products of a chunk, `[block][step]` tiles of rows, to `sums`, `[block][row][tile of columns]`.
///
/// # Safety
/// As [`products`]; tiles are configured.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,gfni")]
unsafe fn add_chunk(
    columns: &Columns,
    chunk: (usize, usize),
    left: &[Line],
    fours: &mut [Four; 2],
    sums: &mut [Line],
) {
    let depth = 2 * chunk.1;
    let left = |block: usize| tile::bytes(&left[block * CHUNK_LINES..]);
    let blocks = sums.len() / (ROWS * columns.tiles);
    let mut turn = 0;
    let mut waiting: Option<[usize; 4]> = None;
    for first_tile in (0..columns.tiles).step_by(2) {
        let right = |tile: usize| tile::bytes(columns.tile(chunk, tile));
        // Where in the sums those of a block and a tile of columns begin.
        let place = |block: usize, tile: usize| block * ROWS * columns.tiles + tile;
        let pair = first_tile + 1 < columns.tiles;
        for block in (0..blocks).step_by(if pair { 2 } else { 4 }) {
            // SAFETY: the caller's promise.
            let places = unsafe {
                if pair {
                    let right = [right(first_tile), right(first_tile + 1)];
                    multiply_pairs([left(block), left(block + 1)], right, depth, &mut fours[turn]);
                    let place = |block, tile| place(block, first_tile + tile);
                    [place(block, 0), place(block, 1), place(block + 1, 0), place(block + 1, 1)]
                } else {
                    let left = std::array::from_fn(|index| left(block + index));
                    multiply_four(left, right(first_tile), depth, &mut fours[turn]);
                    std::array::from_fn(|index| place(block + index, first_tile))
                }
            };
            turn ^= 1;
            if let Some(places) = waiting.replace(places) {
                add(&fours[turn], places, columns.tiles, sums);
            }
        }
    }
    if let Some(places) = waiting {
        add(&fours[turn ^ 1], places, columns.tiles, sums);
    }
}

/// Multiplies two tiles of rows with two of columns along a chunk.
///
/// # Safety
/// As [`products`]; tiles are configured; there are `depth` tiles behind each pointer.
#[inline(always)]
unsafe fn multiply_pairs(left: [*const u8; 2], right: [*const u8; 2], depth: usize, sums: &mut Four) {
    // SAFETY: the caller's promise.
    unsafe {
        zero();
        for at in (0..depth).map(|tile| tile * LINES * size_of::<Line>()) {
            tile::load::<4>(left[0].add(at), 64);
            tile::load::<6>(right[0].add(at), 64);
            tile::load::<5>(left[1].add(at), 64);
            tile::load::<7>(right[1].add(at), 64);
            tile::multiply_floats::<0, 4, 6>();
            tile::multiply_floats::<2, 5, 6>();
            tile::multiply_floats::<1, 4, 7>();
            tile::multiply_floats::<3, 5, 7>();
        }
        store(sums);
    }
}

/// Multiplies four tiles of rows with one of columns along a chunk.
///
/// # Safety
/// As [`multiply_pairs`].
#[inline(always)]
unsafe fn multiply_four(left: [*const u8; 4], right: *const u8, depth: usize, sums: &mut Four) {
    // SAFETY: the caller's promise.
    unsafe {
        zero();
        for at in (0..depth).map(|tile| tile * LINES * size_of::<Line>()) {
            tile::load::<6>(right.add(at), 64);
            tile::load::<4>(left[0].add(at), 64);
            tile::multiply_floats::<0, 4, 6>();
            tile::load::<5>(left[1].add(at), 64);
            tile::multiply_floats::<1, 5, 6>();
            tile::load::<4>(left[2].add(at), 64);
            tile::multiply_floats::<2, 4, 6>();
            tile::load::<5>(left[3].add(at), 64);
            tile::multiply_floats::<3, 5, 6>();
        }
        store(sums);
    }
}

// SAFETY (both): tiles are configured.

#[inline(always)]
unsafe fn zero() {
    unsafe {
        tile::zero::<0>();
        tile::zero::<1>();
        tile::zero::<2>();
        tile::zero::<3>();
    }
}

#[inline(always)]
unsafe fn store(sums: &mut Four) {
    unsafe {
        tile::store::<0>(sums[0].as_mut_ptr());
        tile::store::<1>(sums[1].as_mut_ptr());
        tile::store::<2>(sums[2].as_mut_ptr());
        tile::store::<3>(sums[3].as_mut_ptr());
    }
}

/// Adds what four tiles have summed up to lines that are `stride` apart and begin at these places.
#[inline]
#[target_feature(enable = "avx512f")]
fn add(four: &Four, places: [usize; 4], stride: usize, sums: &mut [Line]) {
    for (lines, place) in four.iter().zip(places) {
        let sums = &mut sums[place..place + (LINES - 1) * stride + 1];
        for (row, line) in lines.iter().enumerate() {
            // SAFETY: a line is a vector.
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

/// Writes the products of up to sixteen rows and a panel: of each vector's three columns the sum, times its factor and
/// the global scale.
///
/// # Safety
/// As [`products`]; `sums` has the rows.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn finish(
    panel: &Panel,
    (sums, tiles): (&[Line], usize),
    (factors, global_scale): (&[f32; PANEL], f32),
    rows: Range<usize>,
    output: Output,
) {
    let mut products = [[0f32; PANEL]; ROWS];
    let all = ((1u32 << panel.count) - 1) as u16;
    for (sums, products) in sums.chunks_exact(tiles).zip(&mut products) {
        let columns = sums[panel.first_tile..].as_ptr().cast::<f32>();
        // SAFETY: the panel has three columns for each vector.
        unsafe {
            let third = _mm512_maskz_loadu_ps(all, columns.add(2 * panel.count));
            let second = _mm512_maskz_loadu_ps(all, columns.add(panel.count));
            let first = _mm512_maskz_loadu_ps(all, columns);
            let sum = _mm512_add_ps(_mm512_add_ps(third, second), first);
            let product = _mm512_mul_ps(sum, _mm512_loadu_ps(factors.as_ptr()));
            _mm512_storeu_ps(products.as_mut_ptr(), _mm512_mul_ps(product, _mm512_set1_ps(global_scale)));
        }
    }
    for vector in 0..panel.count {
        let to = (panel.first_vector + vector) * output.stride + rows.start;
        for (row, products) in products.iter().enumerate().take(rows.len()) {
            // SAFETY: the caller's promise.
            unsafe { *output.first.add(to + row) = products[vector] };
        }
    }
}
