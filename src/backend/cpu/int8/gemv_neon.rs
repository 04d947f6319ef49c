//! One row of x times integer codes, with the dot products of bytes that ARM CPUs have; a few rows one after the other.
//!
//! As in `gemv_vnni`, x becomes fixed-point numbers, and codes are multiplied as the integers that they are. `sdot`
//! multiplies signed bytes with signed bytes, so that codes are taken relative to their center first, and nothing is left
//! to subtract from sums.
//!
//! Codes of 1, 2 and 4 bits are shifted and masked, so that a lane of 32 bits covers neighbours; all others are unpacked in
//! their order ([`Geometry::place`]).

#![allow(clippy::needless_range_loop)] // Loops of constant length over arrays that have to stay in registers.

pub(super) mod unpack;
mod x;

use super::super::aligned::Aligned;
use super::super::fast_kernel::{each_row_of_x, Digits, NotRepresentable, PreparedX, RowKernel};
use super::super::group_params::ROWS_PER_PASS;
use super::super::isa::neon::{dot, NeonDotprod};
use super::super::matrix::PackedMatrix;
use super::super::tasks::Threads;
use super::codes::IntegerCodes;
use super::outliers::{most_by_columns, Found, Outliers};
use super::tables::{kind_of, with_layout, IQ4, MXFP4};
use crate::QuantFormat;
use std::arch::aarch64::*;
use unpack::load_block;
use x::{Geometry, XRow};

/// 32-bit lanes of a vector.
const LANES: usize = 4;

/// Bytes of the largest block that a row may end within.
const INCOMPLETE: usize = 16;

/// The kernel, and the proof that the CPU has its instructions.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Int8GemvNeon {
    isa: NeonDotprod,
}

impl Int8GemvNeon {
    pub(in super::super) fn new(isa: NeonDotprod) -> Self {
        Self { isa }
    }
}

impl RowKernel for Int8GemvNeon {
    fn supports(&self, format: QuantFormat) -> bool {
        // A lane has codes of one group.
        IntegerCodes::of(format)
            .is_some_and(|codes| format.group_size() >= Geometry::of(&codes, format.group_size()).of_lane())
    }

    fn prepare(
        &self,
        format: QuantFormat,
        k: usize,
        x: &[f32],
        digits: Digits,
    ) -> Result<Box<dyn PreparedX>, NotRepresentable> {
        let codes = IntegerCodes::of(format).ok_or(NotRepresentable)?;
        let group_size = format.group_size();
        let most = (digits, most_by_columns(k));
        let found = Found::new(self.isa.neon, (x, k), group_size, most, Threads::This)?;
        let x = found.taken_out_of(x, k);
        let geometry = Geometry::of(&codes, group_size);
        let rows = x.chunks_exact(k).map(|x| XRow::new(&codes, geometry, x, digits.count));
        let rows = rows.collect::<Result<_, _>>()?;
        Ok(Box::new(Prepared { codes, rows, outliers: found.by_columns(), _isa: self.isa }))
    }
}

/// Rows of x as fixed-point numbers for these codes.
struct Prepared {
    codes: IntegerCodes,
    rows: Vec<XRow>,
    outliers: Outliers,
    /// The CPU has the features of all functions here.
    _isa: NeonDotprod,
}

impl PreparedX for Prepared {
    fn m(&self) -> usize {
        self.rows.len()
    }

    fn rows(&self, matrix: &PackedMatrix, first_row: usize, out: &mut [f32]) {
        let m = self.rows.len().max(1);
        let groups = matrix.groups_per_row();
        let [mut scales, mut biases] = [(); 2].map(|()| vec![0f32; ROWS_PER_PASS * groups]);
        let mut scaled = Scaled::new(groups);
        // Every row of x, and its outliers, meet a few rows of the weight while these are in a near cache.
        for (pass, out) in out.chunks_mut(ROWS_PER_PASS * m).enumerate() {
            let first_row = first_row + pass * ROWS_PER_PASS;
            let rows = out.len() / m;
            // Rows lie one behind the other: their groups are those of one long row.
            matrix.row_params(first_row, 0..rows * groups, &mut scales, &mut biases);
            each_row_of_x(m, out, |index, sums| {
                if let Some(x) = self.rows.get(index) {
                    let center = self.codes.center as f32 * self.codes.unit;
                    scaled.fill((&scales, &biases), groups, x, center);
                    // SAFETY: `_isa` proves that the CPU has the features of the function.
                    unsafe { self.dot_pass(x, (matrix, first_row), &scaled, sums) }
                }
            });
            self.outliers.add_products(matrix, first_row, m, out);
        }
    }
}

impl Prepared {
    /// Dot products of rows of a weight with `x`, one for each sum.
    #[target_feature(enable = "neon,dotprod")]
    fn dot_pass(&self, x: &XRow, of: (&PackedMatrix, usize), scaled: &Scaled, sums: &mut [f32]) {
        /// The function for these bits, vectors and kind, with as many digits as x has.
        macro_rules! dot_rows {
            ($bits:literal, $vectors:literal, $kind:ident) => {
                match x.digits {
                    1 => dot_rows::<$bits, $vectors, $kind, 1>(x, of, scaled, sums),
                    2 => dot_rows::<$bits, $vectors, $kind, 2>(x, of, scaled, sums),
                    _ => dot_rows::<$bits, $vectors, $kind, 3>(x, of, scaled, sums),
                }
            };
        }
        let layout = (x.geometry.bits, x.geometry.vectors, kind_of(self.codes.kind));
        with_layout!(layout, dot_rows, (4, _, IQ4) => dot_rows!(4, 2, IQ4))
    }
}

/// Scales of the rows of a pass times the units of x, and what biases add.
struct Scaled {
    /// For each row, partial sums of the bias term, one for each lane, then a scale for each group, and zeros.
    all: Aligned<f32>,
    stride: usize,
}

impl Scaled {
    fn new(groups: usize) -> Self {
        // A vector may be read from the last group on.
        let stride = LANES + (groups + LANES).next_multiple_of(LANES);
        Self { all: Aligned::new(ROWS_PER_PASS * stride), stride }
    }

    /// Those of rows with so many groups in each. `center *` scales are added to biases.
    fn fill(&mut self, (scales, biases): (&[f32], &[f32]), groups: usize, x: &XRow, center: f32) {
        let rows = scales.chunks_exact(groups.max(1)).zip(biases.chunks_exact(groups.max(1)));
        for (to, (scales, biases)) in self.all.chunks_exact_mut(self.stride).zip(rows) {
            let (totals, to) = to.split_at_mut(LANES);
            totals.fill(0.);
            let of_x = x.units.iter().zip(&x.sums);
            for (group, (((scale, bias), (unit, sum)), to)) in
                scales.iter().zip(biases).zip(of_x).zip(to).enumerate()
            {
                *to = scale * unit;
                let total = &mut totals[group % LANES];
                *total = center.mul_add(*scale, *bias).mul_add(*sum, *total);
            }
        }
    }
}

/// See [`Prepared::dot_pass`].
#[target_feature(enable = "neon,dotprod")]
fn dot_rows<const BITS: usize, const VECTORS: usize, const KIND: u8, const DIGITS: usize>(
    x: &XRow,
    (matrix, first_row): (&PackedMatrix, usize),
    scaled: &Scaled,
    sums: &mut [f32],
) {
    let block_bytes = const { 2 * VECTORS * BITS };
    let geometry = x.geometry;
    let (words, count) = matrix.rows_words(first_row, sums.len());
    let row_bytes = words.len() / count.max(1) * 4;
    let (blocks, whole) = (row_bytes.div_ceil(block_bytes), row_bytes / block_bytes);
    // Blocks of other widths are not larger than groups, of which rows have whole ones.
    assert!(count == sums.len() && (blocks == whole || block_bytes <= INCOMPLETE));
    assert!(geometry.bits == BITS && geometry.vectors == VECTORS && x.digits == DIGITS);
    assert!(x.bytes.len() >= blocks * const { DIGITS * VECTORS * 16 });
    assert!(KIND != MXFP4 || x.block_units.len() >= blocks);
    let last_group = (blocks.saturating_sub(1) * 16 * VECTORS) >> geometry.group_shift;
    assert!(LANES + last_group + LANES <= scaled.stride && count * scaled.stride <= scaled.all.len());
    let rows = words.chunks_exact((row_bytes / 4).max(1)).zip(scaled.all.chunks_exact(scaled.stride));
    for (sum, (words, scaled)) in sums.iter_mut().zip(rows) {
        let codes = words.as_ptr().cast::<u8>();
        let scales = scaled.as_ptr().wrapping_add(LANES);
        // SAFETY: a row begins with a vector of what biases add. The assertions cover every block; whole ones lie in the
        // row, an incomplete one in `end`, with zeros behind it, and less than a block is copied there.
        unsafe {
            let mut total = vdupq_n_f32(0.);
            for block in 0..whole {
                let at = codes.add(block * block_bytes);
                total = add_block::<BITS, VECTORS, KIND, DIGITS>(x, at, scales, block, total);
            }
            if whole < blocks {
                let mut end = [0u8; INCOMPLETE];
                let rest = row_bytes - whole * block_bytes;
                std::ptr::copy_nonoverlapping(codes.add(whole * block_bytes), end.as_mut_ptr(), rest);
                total = add_block::<BITS, VECTORS, KIND, DIGITS>(x, end.as_ptr(), scales, whole, total);
            }
            // Last, since it may be far larger than what the blocks add.
            total = vaddq_f32(total, vld1q_f32(scaled.as_ptr()));
            *sum = vaddvq_f32(total) * x.unit;
        }
    }
}

/// Multiplies a block of a row, whose codes begin `at` this address, and adds the products.
///
/// # Safety
/// `x` and `scales`, those of the row, cover the block; it has its codes.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn add_block<const BITS: usize, const VECTORS: usize, const KIND: u8, const DIGITS: usize>(
    x: &XRow,
    at: *const u8,
    scales: *const f32,
    block: usize,
    total: float32x4_t,
) -> float32x4_t {
    // SAFETY: the caller vouches for what is loaded.
    unsafe {
        let codes = load_block::<BITS, VECTORS, KIND>(at);
        let digits = x.bytes.as_ptr().add(block * const { DIGITS * VECTORS * 16 });
        let mut sums = [vdupq_n_s32(0); DIGITS];
        for digit in 0..DIGITS {
            for vector in 0..VECTORS {
                let digits = vld1q_s8(digits.add((digit * VECTORS + vector) * 16));
                sums[digit] = dot(sums[digit], codes[vector], digits);
            }
        }
        let mut sum = joined(sums);
        if KIND == MXFP4 {
            sum = vmulq_n_f32(sum, *x.block_units.as_ptr().add(block));
        }
        let scales = scales.add((block * 16 * VECTORS) >> x.geometry.group_shift);
        let scales = match x.geometry.lanes_of_group {
            1 => vld1q_f32(scales),
            2 => {
                let two = vld1_f32(scales);
                vcombine_f32(vdup_lane_f32::<0>(two), vdup_lane_f32::<1>(two))
            }
            _ => vld1q_dup_f32(scales),
        };
        vfmaq_f32(total, sum, scales)
    }
}

/// The sums of digits, the highest first, as one number. Two of them fit into 32 bits: sums are below 2^18.
#[inline]
#[target_feature(enable = "neon")]
fn joined<const DIGITS: usize>(sums: [int32x4_t; DIGITS]) -> float32x4_t {
    let mut high = sums[0];
    if DIGITS > 1 {
        high = vaddq_s32(vshlq_n_s32::<8>(high), sums[1]);
    }
    let high = vcvtq_f32_s32(high);
    match DIGITS {
        3 => vfmaq_f32(vcvtq_f32_s32(sums[2]), high, vdupq_n_f32(256.)),
        _ => high,
    }
}
