//! The types without super-blocks, bit for bit as the reference of ggml quantizes (`quants.py` of the Python package `gguf`),
//! or with a scale of a smaller squared error.

use super::ggml_blocks::{append_half, five_bits, half, halves};
use super::ggml_super_blocks::Group;

/// Parts of the range that a search divides codes by, in tenths of a code more or fewer.
const TENTHS: std::ops::RangeInclusive<i8> = -9..=9;

/// The number of the largest magnitude, the first of several.
fn furthest(weights: &[f32]) -> f32 {
    weights.iter().fold(0f32, |most, weight| if weight.abs() > most.abs() { *weight } else { most })
}

fn inverse(scale: f32) -> f32 {
    // Of numbers so small that no F16 scale is left of them, too.
    let inverse = 1. / scale;
    if inverse.is_finite() {
        inverse
    } else {
        0.
    }
}

/// As columns count.
fn squared_error(Group { weights, columns }: Group, codes: &[f32], scale: f32) -> f64 {
    let error = |((weight, column), code): ((&f32, &f32), &f32)| {
        f64::from(weight - code * scale).powi(2) * f64::from(*column)
    };
    weights.iter().zip(columns).zip(codes).map(error).sum()
}

/// Codes from `low` to `high`, whole numbers, that are nearest with a scale.
fn nearest(weights: &[f32], scale: f32, (low, high): (f32, f32)) -> Vec<f32> {
    let inverse = inverse(scale);
    weights.iter().map(|weight| (weight * inverse).round_ties_even().clamp(low, high)).collect()
}

/// Codes and scale of a smaller squared error than these, if any are found. `ends` are the codes that the largest magnitude may
/// get; scales are those of the least squares, as columns count.
fn searched(
    group: Group,
    (codes, scale): (Vec<f32>, f32),
    range: (f32, f32),
    ends: &[f32],
) -> (Vec<f32>, f32) {
    let weights = group.weights;
    let furthest = furthest(weights);
    let mut best = (squared_error(group, &codes, scale), codes, scale);
    for end in ends {
        for tenths in TENTHS {
            let first = furthest / (end + f32::from(tenths) / 10. * end.signum());
            let fitted = fit(group, &nearest(weights, first, range));
            let codes = nearest(weights, fitted, range);
            let error = squared_error(group, &codes, fitted);
            if error < best.0 {
                best = (error, codes, fitted);
            }
        }
    }
    (best.1, best.2)
}

/// The scale of the least squares for these codes, in F16.
fn fit(Group { weights, columns }: Group, codes: &[f32]) -> f32 {
    let (cross, square) =
        weights.iter().zip(columns).zip(codes).fold((0., 0.), |(cross, square), ((weight, column), code)| {
            let (weight, column, code) = (f64::from(*weight), f64::from(*column), f64::from(*code));
            (cross + column * weight * code, square + column * code * code)
        });
    half(if square == 0. { 0. } else { (cross / square) as f32 })
}

/// Appends a block of 32 weights.
pub(super) fn q8_0(group: Group, search: bool, blocks: &mut Vec<u8>, values: &mut [f32]) {
    let scale = furthest(group.weights).abs() / 127.;
    let inverse = inverse(scale);
    // Ties away from zero.
    let codes = group.weights.iter().map(|weight| (weight * inverse).round()).collect();
    let found = match search {
        false => (codes, half(scale)),
        true => searched(group, (codes, half(scale)), (-127., 127.), &[127.]),
    };
    let codes = append(found, 0., blocks, values);
    blocks.extend(codes);
}

/// Codes around `middle` of either type whose scale has a sign, and the scale.
fn around(group: Group, middle: f32, search: bool) -> (Vec<f32>, f32) {
    let scale = furthest(group.weights) / -middle;
    let inverse = inverse(scale);
    // Product and sum are rounded, each once: compilers that fuse them have other codes half way between two.
    let most = 2. * middle - 1.;
    let code = |weight: &f32| (weight * inverse + (middle + 0.5)).trunc().clamp(0., most) - middle;
    let codes = group.weights.iter().map(code).collect();
    let range = (-middle, middle - 1.);
    match search {
        false => (codes, half(scale)),
        true => searched(group, (codes, half(scale)), range, &[range.0, range.1]),
    }
}

/// Appends the scale, and sets `values` to what it means with the codes; these as they are stored, `middle` for zero.
fn append((codes, scale): (Vec<f32>, f32), middle: f32, blocks: &mut Vec<u8>, values: &mut [f32]) -> Vec<u8> {
    append_half(scale, blocks);
    values.iter_mut().zip(&codes).for_each(|(value, code)| *value = code * scale);
    codes.iter().map(|code| ((code + middle) as i16) as u8).collect()
}

/// Appends a block of 32 weights.
pub(super) fn q4_0(group: Group, search: bool, blocks: &mut Vec<u8>, values: &mut [f32]) {
    let codes = append(around(group, 8., search), 8., blocks, values);
    halves(&codes, blocks);
}

/// Appends a block of 32 weights.
pub(super) fn q5_0(group: Group, search: bool, blocks: &mut Vec<u8>, values: &mut [f32]) {
    let codes = append(around(group, 16., search), 16., blocks, values);
    five_bits(&codes, blocks);
}

/// Codes with a scale and a bias, in F16.
struct Biased {
    codes: Vec<f32>,
    scale: f32,
    bias: f32,
}

impl Biased {
    /// The codes from 0 to `most` that are nearest with a scale and a bias.
    fn nearest(weights: &[f32], (scale, bias): (f32, f32), most: f32) -> Self {
        let inverse = inverse(scale);
        let code = |weight: &f32| ((weight - bias) * inverse).round_ties_even().clamp(0., most);
        Self { codes: weights.iter().map(code).collect(), scale, bias }
    }

    /// As columns count.
    fn squared_error(&self, Group { weights, columns }: Group) -> f64 {
        let error = |((weight, column), code): ((&f32, &f32), &f32)| {
            f64::from(weight - (code * self.scale + self.bias)).powi(2) * f64::from(*column)
        };
        weights.iter().zip(columns).zip(&self.codes).map(error).sum()
    }

    /// Scale and bias of the least squares for these codes, in F16; none if all codes are one.
    fn fitted(&self, Group { weights, columns }: Group) -> Option<(f32, f32)> {
        let mut sums = [0f64; 5];
        for ((weight, column), code) in weights.iter().zip(columns).zip(&self.codes) {
            let (weight, column, code) = (f64::from(*weight), f64::from(*column), f64::from(*code));
            for (sum, term) in sums.iter_mut().zip([1., code, code * code, weight, weight * code]) {
                *sum += column * term;
            }
        }
        let [count, codes, squares, weights, products] = sums;
        let determinant = count * squares - codes * codes;
        let scale = (count * products - weights * codes) / determinant;
        let bias = (weights - scale * codes) / count;
        (determinant > 0.).then_some((half(scale as f32), half(bias as f32)))
    }

    /// Of the reference, or of a smaller squared error.
    fn of(group: Group, most: f32, search: bool) -> Self {
        let weights = group.weights;
        let low = weights.iter().copied().fold(f32::INFINITY, f32::min);
        let high = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let scale = (high - low) / most;
        let inverse = inverse(scale);
        let code = |weight: &f32| ((weight - low) * inverse + 0.5).trunc().clamp(0., most);
        let codes = weights.iter().map(code).collect();
        let reference = Self { codes, scale: half(scale), bias: half(low) };
        if !search {
            return reference;
        }
        let (mut least, mut best) = (reference.squared_error(group), reference);
        for tenths in TENTHS {
            let first = (high - low) / (most + f32::from(tenths) / 10.);
            let Some(fitted) = Self::nearest(weights, (first, low), most).fitted(group) else { continue };
            let attempt = Self::nearest(weights, fitted, most);
            let error = attempt.squared_error(group);
            if error < least {
                (least, best) = (error, attempt);
            }
        }
        best
    }

    /// Appends scale and bias, and sets `values` to what all means; the codes in bytes.
    fn append(&self, blocks: &mut Vec<u8>, values: &mut [f32]) -> Vec<u8> {
        append_half(self.scale, blocks);
        append_half(self.bias, blocks);
        let pairs = values.iter_mut().zip(&self.codes);
        pairs.for_each(|(value, code)| *value = code * self.scale + self.bias);
        self.codes.iter().map(|code| *code as u8).collect()
    }
}

/// Appends a block of 32 weights.
pub(super) fn q4_1(group: Group, search: bool, blocks: &mut Vec<u8>, values: &mut [f32]) {
    let codes = Biased::of(group, 15., search).append(blocks, values);
    halves(&codes, blocks);
}

/// Appends a block of 32 weights.
pub(super) fn q5_1(group: Group, search: bool, blocks: &mut Vec<u8>, values: &mut [f32]) {
    let codes = Biased::of(group, 31., search).append(blocks, values);
    five_bits(&codes, blocks);
}
