//! Panels and tiles of x, with AVX-512.

use super::super::group_params::GroupParams;
use super::super::isa::avx512::Avx512Vnni;
use super::super::matrix::PackedMatrix;
use super::codes::IntegerCodes;
use super::gemm::{Chunk, Panels, Sums};
use super::outliers::{Magnitudes, Outlier};
use super::panel_columns::Columns;
use super::unpack::with_codes;
use super::weight_panels::{unpack_rows, Panel, PanelParams};
use super::x_tiles::{Layout, Tile};
use std::arch::x86_64::*;
use std::ops::Range;

impl Panels for Avx512Vnni {
    fn magnitudes(self) -> impl Magnitudes {
        self.avx512
    }

    unsafe fn load(
        params: &mut PanelParams,
        matrix: &PackedMatrix,
        codes: &IntegerCodes,
        rows: (usize, usize),
        of_rows: &mut GroupParams,
    ) {
        // SAFETY: the caller vouches for the features, here and below.
        unsafe { params.load(matrix, codes, rows, of_rows) };
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx2,fma,gfni,f16c")]
    unsafe fn unpack(
        (of, layout): (&IntegerCodes, Layout),
        matrix: &PackedMatrix,
        rows: (usize, usize),
        first: usize,
        panel: &mut Panel,
    ) {
        // SAFETY: the caller vouches for the rows; codes have the width that their kind says.
        unsafe {
            with_codes!(of.kind, unpack_rows(matrix, rows, first, panel));
        }
        if matches!(layout, Layout::Rows) {
            let center = _mm512_set1_epi8(of.center as i8);
            for codes in panel {
                // SAFETY: the array has the bytes of a vector.
                unsafe {
                    let unsigned = _mm512_loadu_si512(codes.as_ptr().cast());
                    _mm512_storeu_si512(codes.as_mut_ptr().cast(), _mm512_sub_epi8(unsigned, center));
                }
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    unsafe fn add_outliers(
        columns: Columns,
        chunk: Chunk,
        outliers: (&[Outlier], Range<usize>),
        sums: &mut Sums,
    ) {
        columns.add_outliers(chunk, outliers, sums);
    }

    unsafe fn fill<const DIGITS: usize>(
        tile: &mut Tile,
        group_and_row: (usize, usize),
        x: &[f32],
        center: i32,
        order: (&[u8; 64], Layout),
    ) {
        // SAFETY: as above.
        unsafe { tile.fill::<DIGITS>(group_and_row, x, center, order) };
    }
}
