//! The learning rate of each step.

use candle_quant::{Error, Result};

/// A learning rate that rises in a line, then falls along half a cosine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// The highest rate.
    pub learning_rate: f64,
    /// Steps until it is reached.
    pub warm_up: usize,
    /// What is left of it at the end, from 0 to 1.
    pub floor: f64,
}

impl Default for Schedule {
    fn default() -> Self {
        Self { learning_rate: 2e-4, warm_up: 10, floor: 0.1 }
    }
}

impl Schedule {
    /// The rate of step `step`, of which the first is 0, of `steps`.
    ///
    /// ```
    /// use candle_quant_models::train::Schedule;
    ///
    /// let schedule = Schedule { learning_rate: 1., warm_up: 2, floor: 0.5 };
    /// let rates = [0, 1, 2, 3, 4].map(|step| schedule.rate(step, 5));
    /// assert_eq!(rates, [0.5, 1., 1., 0.75, 0.5]);
    /// ```
    pub fn rate(&self, step: usize, steps: usize) -> f64 {
        if step < self.warm_up {
            return self.learning_rate * (step + 1) as f64 / self.warm_up as f64;
        }
        let falling = steps.saturating_sub(self.warm_up + 1).max(1) as f64;
        let done = ((step - self.warm_up) as f64 / falling).min(1.);
        let height = 0.5 * (1. + (std::f64::consts::PI * done).cos());
        self.learning_rate * (self.floor + (1. - self.floor) * height)
    }

    pub(super) fn validate(&self) -> Result<()> {
        if !(self.learning_rate.is_finite() && self.learning_rate > 0. && (0. ..=1.).contains(&self.floor)) {
            return Err(Error::mismatch(
                "schedule",
                "a learning rate above 0, and a floor from 0 to 1",
                format!("{} and {}", self.learning_rate, self.floor),
            ));
        }
        Ok(())
    }
}
