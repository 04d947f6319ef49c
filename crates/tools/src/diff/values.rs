//! How far the numbers of two tensors of one shape are apart.

use super::report::Outcome;
use crate::chunks::Chunks;
use crate::convert::UsualTensor;
use candle_quant::checkpoint::Weight;
use candle_quant::Result;

pub(super) fn compare(a: &Weight, b: &Weight) -> Result<Outcome> {
    let sums = Sums::of_chunks(&Chunks::load(a)?, &Chunks::load(b)?)?;
    Ok(sums.outcome(a.format_name(), b.format_name()))
}

/// The same of tensors of one shape in other layouts, matrix by matrix.
pub(super) fn compare_usual(a: &UsualTensor, b: &UsualTensor) -> Result<Outcome> {
    let mut sums = Sums::default();
    for index in 0..a.matrices() {
        sums = sums.add(Sums::of_chunks(&a.matrix(index)?, &b.matrix(index)?)?);
    }
    Ok(sums.outcome(a.format_name(), b.format_name()))
}

#[derive(Clone, Copy, Default)]
struct Sums {
    /// Of the squares of the differences.
    difference: f64,
    /// Of the squares of the first side's numbers.
    reference: f64,
    max_abs: f64,
    not_finite: usize,
}

impl Sums {
    fn of_chunks(a: &Chunks, b: &Chunks) -> Result<Self> {
        // In order, so that the result does not depend on the number of threads.
        Ok(a.zip(b, Self::of)?.into_iter().fold(Self::default(), Self::add))
    }

    fn outcome(self, a: String, b: String) -> Outcome {
        let Self { max_abs, not_finite, .. } = self;
        Outcome::Values { relative_rms: self.relative_rms(), max_abs, not_finite, a, b }
    }

    fn of(a: &[f64], b: &[f64]) -> Self {
        let mut sums = Self::default();
        for (&a, &b) in a.iter().zip(b) {
            if a.is_finite() && b.is_finite() {
                let difference = (a - b).abs();
                sums.difference += difference * difference;
                sums.reference += a * a;
                sums.max_abs = sums.max_abs.max(difference);
            } else if a != b && !(a.is_nan() && b.is_nan()) {
                sums.not_finite += 1;
            }
        }
        sums
    }

    fn add(self, other: Self) -> Self {
        Self {
            difference: self.difference + other.difference,
            reference: self.reference + other.reference,
            max_abs: self.max_abs.max(other.max_abs),
            not_finite: self.not_finite + other.not_finite,
        }
    }

    fn relative_rms(&self) -> f64 {
        match self.max_abs == 0. {
            true => 0.,
            false => (self.difference / self.reference).sqrt(),
        }
    }
}
