//! One vector of activations.
//!
//! Three terms of an activation fill three of a tile's sixteen columns. Twelve are put to use by taking
//! four groups of weights together, a *span*: column `4 * term + group` holds zeros where another group
//! has its activations, so that one tile of sums serves four groups.

use super::super::matrix::PackedMatrix;
use super::activations::Group;
use super::codes::{Codes, STEP};
use super::rows::RowBlock;
use super::tile::{self, Line, Tiles, LEFT, RIGHT, ROWS};
use std::arch::x86_64::*;

/// Groups of a span.
const GROUPS: usize = 4;

/// Rows that share the loads of the activations, two tiles of them.
const ROWS_PER_PASS: usize = 2 * ROWS;

/// Steps that are unpacked together.
const CHUNK: usize = 2;

/// A vector of activations as tiles.
pub(super) struct Column {
    /// The right-hand tiles, one behind the other, as many for each span.
    tiles: Vec<Line>,
    spans: Vec<Span>,
}

/// What turns the sums of a span into products.
#[derive(Clone, Copy)]
#[repr(C)]
struct Span {
    /// What each column is a multiple of.
    units: Line,
    /// The sum of the activations of each group, in the first columns.
    sums: Line,
}

impl Column {
    /// `None` if there is an infinity or a NaN.
    pub(super) fn new<C: Codes>(group_size: usize, x: &[f32]) -> Option<Self> {
        let words_per_group = group_size / Group::per_word(C::FLOAT);
        let spans = x.len().div_ceil(GROUPS * group_size);
        let mut this = Self {
            tiles: vec![Line::ZERO; spans * GROUPS * words_per_group],
            spans: vec![Span { units: Line::ZERO, sums: Line::ZERO }; spans],
        };
        let mut group = Group::EMPTY;
        let spans = this.tiles.chunks_mut(GROUPS * words_per_group).zip(&mut this.spans);
        for (x, (lines, span)) in x.chunks(GROUPS * group_size).zip(spans) {
            let groups = x.chunks(group_size).zip(lines.chunks_mut(words_per_group));
            for (place, (x, lines)) in groups.enumerate() {
                // SAFETY: the instruction set was detected before its kernels were handed out.
                if !unsafe { group.fill::<C>(x) } {
                    return None;
                }
                for (term, words) in group.words.iter().enumerate() {
                    let column = GROUPS * term + place;
                    lines.iter_mut().zip(words).for_each(|(line, word)| line.0[column] = *word);
                    span.units.0[column] = (group.unit * Group::weight(C::FLOAT, term) * C::UNIT).to_bits();
                }
                span.sums.0[place] = group.sum.to_bits();
            }
        }
        Some(this)
    }
}

/// Products of rows from `first_row` on, one for each place of `out`.
///
/// # Safety
/// [`super::detected`] has returned true; `column` is of the matrix's format and K.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,gfni,f16c")]
pub(super) unsafe fn products<C: Codes>(
    matrix: &PackedMatrix,
    column: &Column,
    first_row: usize,
    out: &mut [f32],
) {
    // SAFETY: the caller's promise; no other tiles are in use here.
    unsafe {
        let _tiles = Tiles::configure(64);
        let mut blocks = [RowBlock::new(matrix), RowBlock::new(matrix)];
        for (pass, out) in out.chunks_mut(ROWS_PER_PASS).enumerate() {
            let first_row = first_row + pass * ROWS_PER_PASS;
            blocks[0].take::<C>(first_row, out.len());
            blocks[1].take::<C>(first_row + ROWS, out.len().saturating_sub(ROWS));
            let mut sums = [[Line::ZERO; ROWS]; 2];
            add_spans::<C>(&blocks, column, matrix.k, &mut sums);
            for (y, sums) in out.iter_mut().zip(sums.as_flattened()) {
                *y = _mm512_reduce_add_ps(_mm512_load_ps(sums.0.as_ptr().cast()));
            }
        }
    }
}

/// Adds the products of two blocks of rows to `sums`, which are to be summed over lanes.
///
/// # Safety
/// As [`products`]; tiles are configured.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,gfni,f16c")]
unsafe fn add_spans<C: Codes>(
    blocks: &[RowBlock; 2],
    column: &Column,
    k: usize,
    sums: &mut [[Line; ROWS]; 2],
) {
    let steps = k.div_ceil(STEP);
    let tiles_per_span = column.tiles.len() / column.spans.len() / ROWS;
    let steps_per_span = tiles_per_span / C::TILES;
    let mut left = [[Line::ZERO; CHUNK * 2 * ROWS]; 2];
    let mut counts = [[Line::ZERO; ROWS]; 2];
    // SAFETY: the caller's promise.
    unsafe {
        let mut right = tile::bytes(&column.tiles);
        for (index, span) in column.spans.iter().enumerate() {
            tile::zero::<0>();
            tile::zero::<1>();
            let end = ((index + 1) * steps_per_span).min(steps);
            for step in (index * steps_per_span..end).step_by(CHUNK) {
                let chunk = step..(step + CHUNK).min(end);
                for (block, left) in blocks.iter().zip(&mut left) {
                    block.unpack::<C>(chunk.clone(), left.as_mut_ptr());
                }
                for tile in 0..chunk.len() * C::TILES {
                    tile::load::<RIGHT>(right, 64);
                    tile::load::<{ LEFT[0] }>(tile::bytes(&left[0][tile * ROWS..]), 64);
                    tile::multiply::<C, 0, { LEFT[0] }>();
                    tile::load::<{ LEFT[1] }>(tile::bytes(&left[1][tile * ROWS..]), 64);
                    tile::multiply::<C, 1, { LEFT[1] }>();
                    right = right.add(64 * ROWS);
                }
            }
            tile::store::<0>(counts[0].as_mut_ptr());
            tile::store::<1>(counts[1].as_mut_ptr());
            for ((block, counts), sums) in blocks.iter().zip(&counts).zip(&mut *sums) {
                flush::<C>(block, index, span, counts, sums);
            }
        }
    }
}

/// Adds what the tile of sums counts, scaled, and the biases' part.
///
/// # Safety
/// As [`add_spans`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,gfni,f16c")]
unsafe fn flush<C: Codes>(
    block: &RowBlock,
    index: usize,
    span: &Span,
    counts: &[Line; ROWS],
    sums: &mut [Line; ROWS],
) {
    let (scales, biases, stride) = block.parameters();
    // SAFETY: rows of parameters are padded to whole vectors behind the last group.
    unsafe {
        let units = _mm512_load_ps(span.units.0.as_ptr().cast());
        let group_sums = _mm512_load_ps(span.sums.0.as_ptr().cast());
        for row in 0..ROWS {
            let count = _mm512_load_si512(counts[row].0.as_ptr().cast());
            let count = if C::FLOAT { _mm512_castsi512_ps(count) } else { _mm512_cvtepi32_ps(count) };
            let at = row * stride + index * GROUPS;
            let scale = _mm512_broadcast_f32x4(_mm_loadu_ps(scales.add(at)));
            let mut sum = _mm512_load_ps(sums[row].0.as_ptr().cast());
            sum = _mm512_fmadd_ps(_mm512_mul_ps(count, units), scale, sum);
            if C::BIASES {
                let bias = _mm512_broadcast_f32x4(_mm_loadu_ps(biases.add(at)));
                sum = _mm512_fmadd_ps(bias, group_sums, sum);
            }
            _mm512_store_ps(sums[row].0.as_mut_ptr().cast(), sum);
        }
    }
}
