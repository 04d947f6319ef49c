//! A packed `[N, K]` weight as borrowed slices: what the CPU kernels see.

use crate::format::{dequantize_row, Scale, ZeroPoint, SUPER_BLOCK};
use crate::QuantFormat;
use half::{bf16, f16};
use std::ops::Range;

/// Scales or biases as stored.
#[derive(Clone, Copy, Debug)]
pub(crate) enum GroupValues<'a> {
    Byte(&'a [u8]),
    F16(&'a [f16]),
    Bf16(&'a [bf16]),
    F32(&'a [f32]),
}

impl<'a> GroupValues<'a> {
    /// The part of one matrix of a stack, or of one row of a matrix; empty when out of range.
    pub(super) fn slice(self, start: usize, len: usize) -> Self {
        fn part<T>(all: &[T], start: usize, len: usize) -> &[T] {
            all.get(start..).and_then(|rest| rest.get(..len)).unwrap_or_default()
        }
        match self {
            Self::Byte(all) => Self::Byte(part(all, start, len)),
            Self::F16(all) => Self::F16(part(all, start, len)),
            Self::Bf16(all) => Self::Bf16(part(all, start, len)),
            Self::F32(all) => Self::F32(part(all, start, len)),
        }
    }

    /// Converts to f32. Exact but for the multiplication of a byte's scale by a global scale.
    #[inline(always)]
    fn to_f32(self, kind: Scale, global_scale: f32, out: &mut [f32]) {
        match self {
            Self::Byte(bytes) => {
                for (value, &byte) in out.iter_mut().zip(bytes) {
                    *value = kind.value(byte) * global_scale;
                }
            }
            // Written out, these loops vectorize.
            Self::F16(values) => {
                out.iter_mut().zip(values).for_each(|(out, value)| *out = widened(*value));
            }
            Self::Bf16(values) => {
                for (out, value) in out.iter_mut().zip(values) {
                    *out = f32::from_bits(u32::from(value.to_bits()) << 16);
                }
            }
            Self::F32(values) => out.iter_mut().zip(values).for_each(|(out, value)| *out = *value),
        }
    }
}

/// f16 as f32.
#[inline(always)]
pub(super) fn widened(value: f16) -> f32 {
    let bits = u32::from(value.to_bits());
    // 112 is the difference of the biases. One binade up, the leading one that a subnormal does not have is 2^-14.
    let magnitude = (bits & 0x7FFF) << 13;
    let normal = f32::from_bits(magnitude + (112 << 23));
    let subnormal = f32::from_bits(magnitude + (113 << 23)) - 6.103_515_6e-5;
    let finite = if magnitude < 1 << 23 { subnormal } else { normal };
    let not_finite = f32::from_bits(magnitude | f32::INFINITY.to_bits());
    let value = if magnitude < 0x7C00 << 13 { finite } else { not_finite };
    f32::from_bits(value.to_bits() | (bits & 0x8000) << 16)
}

/// What the bytes of scales and biases count, for each super-block; no biases where the format has none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SuperBlockValues<'a> {
    pub(crate) scales: &'a [f16],
    pub(crate) biases: &'a [f16],
}

/// A packed weight `[rows, k]` in row-major order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PackedMatrix<'a> {
    pub(crate) format: QuantFormat,
    pub(crate) rows: usize,
    pub(crate) k: usize,
    pub(crate) words: &'a [u32],
    pub(crate) scales: GroupValues<'a>,
    /// None where the format has none.
    pub(crate) biases: Option<GroupValues<'a>>,
    /// Multiplier of every scale; 1 where the format has none.
    pub(crate) global_scale: f32,
    /// None where the format has none.
    pub(crate) super_blocks: Option<SuperBlockValues<'a>>,
}

impl<'a> PackedMatrix<'a> {
    pub(crate) fn groups_per_row(&self) -> usize {
        self.k / self.format.group_size()
    }

    /// The packed codes of a row.
    #[inline(always)]
    pub(crate) fn row_words(&self, row: usize) -> &'a [u32] {
        let len = self.k * self.format.bits() / 32;
        self.words.get(row * len..).and_then(|rest| rest.get(..len)).unwrap_or_default()
    }

    /// The words of `rows` rows from `first_row` on, or of as many as there are, and how many rows that is.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    pub(super) fn rows_words(&self, first_row: usize, rows: usize) -> (&'a [u32], usize) {
        let row_words = self.k * self.format.bits() / 32;
        let rows = rows.min(self.rows.saturating_sub(first_row));
        let words = self.words.get(first_row * row_words..).and_then(|words| words.get(..rows * row_words));
        words.map_or((&[], 0), |words| (words, rows))
    }

    /// Where scales, biases, and those of super-blocks begin of a row, which need not exist, and how many bytes a row has of each.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn scales_from(&self, row: usize) -> [(*const u8, usize); 4] {
        fn from<T>(values: &[T], row: usize, per_row: usize) -> (*const u8, usize) {
            (values.as_ptr().wrapping_add(row * per_row).cast(), per_row * size_of::<T>())
        }
        let groups = self.groups_per_row();
        let of_groups = |values| match values {
            GroupValues::Byte(values) => from(values, row, groups),
            GroupValues::F16(values) => from(values, row, groups),
            GroupValues::Bf16(values) => from(values, row, groups),
            GroupValues::F32(values) => from(values, row, groups),
        };
        let none = (std::ptr::null(), 0);
        let of_blocks = |values| from::<f16>(values, row, self.k / SUPER_BLOCK);
        [
            of_groups(self.scales),
            self.biases.map_or(none, of_groups),
            self.super_blocks.map_or(none, |of| of_blocks(of.scales)),
            self.super_blocks.map_or(none, |of| of_blocks(of.biases)),
        ]
    }

    /// Writes scales and biases of some groups of a row as f32 to the places of these groups in each buffer.
    #[inline(always)]
    pub(crate) fn row_params(
        &self,
        row: usize,
        groups: Range<usize>,
        scales: &mut [f32],
        biases: &mut [f32],
    ) {
        let (start, len) = (row * self.groups_per_row() + groups.start, groups.len());
        let kind = self.format.scale();
        let scales = scales.get_mut(groups.clone()).unwrap_or_default();
        let biases = biases.get_mut(groups).unwrap_or_default();
        self.scales.slice(start, len).to_f32(kind, self.global_scale, scales);
        if let Some(of) = self.super_blocks {
            self.multiply_by_super_blocks(of.scales, start, scales);
        }
        match self.format.zero_point() {
            ZeroPoint::Bias => {
                if let Some(all) = self.biases {
                    all.slice(start, len).to_f32(kind, 1.0, biases);
                }
                if let Some(of) = self.super_blocks {
                    self.multiply_by_super_blocks(of.biases, start, biases);
                }
            }
            ZeroPoint::Midpoint => {
                let zero = self.format.midpoint();
                for (bias, scale) in biases.iter_mut().zip(&*scales) {
                    *bias = -zero * scale;
                }
            }
            ZeroPoint::None => {}
        }
    }

    /// Multiplies the bytes of groups from `start` on by the numbers of their super-blocks: these products are exact.
    #[inline(always)]
    fn multiply_by_super_blocks(&self, all: &[f16], start: usize, values: &mut [f32]) {
        let groups = SUPER_BLOCK / self.format.group_size();
        let mut of = all.iter().skip(start / groups).map(|value| widened(*value));
        // The first super-block may have begun before `start`.
        let (first, rest) = values.split_at_mut((groups - start % groups).min(values.len()));
        for values in std::iter::once(first).chain(rest.chunks_mut(groups)) {
            let of = of.next().unwrap_or(f32::NAN);
            values.iter_mut().for_each(|value| *value *= of);
        }
    }

    /// Whether `q * scale + bias` has the same bits fused and in two steps: a code times a 16-bit scale is exact, a code
    /// times an f32 scale or the product of a byte and an f16 number is not, and without a bias there is one step.
    pub(crate) fn scaling_is_exact(&self) -> bool {
        match self.format.zero_point() {
            ZeroPoint::Bias | ZeroPoint::Midpoint => {
                !matches!(self.scales, GroupValues::F32(_)) && self.super_blocks.is_none()
            }
            ZeroPoint::None => true,
        }
    }

    /// Dequantizes a row with the scalar reference.
    pub(crate) fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        let groups = self.groups_per_row();
        let mut scales = vec![0.0; groups];
        let mut biases = vec![0.0; if self.biases.is_some() { groups } else { 0 }];
        self.row_params(row, 0..groups, &mut scales, &mut biases);
        dequantize_row(self.format, self.row_words(row), &scales, &biases, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_is_widened() {
        for bits in 0..=u16::MAX {
            let (value, expected) = (widened(f16::from_bits(bits)), f16::from_bits(bits).to_f32());
            assert!(
                value.to_bits() == expected.to_bits() || value.is_nan() && expected.is_nan(),
                "{bits:#x}"
            );
        }
    }
}
