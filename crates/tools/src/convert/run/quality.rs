//! What a conversion loses, measured on the numbers as they are stored.

use serde::{Deserialize, Serialize};

/// How far one tensor of the output is from the source.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Quality {
    /// The tensor in the output.
    pub name: String,
    /// What it was.
    pub from: String,
    /// What it became.
    pub to: String,
    /// How many numbers it has.
    pub elements: u64,
    /// RMS of the errors over that of the source; 0 if there are no errors.
    pub relative_rms: f64,
    /// The same, where the squares in each column count by the statistics of what the layer is given: about the error of its
    /// outputs. `None` without statistics.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weighted_rms: Option<f64>,
    /// The ratio of signal and error in decibels; `None` if there are no errors.
    pub sqnr_db: Option<f64>,
    /// The largest error.
    pub max_abs: f64,
    /// The cosine of the angle between source and output; `None` if one of them is zero.
    pub cosine: Option<f64>,
    /// Numbers beyond what their group can hold.
    pub saturated: u64,
    /// Scales that are zero.
    pub zero_scales: u64,
    /// Scales below zero: in affine formats about half of them are.
    pub negative_scales: u64,
    /// NaN in the source; where the tensor is packed, zero in the output.
    pub nan: u64,
    /// Infinities in the source; where the tensor is packed, zero in the output.
    pub infinite: u64,
    /// Finite numbers that the dtype of the output does not hold.
    pub overflowing: u64,
}

/// What a conversion has written.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct ConvertReport {
    /// Bytes of the tensors in the source.
    pub source_bytes: u64,
    /// Bytes of the tensors in the output.
    pub bytes: u64,
    /// Bits for each element of the matrices.
    pub bits_per_weight: f64,
    /// The share of these elements that is not packed.
    pub dense_share: f64,
    /// The SHA-256 of every file of weights.
    pub files: Vec<WrittenFile>,
    /// Every tensor whose numbers were converted, worst first; and every one with numbers that are not finite.
    pub tensors: Vec<Quality>,
}

/// A file of weights.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct WrittenFile {
    /// Its name.
    pub file: String,
    /// The SHA-256 of its bytes, in hexadecimal.
    pub sha256: String,
}

/// Sums over the numbers of a tensor.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sums {
    elements: u64,
    /// Sums of err^2, src^2, out^2 and src*out.
    error: f64,
    source: f64,
    output: f64,
    product: f64,
    /// Sums of err^2 and src^2, weighted.
    weighted_error: f64,
    weighted_source: f64,
    max_abs: f64,
    /// The largest magnitude of the source.
    pub largest: f64,
    saturated: u64,
    zero_scales: u64,
    negative_scales: u64,
    nan: u64,
    infinite: u64,
    overflowing: u64,
}

/// How many sums are added to at a time.
const LANES: usize = 8;

/// Sums of every eighth number, which the compiler keeps in vector registers.
#[derive(Default)]
struct Lanes {
    error: [f64; LANES],
    source: [f64; LANES],
    output: [f64; LANES],
    product: [f64; LANES],
    max_abs: [f64; LANES],
    largest: [f64; LANES],
}

/// Whether all numbers are finite: none has all bits of the exponent.
fn are_finite(numbers: &[f32]) -> bool {
    let exponent = f32::INFINITY.to_bits();
    let is_other = |number: &f32| u32::from(number.to_bits() & exponent == exponent);
    numbers.iter().map(is_other).fold(0, |any, other| any | other) == 0
}

impl Lanes {
    /// Adds finite numbers.
    fn add(&mut self, source: &[f32; LANES], output: &[f32; LANES]) {
        for lane in 0..LANES {
            let (source, output) = (f64::from(source[lane]), f64::from(output[lane]));
            let error = (source - output).abs();
            self.error[lane] += error * error;
            self.source[lane] += source * source;
            self.output[lane] += output * output;
            self.product[lane] += source * output;
            self.max_abs[lane] = if error > self.max_abs[lane] { error } else { self.max_abs[lane] };
            let magnitude = source.abs();
            self.largest[lane] = if magnitude > self.largest[lane] { magnitude } else { self.largest[lane] };
        }
    }
}

impl Sums {
    /// Compares numbers; those that are not finite are left out, and counted if they are not of the source.
    pub(super) fn add_row(&mut self, source: &[f32], output: &[f32]) {
        if !(are_finite(source) && are_finite(output)) {
            let pairs = || source.iter().zip(output);
            let is_finite = |(source, output): &(&f32, &f32)| source.is_finite() && output.is_finite();
            self.count_overflowing(source, output);
            self.elements += pairs().filter(|pair| !is_finite(pair)).count() as u64;
            let (source, output): (Vec<f32>, Vec<f32>) = pairs().filter(is_finite).unzip();
            return self.add_row(&source, &output);
        }
        self.elements += source.len() as u64;
        let mut lanes = Lanes::default();
        let (sources, source_rest) = source.as_chunks();
        let (outputs, output_rest) = output.as_chunks();
        for (source, output) in sources.iter().zip(outputs) {
            lanes.add(source, output);
        }
        // Zeros add nothing.
        let padded = |rest: &[f32]| {
            let mut padded = [0.; LANES];
            padded.iter_mut().zip(rest).for_each(|(to, from)| *to = *from);
            padded
        };
        lanes.add(&padded(source_rest), &padded(output_rest));
        self.error += lanes.error.iter().sum::<f64>();
        self.source += lanes.source.iter().sum::<f64>();
        self.output += lanes.output.iter().sum::<f64>();
        self.product += lanes.product.iter().sum::<f64>();
        self.max_abs = lanes.max_abs.iter().fold(self.max_abs, |a, b| a.max(*b));
        self.largest = lanes.largest.iter().fold(self.largest, |a, b| a.max(*b));
    }

    /// Adds squares of a row by how much its columns count. What is not finite is left out.
    pub(super) fn add_weighted(&mut self, source: &[f32], output: &[f32], columns: &[f32]) {
        for ((source, output), counts) in source.iter().zip(output).zip(columns) {
            let (source, output, counts) = (f64::from(*source), f64::from(*output), f64::from(*counts));
            if source.is_finite() && output.is_finite() {
                self.weighted_error += (source - output).powi(2) * counts;
                self.weighted_source += source.powi(2) * counts;
            }
        }
    }

    /// Counts oddities of groups; `range` tells what the group of this number can hold.
    pub(super) fn add_groups<'a>(
        &mut self,
        scales: &[f32],
        groups: impl Iterator<Item = &'a [f32]>,
        range: impl Fn(usize) -> (f32, f32),
    ) {
        for (index, group) in groups.enumerate() {
            let (low, high) = range(index);
            let outside = group.iter().map(|number| u32::from((*number < low) | (*number > high)));
            self.saturated += u64::from(outside.sum::<u32>());
        }
        self.zero_scales += scales.iter().filter(|scale| **scale == 0.).count() as u64;
        self.negative_scales += scales.iter().filter(|scale| **scale < 0.).count() as u64;
    }

    /// Counts what is not finite in the source.
    pub(super) fn count_non_finite(&mut self, source: &[f32]) {
        if are_finite(source) {
            return;
        }
        for number in source {
            self.nan += u64::from(number.is_nan());
            self.infinite += u64::from(number.is_infinite());
        }
    }

    /// Counts finite numbers that are none after rounding.
    pub(super) fn count_overflowing(&mut self, source: &[f32], rounded: &[f32]) {
        let overflows = |(source, rounded): &(&f32, &f32)| source.is_finite() && !rounded.is_finite();
        self.overflowing += source.iter().zip(rounded).filter(overflows).count() as u64;
    }

    /// Counts numbers that are copied, and what is not finite in them.
    pub(super) fn count_copied(&mut self, elements: u64, nan: u64, infinite: u64) {
        self.elements += elements;
        self.nan += nan;
        self.infinite += infinite;
    }

    pub(super) fn non_finite(&self) -> u64 {
        self.nan + self.infinite + self.overflowing
    }

    pub(super) fn add(mut self, other: &Self) -> Self {
        self.elements += other.elements;
        self.error += other.error;
        self.source += other.source;
        self.output += other.output;
        self.product += other.product;
        self.weighted_error += other.weighted_error;
        self.weighted_source += other.weighted_source;
        self.max_abs = self.max_abs.max(other.max_abs);
        self.largest = self.largest.max(other.largest);
        self.saturated += other.saturated;
        self.zero_scales += other.zero_scales;
        self.negative_scales += other.negative_scales;
        self.nan += other.nan;
        self.infinite += other.infinite;
        self.overflowing += other.overflowing;
        self
    }

    pub(super) fn quality(&self, name: &str, from: &str, to: &str) -> Quality {
        // JSON has no infinity.
        let relative_rms =
            if self.error == 0. { 0. } else { (self.error / self.source).sqrt().min(f64::MAX) };
        let lengths = (self.source * self.output).sqrt();
        Quality {
            name: name.to_owned(),
            from: from.to_owned(),
            to: to.to_owned(),
            elements: self.elements,
            relative_rms,
            weighted_rms: (self.weighted_source > 0.)
                .then(|| (self.weighted_error / self.weighted_source).sqrt().min(f64::MAX)),
            sqnr_db: (relative_rms > 0.).then(|| -20. * relative_rms.log10()),
            max_abs: self.max_abs,
            cosine: (lengths > 0.).then(|| self.product / lengths),
            saturated: self.saturated,
            zero_scales: self.zero_scales,
            negative_scales: self.negative_scales,
            nan: self.nan,
            infinite: self.infinite,
            overflowing: self.overflowing,
        }
    }
}

impl Quality {
    /// Numbers that are not finite in the source, or would not be in the output.
    pub(super) fn non_finite(&self) -> u64 {
        self.nan + self.infinite + self.overflowing
    }

    /// What is not finite, in words.
    pub(super) fn describe_non_finite(&self) -> String {
        let counts =
            [(self.nan, "NaN"), (self.infinite, "infinite"), (self.overflowing, "too large for the dtype")];
        let words: Vec<_> = counts
            .iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| format!("{count} {what}"))
            .collect();
        format!("{} of {} numbers", words.join(", "), self.elements)
    }
}
