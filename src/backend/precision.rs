//! How precisely activations enter integer kernels: a choice of the whole process.

use crate::Error;
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU8, Ordering};

/// How precisely activations enter the matmuls of packed weights on a CPU.
///
/// Where a CPU multiplies integers faster than floats, activations become fixed-point numbers, with a unit of their own
/// for every group of weights. Fewer digits take less time. A kernel may always be more precise than this asks for: without
/// such instructions, and for formats whose weights are no integers, every choice is [`Exact`](Self::Exact).
///
/// ```
/// use candle_quant::ActivationPrecision;
///
/// assert_eq!("8".parse::<ActivationPrecision>()?, ActivationPrecision::Bits8);
/// assert_eq!(ActivationPrecision::default().to_string(), "exact");
/// # Ok::<(), candle_quant::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ActivationPrecision {
    /// About as precise as sums in f32: a relative error of about 2e-7, and near 1e-6 where the largest activations of
    /// groups meet weights of zero.
    #[default]
    Exact,
    /// Sixteen bits: a relative error of about 3e-5.
    Bits16,
    /// Eight bits, as llama.cpp and candle's own quantized matmuls have them: a relative error of about 6e-3.
    Bits8,
}

/// The choice, as a number from one on; 0 before the first use.
static CHOSEN: AtomicU8 = AtomicU8::new(0);

impl ActivationPrecision {
    const ALL: [Self; 3] = [Self::Exact, Self::Bits16, Self::Bits8];

    /// The environment variable that chooses before [`Self::set`] is called: `exact`, `16` or `8`.
    pub const VARIABLE: &str = "CANDLE_QUANT_ACTIVATIONS";

    /// Chooses for all matmuls of this process that begin from now on.
    pub fn set(self) {
        CHOSEN.store(self as u8 + 1, Ordering::Relaxed);
    }

    /// The choice of this process.
    #[must_use]
    pub fn current() -> Self {
        let known = |number: u8| Self::ALL.into_iter().find(|this| *this as u8 + 1 == number);
        known(CHOSEN.load(Ordering::Relaxed)).unwrap_or_else(|| {
            let this = Self::from_env();
            // Whoever was faster has chosen.
            let raced = CHOSEN.compare_exchange(0, this as u8 + 1, Ordering::Relaxed, Ordering::Relaxed);
            raced.err().and_then(known).unwrap_or(this)
        })
    }

    fn from_env() -> Self {
        let wanted = std::env::var(Self::VARIABLE).unwrap_or_default();
        wanted.parse().unwrap_or_else(|_| {
            if !wanted.is_empty() {
                log::warn!("{}={wanted}: expected exact, 16 or 8; ignored", Self::VARIABLE);
            }
            Self::default()
        })
    }
}

impl fmt::Display for ActivationPrecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Exact => "exact",
            Self::Bits16 => "16",
            Self::Bits8 => "8",
        })
    }
}

impl FromStr for ActivationPrecision {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let named = Self::ALL.into_iter().find(|this| this.to_string() == name);
        named
            .ok_or_else(|| Error::mismatch("precision of activations", "exact, 16 or 8", format!("{name:?}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for precision in ActivationPrecision::ALL {
            assert_eq!(precision.to_string().parse::<ActivationPrecision>().unwrap(), precision);
        }
        let error = "32".parse::<ActivationPrecision>().unwrap_err().to_string();
        assert!(error.contains("exact, 16 or 8"), "{error}");
    }
}
