//! A column of a weight: what outliers among the activations are multiplied by.

use super::group_params::ROWS_PER_PASS;
use super::matrix::{widened, GroupValues, PackedMatrix};
use crate::format::{Scale, ZeroPoint, SUPER_BLOCK};
use half::f16;

/// Every so many-th value from the first on.
#[derive(Clone, Copy)]
struct Steps {
    first: usize,
    step: usize,
}

impl Steps {
    /// The values that there are.
    fn of<T: Copy>(self, all: &[T]) -> impl Iterator<Item = T> + '_ {
        all.get(self.first..).unwrap_or_default().iter().step_by(self.step.max(1)).copied()
    }
}

/// Writes what `of` makes of each value; what there is no value for stays as it is.
#[inline(always)]
fn write<T: Copy>(values: impl Iterator<Item = T>, out: &mut [f32], of: impl Fn(T) -> f32) {
    out.iter_mut().zip(values).for_each(|(out, value)| *out = of(value));
}

/// Scales or biases as f32.
fn numbers(values: GroupValues, kind: Scale, steps: Steps, out: &mut [f32]) {
    match values {
        GroupValues::Byte(bytes) => match kind {
            Scale::E8m0 => write(steps.of(bytes), out, |byte| Scale::E8m0.value(byte)),
            Scale::E4m3 => write(steps.of(bytes), out, |byte| Scale::E4m3.value(byte)),
            Scale::SuperBlock => write(steps.of(bytes), out, |byte| Scale::SuperBlock.value(byte)),
            // Float scales are no bytes.
            Scale::Float => {}
        },
        GroupValues::F16(values) => write(steps.of(values), out, widened),
        GroupValues::Bf16(values) => write(steps.of(values), out, |value| value.to_f32()),
        GroupValues::F32(values) => write(steps.of(values), out, |value| value),
    }
}

impl PackedMatrix<'_> {
    /// The weights of as many rows in a column as `out` has room for, as the scalar reference dequantizes them; NaN where
    /// there is none.
    pub(super) fn column(&self, first_row: usize, k: usize, out: &mut [f32]) {
        let parts = (first_row..).step_by(ROWS_PER_PASS).zip(out.chunks_mut(ROWS_PER_PASS));
        parts.for_each(|(first_row, out)| self.part_of_column(first_row, k, out));
    }

    /// The same of up to [`ROWS_PER_PASS`] rows.
    fn part_of_column(&self, first_row: usize, k: usize, out: &mut [f32]) {
        self.elements_of_column(first_row, k, out);
        let along = |of_row: usize, index: usize| Steps { first: first_row * of_row + index, step: of_row };
        let groups = along(self.groups_per_row(), k / self.format.group_size());
        let blocks = along(self.k / SUPER_BLOCK, k / SUPER_BLOCK);
        let read = |values, of: Option<&[f16]>| {
            let mut all = [f32::NAN; ROWS_PER_PASS];
            numbers(values, self.format.scale(), groups, &mut all);
            if let Some(of) = of {
                let mut counted = [f32::NAN; ROWS_PER_PASS];
                write(blocks.of(of), &mut counted, widened);
                all.iter_mut().zip(counted).for_each(|(value, of)| *value *= of);
            }
            all
        };
        let scales =
            read(self.scales, self.super_blocks.map(|of| of.scales)).map(|scale| scale * self.global_scale);
        let weights = out.iter_mut().zip(scales);
        match (self.format.zero_point(), self.biases) {
            (ZeroPoint::Bias, biases) => {
                let of = self.super_blocks.map(|of| of.biases);
                let biases = biases.map_or([f32::NAN; ROWS_PER_PASS], |biases| read(biases, of));
                weights.zip(biases).for_each(|((weight, scale), bias)| *weight = *weight * scale + bias);
            }
            (ZeroPoint::Midpoint, _) => {
                let midpoint = -self.format.midpoint();
                weights.for_each(|(weight, scale)| *weight = weight.mul_add(scale, midpoint * scale));
            }
            (ZeroPoint::None, _) => weights.for_each(|(weight, scale)| *weight *= scale),
        }
    }

    /// The elements of some rows in a column, before scales; NaN where there is none.
    fn elements_of_column(&self, first_row: usize, k: usize, out: &mut [f32]) {
        let bits = self.format.bits();
        let (row_words, first_bit) = (self.k * bits / 32, k * bits);
        let (shift, mask) = (first_bit % 32, (1 << bits) - 1);
        let words = Steps { first: first_row * row_words + first_bit / 32, step: row_words };
        out.fill(f32::NAN);
        let element = self.format.element();
        if element.uint().is_some() && shift + bits <= 32 {
            return write(words.of(self.words), out, |word| (word >> shift & mask) as f32);
        }
        // A code of 3, 5 or 6 bits may straddle two words.
        let next = Steps { first: words.first + usize::from(shift + bits > 32), ..words };
        let pairs = words.of(self.words).zip(next.of(self.words));
        write(pairs, out, |(low, high)| {
            let code = (u64::from(low) | u64::from(high) << 32) >> shift & u64::from(mask);
            element.value(code as u8)
        });
    }
}
