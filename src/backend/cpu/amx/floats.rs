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

/// Sums of two tiles of rows and two of columns.
type Square = [[[Line; LINES]; 2]; 2];

thread_local! {
    /// Unpacked rows, and sums, of this thread's last product: fresh memory costs a page fault for every 4 KiB.
    static BUFFERS: Cell<(Vec<Line>, Vec<Line>)> = const { Cell::new((Vec::new(), Vec::new())) };
}

/// How many rows a task takes: all columns pass by once for each task.
pub(super) fn rows_of_task(n: usize, vectors: usize) -> usize {
    const PAIR: usize = 2 * ROWS;
    let most = if vectors <= PANEL { PAIR } else { 8 * PAIR };
    (n / (8 * rayon::current_num_threads())).next_multiple_of(PAIR).clamp(PAIR, most)
}

/// Products of some rows and all vectors; false if the rows have scales that are too large for it.
///
/// # Safety
/// [`super::detected`] has returned true; `columns` are of the matrix's K; `output` has the rows' places for every
/// vector, and nobody else uses them.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,gfni")]
pub(super) unsafe fn products<W: Weights>(
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
    let pairs = blocks.len().div_ceil(2);
    left.resize(left.len().max(2 * pairs * CHUNK_LINES), Line::ZERO);
    sums.clear();
    sums.resize(2 * pairs * ROWS * columns.tiles, Line::ZERO);
    // SAFETY: the caller's promise; no other tiles are in use here; the buffers have room for all rows.
    unsafe {
        let tiles = Tiles::configure(64);
        for chunk in columns.chunks() {
            for (block, left) in blocks.iter().zip(left.chunks_exact_mut(CHUNK_LINES)) {
                block.unpack::<W>(chunk.0, chunk.1, left.as_mut_ptr());
            }
            add_chunk(columns, chunk, &left[..2 * pairs * CHUNK_LINES], &mut sums);
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
unsafe fn add_chunk(columns: &Columns, chunk: (usize, usize), left: &[Line], sums: &mut [Line]) {
    let mut squares: [Square; 2] = [[[[Line::ZERO; LINES]; 2]; 2]; 2];
    let mut waiting = None;
    let mut turn = 0;
    let depth = 2 * chunk.1;
    for first_tile in (0..columns.tiles).step_by(2) {
        let wide = first_tile + 1 < columns.tiles;
        let right =
            [first_tile, first_tile + usize::from(wide)].map(|tile| tile::bytes(columns.tile(chunk, tile)));
        for (pair, left) in left.chunks_exact(2 * CHUNK_LINES).enumerate() {
            let left = [0, CHUNK_LINES].map(|block| tile::bytes(&left[block..]));
            // SAFETY: the caller's promise.
            unsafe {
                match wide {
                    true => multiply::<true>(left, right, depth, &mut squares[turn]),
                    false => multiply::<false>(left, right, depth, &mut squares[turn]),
                }
            }
            turn ^= 1;
            if let Some(place) = waiting.replace((pair, first_tile, wide)) {
                add(&squares[turn], place, columns.tiles, sums);
            }
        }
    }
    if let Some(place) = waiting {
        add(&squares[turn ^ 1], place, columns.tiles, sums);
    }
}

/// Multiplies two tiles of rows with two tiles of columns, or one, along a chunk.
///
/// # Safety
/// As [`products`]; tiles are configured; there are `depth` tiles behind each pointer.
#[inline(always)]
unsafe fn multiply<const WIDE: bool>(
    left: [*const u8; 2],
    right: [*const u8; 2],
    depth: usize,
    square: &mut Square,
) {
    // SAFETY: the caller's promise.
    unsafe {
        tile::zero::<0>();
        tile::zero::<1>();
        if WIDE {
            tile::zero::<2>();
            tile::zero::<3>();
        }
        for at in (0..depth).map(|tile| tile * LINES * size_of::<Line>()) {
            tile::load::<4>(left[0].add(at), 64);
            tile::load::<6>(right[0].add(at), 64);
            tile::load::<5>(left[1].add(at), 64);
            tile::multiply_floats::<0, 4, 6>();
            tile::multiply_floats::<1, 5, 6>();
            if WIDE {
                tile::load::<7>(right[1].add(at), 64);
                tile::multiply_floats::<2, 4, 7>();
                tile::multiply_floats::<3, 5, 7>();
            }
        }
        tile::store::<0>(square[0][0].as_mut_ptr());
        tile::store::<1>(square[1][0].as_mut_ptr());
        if WIDE {
            tile::store::<2>(square[0][1].as_mut_ptr());
            tile::store::<3>(square[1][1].as_mut_ptr());
        }
    }
}

/// Adds what tiles have summed up, of a pair of blocks and two tiles of columns, or one.
#[inline]
#[target_feature(enable = "avx512f")]
fn add(square: &Square, (pair, first_tile, wide): (usize, usize, bool), tiles: usize, sums: &mut [Line]) {
    let mut sums = sums.chunks_exact_mut(tiles).skip(2 * pair * ROWS);
    for [first, second] in square {
        for ((first, second), sums) in first.iter().zip(second).zip(&mut sums) {
            for (line, sum) in
                [first, second].into_iter().zip(&mut sums[first_tile..]).take(1 + usize::from(wide))
            {
                // SAFETY: a line is a vector.
                unsafe {
                    let total = _mm512_add_ps(
                        _mm512_load_ps(sum.0.as_ptr().cast()),
                        _mm512_load_ps(line.0.as_ptr().cast()),
                    );
                    _mm512_store_ps(sum.0.as_mut_ptr().cast(), total);
                }
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
