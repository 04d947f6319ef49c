//! How far the numbers of two tensors of one shape are apart.

use super::report::Outcome;
use crate::chunks::Chunks;
use candle_quant::checkpoint::Weight;
use candle_quant::Result;

pub(super) fn compare(a: &Weight, b: &Weight) -> Result<Outcome> {
    let sums = Chunks::load(a)?.zip(&Chunks::load(b)?, Sums::of)?;
    // In order, so that the result does not depend on the number of threads.
    let sums = sums.into_iter().fold(Sums::default(), Sums::add);
    Ok(Outcome::Values {
        relative_rms: sums.relative_rms(),
        max_abs: sums.max_abs,
        not_finite: sums.not_finite,
        a: a.format_name(),
        b: b.format_name(),
    })
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
