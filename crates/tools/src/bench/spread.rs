//! Mean and deviation.

use serde::Serialize;

/// What repetitions gave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Spread {
    /// Their mean.
    pub mean: f64,
    /// How far they lie from it: the square root of the sum of squared differences by one less than there are; 0 of one.
    pub deviation: f64,
}

impl Spread {
    /// Of these values; zeros if there are none.
    ///
    /// ```
    /// use candle_quant_tools::bench::Spread;
    ///
    /// let spread = Spread::of(&[1., 2., 6.]);
    /// assert_eq!((spread.mean, spread.deviation), (3., 7f64.sqrt())); // (4 + 1 + 9) / 2
    /// ```
    pub fn of(values: &[f64]) -> Self {
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count.max(1.);
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        Self { mean, deviation: (squares / (count - 1.).max(1.)).sqrt() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deviations_are_those_computed_by_hand() {
        for (values, mean, deviation) in [
            (&[][..], 0., 0.),
            (&[5.], 5., 0.),
            (&[1., 3.], 2., 2f64.sqrt()),
            // 9 + 1 + 1 + 1 + 0 + 0 + 4 + 16 by 7.
            (&[2., 4., 4., 4., 5., 5., 7., 9.], 5., (32f64 / 7.).sqrt()),
            (&[3., 3., 3.], 3., 0.),
        ] {
            let found = Spread::of(values);
            assert!((found.mean - mean).abs() < 1e-12, "{values:?}: {found:?}");
            assert!((found.deviation - deviation).abs() < 1e-12, "{values:?}: {found:?}");
        }
    }
}
