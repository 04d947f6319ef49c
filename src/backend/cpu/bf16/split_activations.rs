//! Splits each f32 into three bf16 (bf16x3), so that high + middle + low == x.

use super::super::fast_kernel::NotRepresentable;
use super::super::isa::amx_tile::{Line, COLUMNS, ROWS};
use super::super::isa::avx512::Avx512;
use super::super::tasks;
use super::weights::{self, STEP};
use std::arch::x86_64::*;

/// Columns of a row of x: its high, middle and low parts.
pub(super) const PARTS: usize = 3;

/// Rows of x whose columns begin with a tile.
pub(super) const PANEL: usize = 16;

/// Lines that a step of K fills in the two tiles of a column.
const LINES_PER_STEP: usize = 2 * ROWS;

/// log2 of the largest number of a scaled row of x; products with the largest weights leave room for their sums.
const LARGEST: i32 = 50;

/// Up to 16 rows of x. Row `row` has the columns `part * m + row` of the panel's tiles.
#[derive(Clone, Copy)]
pub(super) struct Panel {
    /// The first row of x.
    pub(super) first: usize,
    /// Rows of x.
    pub(super) m: usize,
    pub(super) first_tile: usize,
}

/// Rows of x as tiles.
pub(super) struct SplitActivations {
    pub(super) panels: Vec<Panel>,
    /// The unit of each row of x.
    pub(super) units: Vec<f32>,
    /// Tiles of a step.
    pub(super) tiles: usize,
    /// `[chunk][tile][step]`.
    lines: Vec<Line>,
    chunk_steps: usize,
    steps: usize,
}

impl SplitActivations {
    /// `x` is `[m, k]`; `chunk_steps` steps of k lie together.
    ///
    /// # Errors
    /// If there is an infinity or a NaN.
    pub(super) fn new(
        _isa: Avx512,
        k: usize,
        x: &[f32],
        chunk_steps: usize,
    ) -> Result<Self, NotRepresentable> {
        let m = x.len() / k;
        let mut panels = Vec::with_capacity(m.div_ceil(PANEL));
        let mut tiles = 0;
        for first in (0..m).step_by(PANEL) {
            let m = (m - first).min(PANEL);
            panels.push(Panel { first, m, first_tile: tiles });
            tiles += (PARTS * m).div_ceil(COLUMNS);
        }
        let units: Vec<f32> = x.chunks_exact(k).map(unit).collect::<Option<_>>().ok_or(NotRepresentable)?;
        let steps = k.div_ceil(STEP);
        let mut lines = vec![Line::ZERO; steps * tiles * LINES_PER_STEP];
        let fill = |chunk: usize, lines: &mut [Line]| {
            let steps_here = lines.len() / (tiles * LINES_PER_STEP);
            let first = chunk * chunk_steps * STEP;
            let end = (first + chunk_steps * STEP).min(k);
            for panel in &panels {
                for index in 0..panel.m {
                    let row = panel.first + index;
                    let (Some(x), Some(unit)) =
                        (x.get(row * k..).and_then(|x| x.get(first..end)), units.get(row))
                    else {
                        return;
                    };
                    let columns = std::array::from_fn(|part| {
                        let column = part * panel.m + index;
                        let tile = panel.first_tile + column / COLUMNS;
                        (tile * steps_here * LINES_PER_STEP, column % COLUMNS)
                    });
                    // SAFETY: `_isa` proves that the CPU has the features of the function.
                    unsafe { fill(x, 1. / unit, columns, lines) };
                }
            }
        };
        tasks::for_each(lines.chunks_mut(chunk_steps * tiles * LINES_PER_STEP), fill);
        Ok(Self { panels, units, tiles, lines, chunk_steps, steps })
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

/// The power of two whose inverse makes the largest number of a row as large as it may be; None if there is an infinity or
/// a NaN.
fn unit(x: &[f32]) -> Option<f32> {
    let bits = x.iter().fold(0, |largest, x| largest.max(x.to_bits() & 0x7FFF_FFFF));
    let exponent = (bits >> 23) as i32 - 127;
    // So that its reciprocal is a normal number, too.
    let unit = (exponent - LARGEST).clamp(-126, 126);
    (exponent < 128).then(|| f32::from_bits(((unit + 127) as u32) << 23))
}

/// Fills the three columns of a row of x with `x * scale`. A column is its first line and its index in a line.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn fill(x: &[f32], scale: f32, columns: [(usize, usize); PARTS], lines: &mut [Line]) {
    let scale = _mm512_set1_ps(scale);
    for (index, x) in x.chunks_exact(16).enumerate() {
        // SAFETY: a chunk has the sixteen numbers of a vector.
        let mut rest = _mm512_mul_ps(unsafe { _mm512_loadu_ps(x.as_ptr()) }, scale);
        for (first_line, column) in columns {
            let part = nearest_bf16(rest);
            rest = _mm512_sub_ps(rest, part);
            let mut pairs = [0u32; 8];
            let upper = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(_mm512_castps_si512(part)));
            // SAFETY: `pairs` has the eight words that are written.
            unsafe { _mm256_storeu_si256(pairs.as_mut_ptr().cast(), upper) };
            // A line has the pairs of all columns.
            for (pair, value) in pairs.into_iter().enumerate() {
                let line = first_line + 16 * (index / 2) + weights::column(index % 2 * 16 + 2 * pair) / 2;
                if let Some(word) = lines.get_mut(line).and_then(|line| line.0.get_mut(column)) {
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
