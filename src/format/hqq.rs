//! HQQ as mistral.rs has it: half-quadratic quantization (Badri and Shaji, 2023) of groups along axis 0, whose zeros are moved
//! until the error grows.
//!
//! The weight is looked at as a matrix of 64 rows, whatever its shape: a column is a group.

use super::uqff_types::UqffNumbers;
use rayon::prelude::*;

/// Elements of a group.
pub(super) const GROUP: usize = 64;

/// How often zeros are moved at most.
const STEPS: usize = 10;

/// Of the norm of errors, that of the first step, and what it grows by.
const NORM: f32 = 0.7;
const BETA: f64 = 10.;
const KAPPA: f64 = 1.01;

/// The most that weights are multiplied by.
const LARGEST: f32 = 2e4;

/// Groups that a thread works on at a time, so that sums do not depend on how many there are.
const CHUNK: usize = 1024;

/// What is found for a group: a factor instead of a scale, and the zero.
#[derive(Clone, Copy)]
struct Found {
    factor: f32,
    zero: f32,
}

impl Found {
    fn of(group: &[f32], most: f32) -> Self {
        let low = group.iter().copied().fold(f32::INFINITY, f32::min);
        let high = group.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let factor = ((1. / (high - low)) * most).clamp(0., LARGEST);
        Self { factor, zero: -low * factor }
    }

    fn code(self, weight: f32, most: f32) -> f32 {
        (weight * self.factor + self.zero).round().clamp(0., most)
    }

    /// The zero for which shrunken errors have the mean of nothing, and the sum of the errors before.
    fn moved(self, group: &[f32], most: f32, beta: f64) -> (f32, f64) {
        let (mut sum, mut errors) = (0f32, 0f64);
        for weight in group {
            let code = self.code(*weight, most);
            let error = weight - (code - self.zero) / self.factor;
            errors += f64::from(error.abs());
            sum += code - (weight - shrunken(error, beta)) * self.factor;
        }
        (sum * (1. / GROUP as f32), errors)
    }

    fn squared_error(self, group: &[f32], most: f32) -> f64 {
        let scale = 1. / self.factor;
        let error = |weight: &f32| f64::from(weight - (self.code(*weight, most) - self.zero) * scale).powi(2);
        group.iter().map(error).sum()
    }

    /// With factor and zero of the least squares for its codes, if that leaves less.
    fn searched(self, group: &[f32], most: f32) -> Self {
        let mut sums = [0f64; 4];
        for weight in group {
            let (code, weight) = (f64::from(self.code(*weight, most)), f64::from(*weight));
            for (sum, term) in sums.iter_mut().zip([code, code * code, weight, code * weight]) {
                *sum += term;
            }
        }
        let ([codes, squares, weights, products], count) = (sums, group.len() as f64);
        let scale = (count * products - codes * weights) / (count * squares - codes * codes);
        let zero = (scale * codes - weights) / count / scale;
        let fitted = Self { factor: (1. / scale) as f32, zero: zero as f32 };
        let is_one = fitted.factor.is_finite() && fitted.factor > 0. && fitted.zero.is_finite();
        match is_one && fitted.squared_error(group, most) < self.squared_error(group, most) {
            true => fitted,
            false => self,
        }
    }
}

/// What is left of an error for the norm: nothing of a small one.
fn shrunken(error: f32, beta: f64) -> f32 {
    let (magnitude, step) = (error.abs(), (1. / beta) as f32);
    // A power below zero of a number below one is above one.
    if magnitude <= step {
        return 0.;
    }
    ((magnitude - step * magnitude.powf(NORM - 1.)).max(0.)).copysign(error)
}

/// Quantizes a whole number of groups.
pub(super) fn quantize(weights: &[f32], bits: u32, search: bool) -> UqffNumbers {
    let most = f32::from((1u16 << bits) - 1);
    let count = weights.len() / GROUP;
    // A group after the other.
    let groups: Vec<f32> = (0..count)
        .into_par_iter()
        .flat_map_iter(|group| weights.iter().skip(group).step_by(count.max(1)).copied())
        .collect();
    let group = |index: usize| groups.get(index * GROUP..(index + 1) * GROUP).unwrap_or_default();
    let mut found: Vec<_> = groups.par_chunks_exact(GROUP).map(|group| Found::of(group, most)).collect();
    let (mut beta, mut least) = (BETA, 1e4);
    for _ in 0..STEPS {
        let of_chunk = |(chunk, found): (usize, &mut [Found])| {
            let mut errors = 0.;
            for (index, found) in found.iter_mut().enumerate() {
                let (zero, of_group) = found.moved(group(chunk * CHUNK + index), most, beta);
                found.zero = zero;
                errors += of_group;
            }
            errors
        };
        let errors: Vec<f64> = found.par_chunks_mut(CHUNK).enumerate().map(of_chunk).collect();
        let mean = errors.iter().sum::<f64>() / weights.len() as f64;
        beta *= KAPPA;
        if mean >= least {
            break;
        }
        least = mean;
    }
    if search {
        let pairs = found.par_iter_mut().zip(groups.par_chunks_exact(GROUP));
        pairs.for_each(|(found, group)| *found = found.searched(group, most));
    }
    let scales: Vec<_> = found.iter().map(|found| 1. / found.factor).collect();
    let zeros: Vec<_> = found.iter().map(|found| found.zero).collect();
    // An element belongs to the group of its place in a row of all groups.
    let codes =
        weights.iter().zip(found.iter().cycle()).map(|(weight, found)| found.code(*weight, most) as u8);
    let codes: Vec<_> = codes.collect();
    let of_groups = zeros.iter().zip(&scales).cycle();
    let value = |(code, (zero, scale)): (&u8, (&f32, &f32))| (f32::from(*code) - zero) * scale;
    let values = codes.iter().zip(of_groups).map(value).collect();
    let codes = match bits {
        8 => codes,
        _ => {
            // The first half of the codes are the high ones.
            let (high, low) = codes.split_at(codes.len() / 2);
            high.iter().zip(low).map(|(high, low)| high << 4 | low).collect()
        }
    };
    UqffNumbers { codes, scales, zeros, values }
}
