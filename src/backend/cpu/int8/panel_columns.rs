//! Outliers of x times columns of weights that have been unpacked into panels.

use super::super::row_gemv::LANES;
use super::codes::IntegerCodes;
use super::gemm::{Chunk, Sums};
use super::outliers::Outlier;
use super::weight_panels::{place, Panel, PanelParams, DEPTH};
use super::x_tiles::Layout;
use crate::format::ZeroPoint;
use crate::QuantFormat;
use std::arch::x86_64::*;
use std::ops::Range;

/// How the weights of a column are read from panels.
#[derive(Clone, Copy)]
pub(super) struct Columns<'a> {
    pub(super) format: QuantFormat,
    pub(super) codes: &'a IntegerCodes,
    /// Panels have codes less their center for [`Layout::Rows`].
    pub(super) layout: Layout,
}

impl Columns<'_> {
    /// Adds the products of outliers, those in columns of the chunk and in some rows of x, to their sums.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    pub(super) fn add_outliers(
        self,
        chunk: Chunk,
        (outliers, rows_of_x): (&[Outlier], Range<usize>),
        sums: &mut Sums,
    ) {
        for (panel, (codes, params)) in chunk.codes.chunks_exact(DEPTH / 4).zip(chunk.params).enumerate() {
            // Many rows of x have theirs in the same columns.
            let (mut column, mut weights) = (None, _mm512_setzero_ps());
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
                // SAFETY: the array has the sixteen numbers of a vector.
                unsafe {
                    let with =
                        _mm512_fmadd_ps(_mm512_set1_ps(outlier.x), weights, _mm512_loadu_ps(sum.as_ptr()));
                    _mm512_storeu_ps(sum.as_mut_ptr(), with);
                }
            }
        }
    }

    /// The weights of a panel's rows in a column, as the scalar reference dequantizes them: an outlier shows every bit of a
    /// weight that is almost zero.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn weights(self, codes: &Panel, params: &PanelParams, (element, group): (usize, usize)) -> __m512 {
        let (vector, byte) = place(self.format.bits(), element);
        let (upper, lower) = (_mm512_set1_epi32(24 - 8 * byte as i32), _mm512_set1_epi32(24));
        let center = _mm512_set1_epi32(self.codes.center);
        // SAFETY: the arrays have the bytes of a vector.
        let (bytes, scales) = unsafe {
            (
                _mm512_loadu_si512(codes[vector].as_ptr().cast()),
                _mm512_loadu_ps(params.scales[group].as_ptr()),
            )
        };
        let bytes = _mm512_sllv_epi32(bytes, upper);
        let (codes, centered) = match self.layout {
            Layout::Words => {
                let codes = _mm512_srlv_epi32(bytes, lower);
                (codes, _mm512_sub_epi32(codes, center))
            }
            Layout::Rows => {
                let centered = _mm512_srav_epi32(bytes, lower);
                (_mm512_add_epi32(centered, center), centered)
            }
        };
        // SAFETY: as above.
        let biases = || unsafe { _mm512_loadu_ps(params.stored_biases[group].as_ptr()) };
        let codes = _mm512_cvtepi32_ps(codes);
        match self.format.zero_point() {
            ZeroPoint::None => _mm512_mul_ps(_mm512_cvtepi32_ps(centered), scales),
            ZeroPoint::Midpoint => _mm512_fmadd_ps(codes, scales, biases()),
            ZeroPoint::Bias => _mm512_add_ps(_mm512_mul_ps(codes, scales), biases()),
        }
    }
}
