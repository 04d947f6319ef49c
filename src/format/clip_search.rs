//! Clip search: for every group, codes and scales of a smaller squared error than those of plain quantization.
//!
//! Quantization takes the ends of a group for the ends of its range, so that nothing is clipped. A narrower range clips
//! the ends and has finer steps for all else, which often is better. The search takes a quantized row and changes the
//! groups that it can improve, measured in f64 on the dequantized numbers. The result is read like any other row of the
//! format. Each family of formats says what it tries; what is here measures the attempts and keeps the best.

use super::bits::{code_at, pack};
use super::numeric::Real;
use super::QuantFormat;

/// The scales that the search tries: so many codes below and above the one there is, up to `last`.
pub(super) struct Nearby {
    pub(super) below: u8,
    pub(super) above: u8,
    pub(super) last: u8,
}

/// Tries the scales nearby, for each group of a row whose scales are bytes.
pub(super) fn improve_byte_scales<T: Real>(
    format: QuantFormat,
    weights: &[T],
    words: &mut [u32],
    scales: &mut [u8],
    Nearby { below, above, last }: Nearby,
) {
    for ((weights, words), scale) in groups(format, weights, words).zip(scales) {
        let value = |byte| format.scale().value(byte);
        let mut group = Group::new(format, &weights, words, value(*scale), 0.);
        let nearby = scale.saturating_sub(below)..=scale.saturating_add(above).min(last);
        if let Some(better) = nearby.filter(|byte| group.improves(value(*byte), 0.)).last() {
            *scale = better;
            pack(&group.codes, format.bits(), words);
        }
    }
}

/// The groups of a row, as numbers and as codes.
pub(super) fn groups<'a, T: Real>(
    format: QuantFormat,
    weights: &'a [T],
    words: &'a mut [u32],
) -> impl Iterator<Item = (Vec<f32>, &'a mut [u32])> {
    let size = format.group_size();
    let widened = |group: &[T]| group.iter().map(|weight| weight.to_f32()).collect();
    weights.chunks(size).map(widened).zip(words.chunks_mut(size * format.bits() / 32))
}

/// A group, and the best that is known of it.
pub(super) struct Group<'a> {
    format: QuantFormat,
    weights: &'a [f32],
    codes: Vec<u8>,
    squared_error: f64,
}

impl<'a> Group<'a> {
    /// The group as it was quantized.
    pub(super) fn new(format: QuantFormat, weights: &'a [f32], words: &[u32], scale: f32, bias: f32) -> Self {
        let code = |index| code_at(words, format.bits(), index).unwrap_or_default();
        let codes: Vec<_> = (0..weights.len()).map(code).collect();
        let squared_error = squared_error(format, weights, &codes, scale, bias);
        Self { format, weights, codes, squared_error }
    }

    /// The best codes so far.
    pub(super) fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// Quantizes the group with this scale and bias, and keeps that if it is better.
    pub(super) fn improves(&mut self, scale: f32, bias: f32) -> bool {
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
pub(super) fn nearest(format: QuantFormat, weights: &[f32], scale: f32, bias: f32) -> Vec<u8> {
    format.element().nearest_all::<f32>(weights.iter().map(|weight| (weight - bias) / scale))
}

fn squared_error(format: QuantFormat, weights: &[f32], codes: &[u8], scale: f32, bias: f32) -> f64 {
    let mut dequantized = vec![0.; codes.len()];
    format.element().map(codes, &mut dequantized, |value| value * scale + bias);
    let pairs = weights.iter().zip(dequantized);
    pairs.map(|(weight, number)| (f64::from(number) - f64::from(*weight)).powi(2)).sum()
}
