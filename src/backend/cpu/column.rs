//! A column of a weight: what outliers among the activations are multiplied by.

use super::group_params::ROWS_PER_PASS;
use super::matrix::{widened, GroupValues, PackedMatrix};
use crate::format::{Scale, ZeroPoint, SUPER_BLOCK};
use half::{bf16, f16};

/// A value of each row of a few.
type Column<T> = [T; ROWS_PER_PASS];

/// Every so many-th value from the first on.
#[derive(Clone, Copy)]
struct Steps {
    first: usize,
    step: usize,
}

impl Steps {
    /// The values, and `none` where there is none. A plain loop, since iterators by steps divide before they begin, and columns
    /// are short; and without arithmetic, which is carried out for all values together then.
    #[inline(always)]
    fn of<T: Copy>(self, all: &[T], none: T) -> Column<T> {
        let mut column = [none; ROWS_PER_PASS];
        let mut at = self.first;
        for value in &mut column {
            let Some(found) = all.get(at) else { break };
            *value = *found;
            at += self.step;
        }
        column
    }
}

/// What `of` makes of each value.
#[inline(always)]
fn each<T: Copy>(values: Column<T>, of: impl Fn(T) -> f32) -> Column<f32> {
    let mut numbers = [0.; ROWS_PER_PASS];
    for (number, value) in numbers.iter_mut().zip(values) {
        *number = of(value);
    }
    numbers
}

/// Scales or biases as f32; NaN where there is none.
#[inline(always)]
fn numbers(values: GroupValues, kind: Scale, steps: Steps) -> Column<f32> {
    match values {
        GroupValues::Byte(bytes) => {
            let bytes = steps.of(bytes, 0);
            match kind {
                Scale::E8m0 => each(bytes, |byte| Scale::E8m0.value(byte)),
                Scale::E4m3 => each(bytes, |byte| Scale::E4m3.value(byte)),
                Scale::SuperBlock => each(bytes, |byte| Scale::SuperBlock.value(byte)),
                // Float scales are no bytes.
                Scale::Float => [f32::NAN; ROWS_PER_PASS],
            }
        }
        GroupValues::F16(values) => each(steps.of(values, f16::NAN), widened),
        GroupValues::Bf16(values) => each(steps.of(values, bf16::NAN), bf16::to_f32),
        GroupValues::F32(values) => steps.of(values, f32::NAN),
    }
}

impl PackedMatrix<'_> {
    /// The weights of as many rows in a column as `out` has room for, as the scalar reference dequantizes them; NaN where
    /// there is none.
    #[inline(always)]
    pub(super) fn column(&self, first_row: usize, k: usize, out: &mut [f32]) {
        let parts = (first_row..).step_by(ROWS_PER_PASS).zip(out.chunks_mut(ROWS_PER_PASS));
        parts.for_each(|(first_row, out)| {
            let rows = self.rows.saturating_sub(first_row);
            let (there, beyond) = out.split_at_mut(rows.min(out.len()));
            there.copy_from_slice(&self.part_of_column(first_row, k)[..there.len()]);
            beyond.fill(f32::NAN);
        });
    }

    /// The same of [`ROWS_PER_PASS`] rows; anything where there is none.
    #[inline(always)]
    fn part_of_column(&self, first_row: usize, k: usize) -> Column<f32> {
        let elements = self.elements_of_column(first_row, k);
        let super_blocks = self.super_blocks;
        let scales = self.of_groups(self.scales, super_blocks.map(|of| of.scales), first_row, k);
        let scales = each(scales, |scale| scale * self.global_scale);
        let mut weights = elements;
        let of_rows = weights.iter_mut().zip(scales);
        match (self.format.zero_point(), self.biases) {
            (ZeroPoint::Bias, biases) => {
                let biases = match biases {
                    Some(biases) => self.of_groups(biases, super_blocks.map(|of| of.biases), first_row, k),
                    None => [f32::NAN; ROWS_PER_PASS],
                };
                of_rows.zip(biases).for_each(|((weight, scale), bias)| *weight = *weight * scale + bias);
            }
            (ZeroPoint::Midpoint, _) => {
                let midpoint = -self.format.midpoint();
                of_rows.for_each(|(weight, scale)| *weight = weight.mul_add(scale, midpoint * scale));
            }
            (ZeroPoint::None, _) => of_rows.for_each(|(weight, scale)| *weight *= scale),
        }
        weights
    }

    /// Scales or biases of the groups that some rows have in a column, times what they count where there are super-blocks.
    #[inline(always)]
    fn of_groups(&self, values: GroupValues, of: Option<&[f16]>, first_row: usize, k: usize) -> Column<f32> {
        let along = |of_row: usize, index: usize| Steps { first: first_row * of_row + index, step: of_row };
        let groups = along(self.groups_per_row(), k / self.format.group_size());
        let mut all = numbers(values, self.format.scale(), groups);
        if let Some(of) = of {
            let counted = each(along(self.k / SUPER_BLOCK, k / SUPER_BLOCK).of(of, f16::NAN), widened);
            all.iter_mut().zip(counted).for_each(|(value, of)| *value *= of);
        }
        all
    }

    /// The elements of some rows in a column, before scales; that of code 0 where there is none.
    #[inline(always)]
    fn elements_of_column(&self, first_row: usize, k: usize) -> Column<f32> {
        let bits = self.format.bits();
        let (row_words, first_bit) = (self.k * bits / 32, k * bits);
        let (shift, mask) = (first_bit % 32, (1 << bits) - 1);
        let words = Steps { first: first_row * row_words + first_bit / 32, step: row_words };
        let element = self.format.element();
        let low = words.of(self.words, 0);
        if element.uint().is_some() && shift + bits <= 32 {
            return each(low, |word| (word >> shift & mask) as f32);
        }
        // A code of 3, 5 or 6 bits may straddle two words.
        let next = Steps { first: words.first + usize::from(shift + bits > 32), ..words };
        let high = next.of(self.words, 0);
        let mut elements = [0.; ROWS_PER_PASS];
        for (number, (low, high)) in elements.iter_mut().zip(low.into_iter().zip(high)) {
            let code = (u64::from(low) | u64::from(high) << 32) >> shift & u64::from(mask);
            *number = element.value(code as u8);
        }
        elements
    }
}
