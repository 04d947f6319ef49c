//! Vectors of activations as columns of bf16 numbers, three for each: what bf16 keeps of a number, what it keeps of
//! the rest, and the rest of that. Together they are the number.

use super::super::tasks;
use super::tile::{Line, COLUMNS, ROWS};
use super::weights::{self, STEP};
use std::arch::x86_64::*;

/// Columns of a vector.
pub(super) const TERMS: usize = 3;

/// Vectors whose columns begin with a tile.
pub(super) const PANEL: usize = 16;

/// Lines that a step of K fills in the two tiles of a column.
const LINES_PER_STEP: usize = 2 * ROWS;

/// log2 of the largest number of a vector; products with the largest weights leave room for their sums.
const LARGEST: i32 = 50;

/// Up to 16 vectors: column `term * count + vector` of the panel's tiles.
#[derive(Clone, Copy)]
pub(super) struct Panel {
    pub(super) first_vector: usize,
    pub(super) count: usize,
    pub(super) first_tile: usize,
}

/// Vectors of activations as tiles.
pub(super) struct Columns {
    pub(super) panels: Vec<Panel>,
    /// What each vector's columns are multiples of.
    pub(super) units: Vec<f32>,
    /// Tiles of a step.
    pub(super) tiles: usize,
    /// Of `[chunk][tile][step]`.
    lines: Vec<Line>,
    chunk_steps: usize,
    steps: usize,
}

impl Columns {
    /// `x` is `[vectors, k]`, of which `chunk_steps` steps of k are to be beside each other. `None` if there is an
    /// infinity or a NaN.
    pub(super) fn new(k: usize, x: &[f32], chunk_steps: usize) -> Option<Self> {
        let vectors = x.len() / k;
        let mut panels = Vec::with_capacity(vectors.div_ceil(PANEL));
        let mut tiles = 0;
        for first_vector in (0..vectors).step_by(PANEL) {
            let count = (vectors - first_vector).min(PANEL);
            panels.push(Panel { first_vector, count, first_tile: tiles });
            tiles += (TERMS * count).div_ceil(COLUMNS);
        }
        let units: Vec<f32> = x.chunks_exact(k).map(unit).collect::<Option<_>>()?;
        let steps = k.div_ceil(STEP);
        let mut lines = vec![Line::ZERO; steps * tiles * LINES_PER_STEP];
        let fill = |chunk: usize, lines: &mut [Line]| {
            let steps_here = lines.len() / (tiles * LINES_PER_STEP);
            let first = chunk * chunk_steps * STEP;
            let end = (first + chunk_steps * STEP).min(k);
            for panel in &panels {
                for index in 0..panel.count {
                    let vector = panel.first_vector + index;
                    let (Some(row), Some(unit)) =
                        (x.get(vector * k..).and_then(|x| x.get(first..end)), units.get(vector))
                    else {
                        return;
                    };
                    let columns = std::array::from_fn(|term| {
                        let column = term * panel.count + index;
                        let tile = panel.first_tile + column / COLUMNS;
                        (tile * steps_here * LINES_PER_STEP, column % COLUMNS)
                    });
                    // SAFETY: the instruction set was detected before its kernels were handed out.
                    unsafe { fill(row, 1. / unit, columns, lines) };
                }
            }
        };
        tasks::for_each(lines.chunks_mut(chunk_steps * tiles * LINES_PER_STEP), fill);
        Some(Self { panels, units, tiles, lines, chunk_steps, steps })
    }

    /// The chunks of K: the first step of each, and how many it has.
    pub(super) fn chunks(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let steps = move |first| (first, self.chunk_steps.min(self.steps - first));
        (0..self.steps).step_by(self.chunk_steps).map(steps)
    }

    /// The lines of a tile in a chunk.
    pub(super) fn tile(&self, (first_step, steps): (usize, usize), tile: usize) -> &[Line] {
        let first = (first_step * self.tiles + tile * steps) * LINES_PER_STEP;
        &self.lines[first..first + steps * LINES_PER_STEP]
    }
}

/// The power of two that makes the largest number of a vector as large as it may be; `None` if there is an infinity or
/// a NaN.
fn unit(x: &[f32]) -> Option<f32> {
    let bits = x.iter().fold(0, |largest, x| largest.max(x.to_bits() & 0x7FFF_FFFF));
    let exponent = (bits >> 23) as i32 - 127;
    // So that its reciprocal is a normal number, too.
    let unit = (exponent - LARGEST).clamp(-126, 126);
    (exponent < 128).then(|| f32::from_bits(((unit + 127) as u32) << 23))
}

/// Fills the three columns of a vector, given as their first lines and their places in a line, with `x * scale`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn fill(x: &[f32], scale: f32, columns: [(usize, usize); TERMS], lines: &mut [Line]) {
    let scale = _mm512_set1_ps(scale);
    for (index, x) in x.chunks_exact(16).enumerate() {
        // SAFETY: there are sixteen.
        let mut rest = _mm512_mul_ps(unsafe { _mm512_loadu_ps(x.as_ptr()) }, scale);
        for (first_line, place) in columns {
            let term = nearest_bf16(rest);
            rest = _mm512_sub_ps(rest, term);
            let mut pairs = [0u32; 8];
            let upper = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(_mm512_castps_si512(term)));
            // SAFETY: eight words.
            unsafe { _mm256_storeu_si256(pairs.as_mut_ptr().cast(), upper) };
            // A line has the pairs of all columns.
            for (pair, value) in pairs.into_iter().enumerate() {
                let line = first_line + 16 * (index / 2) + weights::place(index % 2 * 16 + 2 * pair) / 2;
                if let Some(word) = lines.get_mut(line).and_then(|line| line.0.get_mut(place)) {
                    *word = value;
                }
            }
        }
    }
}

/// The nearest bf16 numbers, in the upper halves of f32.
#[inline]
#[target_feature(enable = "avx512f")]
fn nearest_bf16(values: __m512) -> __m512 {
    let bits = _mm512_castps_si512(values);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    _mm512_castsi512_ps(_mm512_and_si512(rounded, _mm512_set1_epi32(0xFFFF_0000_u32 as i32)))
}
