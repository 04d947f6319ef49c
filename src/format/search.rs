//! Clip search: for every group, codes and scales of a smaller squared error than the encoder's.
//!
//! An encoder takes the ends of a group for the ends of its range, so that nothing is clipped. A narrower range clips
//! the ends and has finer steps for all else, which often is better. The functions here take a row as an encoder of
//! [`encode`](super::encode) has left it, and change the groups that they can improve, measured in f64 on the numbers
//! as they decode. What is written is read like any other row of the format.

use super::decode::{element, scale_from_byte};
use super::element::{f32_to_e4m3, Real};
use super::encode::{clamped, nearest_e2m1, small_integer};
use super::packing::{code_at, pack};
use super::{QuantFormat, ScaleKind};
use std::ops::RangeInclusive;

/// The parts of its range that an affine group is encoded with, in sixteenths.
const PARTS: RangeInclusive<u8> = 7..=16;

/// How often scale and codes of an affine group follow each other at most.
const ROUNDS: usize = 8;

/// Improves a row of K finite weights that [`encode_affine`](super::encode::encode_affine) or
/// [`encode_afq`](super::encode::encode_afq) has encoded.
///
/// Ranges from the whole down to seven sixteenths, about its middle, give codes; scale and bias are then those of the
/// least squares for these codes, and the codes the nearest ones.
///
/// # Panics
/// If `group_size` is 0, or groups are less than a word. [`QuantFormat::affine`] refuses such formats.
///
/// ```
/// use candle_quant::format::{encode::encode_affine, search::search_affine};
///
/// // One large number takes all steps for itself.
/// let mut weights = [0.125f32; 32];
/// (weights[0], weights[1]) = (-0.25, 3.0);
/// let (mut words, mut scales, mut biases) = ([0; 2], [0.0], [0.0]);
/// encode_affine(&weights, 2, 32, &mut words, &mut scales, &mut biases);
/// assert_eq!((scales[0], biases[0]), (-1.0, 3.0)); // 0.125 becomes 0
/// search_affine(&weights, 2, 32, &mut words, &mut scales, &mut biases);
/// assert!(scales[0].abs() < 1.0 && biases[0] != 3.0);
/// ```
pub fn search_affine<T: Real>(
    weights: &[T],
    bits: usize,
    group_size: usize,
    words: &mut [u32],
    scales: &mut [T],
    biases: &mut [T],
) {
    let format = QuantFormat::Affine { bits, group_size };
    let parameters = scales.iter_mut().zip(biases);
    for ((weights, words), (scale, bias)) in groups(format, weights, words).zip(parameters) {
        let mut group = Group::new(format, &weights, words, scale.to_f32(), bias.to_f32());
        let mut best = None;
        let mut attempt = |group: &mut Group, codes: &[u8]| {
            let fits = least_squares(&weights, codes, bits);
            let better = fits
                .into_iter()
                .filter(|(scale, bias): &(T, T)| group.improves(scale.to_f32(), bias.to_f32()));
            let better = better.last();
            best = better.or(best);
            better.is_some()
        };
        for part in PARTS.rev() {
            let (scale, bias) = range(&weights, bits, f32::from(part) / 16.);
            let codes = nearest(format, &weights, scale, bias);
            attempt(&mut group, &codes);
        }
        for _ in 0..ROUNDS {
            let codes = group.codes.clone();
            if !attempt(&mut group, &codes) {
                break;
            }
        }
        if let Some((better_scale, better_bias)) = best {
            (*scale, *bias) = (better_scale, better_bias);
            pack(&group.codes, bits, words);
        }
    }
}

/// Improves a row of K finite weights that [`encode_mx`](super::encode::encode_mx) has encoded, or
/// [`encode_nvfp4`](super::encode::encode_nvfp4) without a global scale, by trying the scales nearby.
///
/// # Panics
/// If `format` is an affine one with groups of less than a word.
pub fn search_scales<T: Real>(weights: &[T], format: QuantFormat, words: &mut [u32], scales: &mut [u8]) {
    let kind = format.scale_kind();
    // Powers of two reach far; a larger one may be better since the steps of E2M1 are not even. E4M3 has eight steps
    // for a power of two, and 4 / 6 is as good a place for the largest number of a group as the end.
    let (down, up, last) = match kind {
        ScaleKind::E4m3 => (8, 16, 0x7E),
        _ => (2, 1, 0xFE),
    };
    for ((weights, words), scale) in groups(format, weights, words).zip(scales) {
        let value = |byte| scale_from_byte(kind, byte, 1.);
        let mut group = Group::new(format, &weights, words, value(*scale), 0.);
        let nearby = scale.saturating_sub(down)..=scale.saturating_add(up).min(last);
        if let Some(better) = nearby.filter(|byte| group.improves(value(*byte), 0.)).last() {
            *scale = better;
            pack(&group.codes, format.bits(), words);
        }
    }
}

/// The groups of a row, as numbers and as codes.
fn groups<'a, T: Real>(
    format: QuantFormat,
    weights: &'a [T],
    words: &'a mut [u32],
) -> impl Iterator<Item = (Vec<f32>, &'a mut [u32])> {
    let size = format.group_size();
    let widened = |group: &[T]| group.iter().map(|weight| weight.to_f32()).collect();
    weights.chunks(size).map(widened).zip(words.chunks_mut(size * format.bits() / 32))
}

/// A group, and the best that is known of it.
struct Group<'a> {
    format: QuantFormat,
    weights: &'a [f32],
    codes: Vec<u8>,
    squared_error: f64,
}

impl<'a> Group<'a> {
    /// The group as it was encoded.
    fn new(format: QuantFormat, weights: &'a [f32], words: &[u32], scale: f32, bias: f32) -> Self {
        let code = |index| code_at(words, format.bits(), index).unwrap_or_default();
        let codes: Vec<_> = (0..weights.len()).map(code).collect();
        let squared_error = squared_error(format, weights, &codes, scale, bias);
        Self { format, weights, codes, squared_error }
    }

    /// Encodes the group with this scale and bias, and keeps that if it is better.
    fn improves(&mut self, scale: f32, bias: f32) -> bool {
        let codes = nearest(self.format, self.weights, scale, bias);
        let squared_error = squared_error(self.format, self.weights, &codes, scale, bias);
        // Not if it is NaN.
        let is_better = squared_error < self.squared_error;
        if is_better {
            (self.codes, self.squared_error) = (codes, squared_error);
        }
        is_better
    }
}

/// The codes nearest to `weights`; any, where scale or bias leave none.
fn nearest(format: QuantFormat, weights: &[f32], scale: f32, bias: f32) -> Vec<u8> {
    let quotients = weights.iter().map(|weight| (weight - bias) / scale);
    match format {
        QuantFormat::Affine { bits, .. } => {
            let largest = largest_code(bits) as f32;
            quotients.map(|quotient| small_integer(clamped(quotient, largest))).collect()
        }
        QuantFormat::Mxfp8 => quotients.map(f32_to_e4m3).collect(),
        QuantFormat::Mxfp4 | QuantFormat::Nvfp4 => quotients.map(nearest_e2m1::<f32>).collect(),
    }
}

fn squared_error(format: QuantFormat, weights: &[f32], codes: &[u8], scale: f32, bias: f32) -> f64 {
    let squared = |(weight, code): (&f32, &u8)| {
        let decoded = element(format, *code) * scale + bias;
        (f64::from(decoded) - f64::from(*weight)).powi(2)
    };
    weights.iter().zip(codes).map(squared).sum()
}

fn largest_code(bits: usize) -> u8 {
    ((1u32 << bits) - 1) as u8
}

/// Scale and bias whose codes reach over a part of the group's range, about its middle.
fn range(weights: &[f32], bits: usize, part: f32) -> (f32, f32) {
    let low = weights.iter().copied().fold(f32::INFINITY, f32::min);
    let high = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    // Halves, whose difference can't overflow.
    let (middle, half) = (low / 2. + high / 2., (high / 2. - low / 2.) * part);
    (half / f32::from(largest_code(bits)) * 2., middle - half)
}

/// Scale and bias of the smallest squared error with these codes, as far as `T` goes; and the same with the codes
/// counted from the other end, whose bias is the other end, too. Nothing if all codes are equal.
fn least_squares<T: Real>(weights: &[f32], codes: &[u8], bits: usize) -> Vec<(T, T)> {
    let pairs = || weights.iter().zip(codes).map(|(weight, code)| (f64::from(*weight), f64::from(*code)));
    let count = weights.len() as f64;
    let (weight_sum, code_sum) =
        pairs().fold((0., 0.), |sums, (weight, code)| (sums.0 + weight, sums.1 + code));
    let (weight_mean, code_mean) = (weight_sum / count, code_sum / count);
    let (product, square) = pairs().fold((0., 0.), |sums, (weight, code)| {
        let code = code - code_mean;
        (sums.0 + code * (weight - weight_mean), sums.1 + code * code)
    });
    if square == 0. {
        return Vec::new();
    }
    let scale = T::from_f32((product / square) as f32).to_f32();
    let other_mean = f64::from(largest_code(bits)) - code_mean;
    let fit = |scale: f32, code_mean: f64| {
        let bias = weight_mean - f64::from(scale) * code_mean;
        (T::from_f32(scale), T::from_f32(bias as f32))
    };
    vec![fit(scale, code_mean), fit(-scale, other_mean)]
}
