//! Q4_0 and Q8_0, bit for bit as the reference of ggml quantizes (`quants.py` of the Python package `gguf`), or with a scale of
//! a smaller squared error.

use super::ggml_blocks::{append_half, half, halves};
use super::ggml_super_blocks::Group;

/// Parts of the range that a search divides codes by, in tenths of a code more or fewer.
const TENTHS: std::ops::RangeInclusive<i8> = -9..=9;

/// The number of the largest magnitude, the first of several.
fn furthest(weights: &[f32]) -> f32 {
    weights.iter().fold(0f32, |most, weight| if weight.abs() > most.abs() { *weight } else { most })
}

fn inverse(scale: f32) -> f32 {
    if scale == 0. {
        0.
    } else {
        1. / scale
    }
}

/// As columns count.
fn squared_error(weights: &[f32], columns: &[f32], codes: &[f32], scale: f32) -> f64 {
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
    weights: &[f32],
    columns: &[f32],
    (codes, scale): (Vec<f32>, f32),
    range: (f32, f32),
    ends: &[f32],
) -> (Vec<f32>, f32) {
    let furthest = furthest(weights);
    let mut best = (squared_error(weights, columns, &codes, scale), codes, scale);
    for end in ends {
        for tenths in TENTHS {
            let first = furthest / (end + f32::from(tenths) / 10. * end.signum());
            let fitted = fit(weights, columns, &nearest(weights, first, range));
            let codes = nearest(weights, fitted, range);
            let error = squared_error(weights, columns, &codes, fitted);
            if error < best.0 {
                best = (error, codes, fitted);
            }
        }
    }
    (best.1, best.2)
}

/// The scale of the least squares for these codes, in F16.
fn fit(weights: &[f32], columns: &[f32], codes: &[f32]) -> f32 {
    let (cross, square) =
        weights.iter().zip(columns).zip(codes).fold((0., 0.), |(cross, square), ((weight, column), code)| {
            let (weight, column, code) = (f64::from(*weight), f64::from(*column), f64::from(*code));
            (cross + column * weight * code, square + column * code * code)
        });
    half(if square == 0. { 0. } else { (cross / square) as f32 })
}

/// Appends a block of 32 weights.
pub(super) fn q8_0(
    Group { weights, columns }: Group,
    search: bool,
    blocks: &mut Vec<u8>,
    values: &mut [f32],
) {
    let scale = furthest(weights).abs() / 127.;
    let inverse = inverse(scale);
    // Ties away from zero.
    let codes = weights.iter().map(|weight| (weight * inverse).round()).collect();
    let (codes, scale) = match search {
        false => (codes, half(scale)),
        true => searched(weights, columns, (codes, half(scale)), (-127., 127.), &[127.]),
    };
    append_half(scale, blocks);
    blocks.extend(codes.iter().map(|code| (*code as i8) as u8));
    values.iter_mut().zip(&codes).for_each(|(value, code)| *value = code * scale);
}

/// Appends a block of 32 weights.
pub(super) fn q4_0(
    Group { weights, columns }: Group,
    search: bool,
    blocks: &mut Vec<u8>,
    values: &mut [f32],
) {
    let scale = furthest(weights) / -8.;
    let inverse = inverse(scale);
    // Product and sum are rounded, each once: compilers that fuse them have other codes half way between two.
    let code = |weight: &f32| (weight * inverse + 8.5).trunc().clamp(0., 15.) - 8.;
    let codes = weights.iter().map(code).collect();
    let (codes, scale) = match search {
        false => (codes, half(scale)),
        true => searched(weights, columns, (codes, half(scale)), (-8., 7.), &[-8., 7.]),
    };
    append_half(scale, blocks);
    let stored: Vec<_> = codes.iter().map(|code| (*code + 8.) as u8).collect();
    halves(&stored, blocks);
    values.iter_mut().zip(&codes).for_each(|(value, code)| *value = code * scale);
}
