//! Clip search: for every group, codes and scales of a smaller squared error than those of plain quantization.
//!
//! Quantization takes the ends of a group for the ends of its range, so that nothing is clipped. A narrower range clips
//! the ends and has finer steps for all else, which often is better. The search takes a quantized row and changes the
//! groups that it can improve, measured in f64 on the dequantized numbers. The result is read like any other row of the
//! format. Each family of formats says what it tries; what is here measures the attempts and keeps the best. Columns may count
//! differently: by the mean squares of what a layer is given, the error is about that of its outputs.

use super::bits::{code_at, pack};
use super::numeric::Real;
use super::QuantFormat;
use std::iter;

/// The scales that the search tries: so many codes below and above the one there is, up to `last`.
pub(super) struct Nearby {
    pub(super) below: u8,
    pub(super) above: u8,
    pub(super) last: u8,
}

/// Tries the scales nearby, for each group of a row whose scales are bytes.
pub(super) fn improve_byte_scales<T: Real>(
    format: QuantFormat,
    row: Row<T>,
    words: &mut [u32],
    scales: &mut [u8],
    Nearby { below, above, last }: Nearby,
) {
    for ((numbers, words), scale) in groups(format, row, words).zip(scales) {
        let value = |byte| format.scale().value(byte);
        let mut group = Group::new(format, &numbers, words, value(*scale), 0.);
        let nearby = scale.saturating_sub(below)..=scale.saturating_add(above).min(last);
        if let Some(better) = nearby.filter(|byte| group.improves(value(*byte), 0.)).last() {
            *scale = better;
            pack(&group.codes, format.bits(), words);
        }
    }
}

/// A row of weights, and how much the squared error in each column counts; all alike if nothing says so.
#[derive(Clone, Copy)]
pub(super) struct Row<'a, T> {
    pub(super) weights: &'a [T],
    pub(super) columns: Option<&'a [f32]>,
}

/// The numbers of a group, and how much the squared error of each counts.
pub(super) struct Numbers<'a> {
    pub(super) weights: Vec<f32>,
    columns: Option<&'a [f32]>,
}

impl Numbers<'_> {
    /// How much each counts, in the order of the weights.
    pub(super) fn columns(&self) -> impl Iterator<Item = f64> + '_ {
        let all = self.columns.unwrap_or_default().iter().map(|column| f64::from(*column));
        all.chain(iter::repeat(1.)).take(self.weights.len())
    }
}

/// The groups of a row, as numbers and as codes. In a group of which nothing counts, all counts alike.
pub(super) fn groups<'a, T: Real>(
    format: QuantFormat,
    Row { weights, columns }: Row<'a, T>,
    words: &'a mut [u32],
) -> impl Iterator<Item = (Numbers<'a>, &'a mut [u32])> {
    let size = format.group_size();
    let of_group = move |(index, group): (usize, &[T])| Numbers {
        weights: group.iter().map(|weight| weight.to_f32()).collect(),
        columns: columns
            .and_then(|columns| columns.get(index * size..index * size + group.len()))
            .filter(|columns| columns.iter().any(|column| *column > 0.)),
    };
    weights.chunks(size).enumerate().map(of_group).zip(words.chunks_mut(size * format.bits() / 32))
}

/// A group, and the best that is known of it.
pub(super) struct Group<'a> {
    format: QuantFormat,
    numbers: &'a Numbers<'a>,
    codes: Vec<u8>,
    squared_error: f64,
}

impl<'a> Group<'a> {
    /// The group as it was quantized.
    pub(super) fn new(
        format: QuantFormat,
        numbers: &'a Numbers<'a>,
        words: &[u32],
        scale: f32,
        bias: f32,
    ) -> Self {
        let code = |index| code_at(words, format.bits(), index).unwrap_or_default();
        let codes: Vec<_> = (0..numbers.weights.len()).map(code).collect();
        let squared_error = squared_error(format, numbers, &codes, scale, bias);
        Self { format, numbers, codes, squared_error }
    }

    /// The best codes so far.
    pub(super) fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// Quantizes the group with this scale and bias, and keeps that if it is better.
    pub(super) fn improves(&mut self, scale: f32, bias: f32) -> bool {
        let codes = nearest(self.format, &self.numbers.weights, scale, bias);
        let squared_error = squared_error(self.format, self.numbers, &codes, scale, bias);
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

fn squared_error(format: QuantFormat, numbers: &Numbers, codes: &[u8], scale: f32, bias: f32) -> f64 {
    let mut dequantized = vec![0.; codes.len()];
    format.element().map(codes, &mut dequantized, |value| value * scale + bias);
    let errors = numbers.weights.iter().zip(dequantized);
    let squares = errors.map(|(weight, number)| (f64::from(number) - f64::from(*weight)).powi(2));
    match numbers.columns {
        None => squares.sum(),
        Some(_) => squares.zip(numbers.columns()).map(|(square, counts)| square * counts).sum(),
    }
}
