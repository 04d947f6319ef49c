//! Outliers of rows of x times sixteen rows of the weight, one to a lane.

use super::super::super::isa::amx_tile::ROWS;
use super::super::codes::doubled;
use super::super::tables::{table, AFFINE};
use super::super::weight_panels::PanelParams;
use super::strips::{Rows, Strip};
use super::Prepared;
use crate::format::ZeroPoint;
use crate::QuantFormat;
use std::arch::x86_64::*;

/// Adds the products of outliers with the rows of a panel to `out`, `[rows, m]`.
///
/// # Safety
/// As [`multiply`](super::multiply); `params` are those of the panel.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx2,fma,gfni,f16c")]
pub(super) unsafe fn add_outliers<const BITS: usize, const KIND: u8>(
    prepared: &Prepared,
    format: QuantFormat,
    (rows, panel): (Rows, Strip),
    params: &PanelParams,
    out: &mut [f32],
) {
    let m = prepared.x.size;
    let (first, row_bytes) = rows.strip::<BITS>(panel, 0);
    assert!(i32::try_from(ROWS * row_bytes).is_ok(), "a row of {row_bytes} bytes");
    let last = (rows.count - 1 - panel.panel * ROWS).min(ROWS - 1);
    let offsets: [i32; ROWS] = std::array::from_fn(|row| (row.min(last) * row_bytes) as i32);
    let (zero_point, center) = (format.zero_point(), _mm512_set1_ps(prepared.codes.center as f32));
    let doubled = i32::from(doubled(BITS) && KIND == AFFINE);
    let mut sums = vec![_mm512_setzero_ps(); m];
    // Many rows of x have theirs in the same columns.
    let (mut column, mut weights) = (None, _mm512_setzero_ps());
    for outlier in prepared.outliers.all() {
        let k = outlier.column();
        if column != Some(k) {
            column = Some(k);
            // The four bytes in which the code lies, none of them behind the row.
            let byte = (k * BITS / 8).min(row_bytes - 4);
            let shift = (k * BITS - byte * 8) as u32;
            let (scales, biases) =
                (&params.scales[k / format.group_size()], params.stored_biases.get(k / format.group_size()));
            // SAFETY: the rows have the bytes, as long as there are columns; arrays have the sixteen numbers of a vector.
            weights = unsafe {
                let offsets = _mm512_loadu_si512(offsets.as_ptr().cast());
                let words = _mm512_i32gather_epi32::<1>(offsets, first.add(byte).cast());
                let codes = _mm512_srlv_epi32(words, _mm512_set1_epi32(shift as i32));
                let codes = _mm512_and_si512(codes, _mm512_set1_epi32((1 << BITS) - 1));
                let integers = match KIND {
                    AFFINE => _mm512_sllv_epi32(codes, _mm512_set1_epi32(doubled)),
                    _ => {
                        let table = const { table(KIND) };
                        let table = _mm512_cvtepu8_epi32(_mm_loadu_si128(table.as_ptr().cast()));
                        _mm512_permutexvar_epi32(codes, table)
                    }
                };
                let codes = _mm512_cvtepi32_ps(integers);
                let scales = _mm512_loadu_ps(scales.as_ptr());
                let biases = biases.map_or(_mm512_setzero_ps(), |biases| _mm512_loadu_ps(biases.as_ptr()));
                // As the scalar reference rounds them: an outlier shows every bit of a weight that is almost zero.
                match zero_point {
                    ZeroPoint::None => _mm512_mul_ps(_mm512_sub_ps(codes, center), scales),
                    ZeroPoint::Midpoint => _mm512_fmadd_ps(codes, scales, biases),
                    ZeroPoint::Bias => _mm512_add_ps(_mm512_mul_ps(codes, scales), biases),
                }
            };
        }
        if let Some(sum) = sums.get_mut(outlier.row()) {
            *sum = _mm512_fmadd_ps(_mm512_set1_ps(outlier.x), weights, *sum);
        }
    }
    for of_x in &prepared.with_outliers {
        let mut sums_of_rows = [0f32; ROWS];
        // SAFETY: the array has the sixteen numbers of a vector.
        unsafe { _mm512_storeu_ps(sums_of_rows.as_mut_ptr(), sums[*of_x]) };
        for row in 0..out.len() / m {
            out[row * m + of_x] += sums_of_rows[row];
        }
    }
}
