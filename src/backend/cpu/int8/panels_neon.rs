//! Panels and tiles of x, with NEON: a vector is a quarter of a panel's, four rows.

#![allow(clippy::needless_range_loop)] // Loops of constant length over arrays that have to stay in registers.

use super::super::group_params::GroupParams;
use super::super::isa::neon::Neon;
use super::super::matrix::PackedMatrix;
use super::codes::IntegerCodes;
use super::gemm::{Chunk, Sums};
use super::gemv_neon::unpack::load_block;
use super::magnitudes::Magnitudes;
use super::outliers::Outlier;
use super::panel_columns::Columns;
use super::tables::with_codes;
use super::weight_panels::{rows_of_panel, transposed_packed, Panel, PanelParams, Panels};
use super::x_tiles::{unit_and_sum, Layout, Tile, LARGEST_GROUP};
use std::arch::aarch64::*;
use std::ops::Range;

impl Panels for Neon {
    fn magnitudes(self) -> impl Magnitudes {
        self
    }

    unsafe fn load(
        params: &mut PanelParams,
        matrix: &PackedMatrix,
        codes: &IntegerCodes,
        (first_row, rows): (usize, usize),
        of_rows: &mut GroupParams,
    ) {
        of_rows.load(matrix, first_row, rows);
        params.fill(codes, of_rows);
    }

    #[target_feature(enable = "neon")]
    unsafe fn unpack(
        (of, layout): (&IntegerCodes, Layout),
        matrix: &PackedMatrix,
        rows: (usize, usize),
        first: usize,
        panel: &mut Panel,
    ) {
        // SAFETY: the caller vouches for the rows; codes have the width that their kind says.
        unsafe { with_codes!(of.kind, unpack_rows(matrix, rows, first, (panel, layout))) };
    }

    unsafe fn add_outliers(
        columns: Columns,
        chunk: Chunk,
        outliers: (&[Outlier], Range<usize>),
        sums: &mut Sums,
    ) {
        columns.add_outliers(chunk, outliers, sums);
    }

    #[target_feature(enable = "neon")]
    unsafe fn fill<const DIGITS: usize>(
        tile: &mut Tile,
        at: (usize, usize),
        x: &[f32],
        center: i32,
        order: (&[u8; 64], Layout),
    ) {
        let (unit, sum) = unit_and_sum(x, DIGITS);
        let inverse = 1. / unit;
        let mut integers = [0i32; LARGEST_GROUP];
        for (to, x) in integers.as_chunks_mut::<4>().0.iter_mut().zip(x.as_chunks::<4>().0) {
            // SAFETY: both have the four numbers of a vector.
            unsafe {
                vst1q_s32(to.as_mut_ptr(), vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x.as_ptr()), inverse)))
            };
        }
        tile.put::<DIGITS>(at, &mut integers[..x.len()], (unit, sum), center, order);
    }
}

/// Bytes of a row that are unpacked at a time, at most [`STEP`].
const fn step_bytes(bits: usize) -> usize {
    if transposed_packed(bits) {
        STEP
    } else {
        2 * bits
    }
}

const STEP: usize = 16;

/// Vectors of the panel that become of a step, at most: of codes of one bit.
const VECTORS: usize = 32;

/// See [`Panels::unpack`]. Codes are less their center.
///
/// # Safety
/// The caller vouches for what that asks for; codes have `BITS` bits.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn unpack_rows<const BITS: usize, const KIND: u8>(
    matrix: &PackedMatrix,
    rows: (usize, usize),
    first: usize,
    (panel, layout): (&mut Panel, Layout),
) {
    let step = const { step_bytes(BITS) };
    let vectors = const { step_bytes(BITS) * 8 / BITS / 4 };
    let (starts, present) = rows_of_panel(matrix, rows, first, BITS);
    let (whole, rest) = (present / step, present % step);
    let mut tails = [[0u8; STEP]; 4];
    for index in 0..present.div_ceil(step) {
        let to = &mut panel[index * vectors..][..vectors];
        for quarter in 0..4 {
            let mut four = [vdupq_n_s8(0); 4];
            for row in 0..4 {
                let mut from = starts[4 * quarter + row].wrapping_add(index * step);
                if index == whole {
                    // The rest of each row, with zeros behind it.
                    // SAFETY: `rest` bytes are left of the row, less than a step, for which there is room.
                    unsafe { std::ptr::copy_nonoverlapping(from, tails[row].as_mut_ptr(), rest) };
                    from = tails[row].as_ptr();
                }
                // SAFETY: the step lies in the row or in its tail, which has as many bytes.
                four[row] = unsafe {
                    match const { transposed_packed(BITS) } {
                        true => vld1q_s8(from.cast()),
                        false => load_block::<BITS, 1, KIND>(from)[0],
                    }
                };
            }
            let mut all = [four[0]; VECTORS];
            for (column, to) in transposed(four).into_iter().zip(all.chunks_exact_mut(vectors / 4)) {
                match BITS {
                    1 => to.copy_from_slice(&unpacked::<1, 8, KIND>(column)),
                    2 => to.copy_from_slice(&unpacked::<2, 4, KIND>(column)),
                    4 => to.copy_from_slice(&unpacked::<4, 2, KIND>(column)),
                    8 => to.copy_from_slice(&unpacked::<8, 1, KIND>(column)),
                    _ => to.copy_from_slice(&[column]),
                }
            }
            match layout.interleaved() {
                1 => {
                    for (to, codes) in to.iter_mut().zip(all) {
                        store(codes, &mut to[16 * quarter..]);
                    }
                }
                _ => {
                    for (to, [even, odd]) in to.as_chunks_mut::<2>().0.iter_mut().zip(all.as_chunks::<2>().0)
                    {
                        let [even, odd] = [*even, *odd].map(|codes| vreinterpretq_s32_s8(codes));
                        let to = &mut to.as_flattened_mut()[32 * quarter..];
                        store(vreinterpretq_s8_s32(vzip1q_s32(even, odd)), to);
                        store(vreinterpretq_s8_s32(vzip2q_s32(even, odd)), &mut to[16..]);
                    }
                }
            }
        }
    }
}

/// See [`load_block`].
#[inline]
#[target_feature(enable = "neon")]
fn unpacked<const BITS: usize, const VECTORS: usize, const KIND: u8>(
    packed: int8x16_t,
) -> [int8x16_t; VECTORS] {
    // SAFETY: a block of these codes is a vector.
    unsafe { load_block::<BITS, VECTORS, KIND>((&raw const packed).cast()) }
}

/// Stores a vector.
#[inline]
#[target_feature(enable = "neon")]
fn store(codes: int8x16_t, to: &mut [u8]) {
    // SAFETY: the slice has the sixteen bytes that are written.
    unsafe { vst1q_s8(to[..16].as_mut_ptr().cast(), codes) };
}

/// Four rows as four columns: lane r of vector l is lane l of row r.
#[inline]
#[target_feature(enable = "neon")]
fn transposed(rows: [int8x16_t; 4]) -> [int8x16_t; 4] {
    let mut lanes = [vdupq_n_s32(0); 4];
    for row in 0..4 {
        lanes[row] = vreinterpretq_s32_s8(rows[row]);
    }
    let [a, b, c, d] = lanes;
    let pairs = [(vtrn1q_s32(a, b), vtrn1q_s32(c, d)), (vtrn2q_s32(a, b), vtrn2q_s32(c, d))];
    let mut columns = rows;
    for parity in 0..2 {
        let (ab, cd) = pairs[parity];
        let (ab, cd) = (vreinterpretq_s64_s32(ab), vreinterpretq_s64_s32(cd));
        columns[parity] = vreinterpretq_s8_s64(vtrn1q_s64(ab, cd));
        columns[parity + 2] = vreinterpretq_s8_s64(vtrn2q_s64(ab, cd));
    }
    columns
}
