//! Outliers of x times columns of weights that have been unpacked into panels.

#![allow(clippy::needless_range_loop)] // Loops of constant length over arrays that have to become vectors.

use super::codes::IntegerCodes;
use super::gemm::{Chunk, Sums};
use super::outliers::Outlier;
use super::weight_panels::{place, Panel, PanelParams, DEPTH, LANES};
use super::x_tiles::Layout;
use crate::format::ZeroPoint;
use crate::QuantFormat;
use std::ops::Range;

/// How the weights of a column are read from panels.
#[derive(Clone, Copy)]
pub(in super::super) struct Columns<'a> {
    pub(super) format: QuantFormat,
    pub(super) codes: &'a IntegerCodes,
    /// See [`Panels::unpack`](super::weight_panels::Panels::unpack).
    pub(super) layout: Layout,
}

impl Columns<'_> {
    /// See [`Panels::add_outliers`](super::weight_panels::Panels::add_outliers).
    #[inline(always)] // With the instructions that the caller may use.
    pub(super) fn add_outliers(
        self,
        chunk: Chunk,
        (outliers, rows_of_x): (&[Outlier], Range<usize>),
        sums: &mut Sums,
    ) {
        for (panel, (codes, params)) in chunk.codes.chunks_exact(DEPTH / 4).zip(chunk.params).enumerate() {
            // Many rows of x have theirs in the same columns.
            let (mut column, mut weights) = (None, [0.; LANES]);
            for outlier in outliers {
                let (row, k) = (outlier.row(), outlier.column());
                if !rows_of_x.contains(&row) {
                    continue;
                }
                if column != Some(k) {
                    column = Some(k);
                    weights = self.weights(codes, params, (k - chunk.elements.0, k / chunk.group_size));
                }
                let sum: &mut [f32; LANES] = &mut sums.rows_from(panel, row)[0];
                for lane in 0..LANES {
                    sum[lane] = outlier.x.mul_add(weights[lane], sum[lane]);
                }
            }
        }
    }

    /// The weights of a panel's rows in a column, as the scalar reference dequantizes them: an outlier shows every bit of a
    /// weight that is almost zero.
    #[inline(always)]
    fn weights(self, codes: &Panel, params: &PanelParams, (element, group): (usize, usize)) -> [f32; LANES] {
        let (vector, byte) = place(self.format.bits(), element);
        let scales = &params.scales[group];
        let codes = words_of_vector(codes, vector, self.layout);
        let (zero_point, center) = (self.format.zero_point(), self.codes.center);
        let biases = match zero_point {
            ZeroPoint::None => &[0.; LANES],
            ZeroPoint::Midpoint | ZeroPoint::Bias => &params.stored_biases[group],
        };
        let mut weights = [0.; LANES];
        for lane in 0..LANES {
            let code = (codes[lane] >> (8 * byte)) as u8;
            let code = match self.layout {
                Layout::Words => i32::from(code),
                Layout::Rows(_) | Layout::Columns => i32::from(code as i8) + center,
            };
            weights[lane] = match zero_point {
                ZeroPoint::None => (code - center) as f32 * scales[lane],
                ZeroPoint::Midpoint => (code as f32).mul_add(scales[lane], biases[lane]),
                ZeroPoint::Bias => code as f32 * scales[lane] + biases[lane],
            };
        }
        weights
    }
}

/// The lanes of a vector, which may lie [interleaved](Layout::interleaved) with another.
#[inline(always)]
fn words_of_vector(codes: &Panel, vector: usize, layout: Layout) -> [u32; LANES] {
    match layout.interleaved() {
        1 => std::array::from_fn(|lane| word(&codes[vector], lane)),
        both => {
            let (first, among) = (vector / both * both, vector % both);
            std::array::from_fn(|lane| {
                let at = lane * both + among;
                word(&codes[first + at / LANES], at % LANES)
            })
        }
    }
}

/// A word of a vector.
#[inline(always)]
fn word(vector: &[u8; 4 * LANES], lane: usize) -> u32 {
    u32::from_le_bytes(vector.as_chunks::<4>().0[lane])
}
