//! Rotary position embedding: angles from a config, by which pairs of elements of each head turn.

mod positions;
mod read;
mod rotation;

use super::fields::{is_positive, POSITIVE};
use candle_quant::{Error, Result};
pub(super) use positions::{Positions, Turns};
pub(super) use read::RopeDefaults;
pub(super) use rotation::Rotation;
use std::borrow::Cow;

/// Base frequency and scaling of the rotary position embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// `rope_theta`.
    pub theta: f64,
    /// Elements of a head that turn, the first ones; even. The others stay as they are.
    pub rotary_dim: usize,
    /// Whether an element pairs with its neighbour: else the first half of those that turn pairs with the second.
    pub interleaved: bool,
    /// How frequencies are stretched for contexts beyond those of pre-training.
    pub scaling: RopeScaling,
}

/// How the frequencies of [`Rope`] are stretched.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Every frequency divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3: long wavelengths divided by `factor`, short ones kept, a smooth transition between.
    Llama3 {
        /// The divisor of the long wavelengths.
        factor: f64,
        /// Wavelengths above `original_max_position_embeddings` over this are long.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_position_embeddings` over this are short.
        high_freq_factor: f64,
        /// The context of pre-training.
        original_max_position_embeddings: usize,
    },
    /// Not within the context of pre-training, beyond which nothing is computed: the frequencies of cached keys would
    /// have to change from token to token.
    Dynamic,
    /// LongRoPE: every frequency divided by a factor of its own.
    Long {
        /// The divisors in texts within the context of pre-training.
        short: Vec<f64>,
        /// The divisors in longer texts.
        long: Vec<f64>,
        /// The context of pre-training.
        original_max_position_embeddings: usize,
        /// By what rotated queries and keys are multiplied.
        attention_factor: f64,
    },
    /// YaRN: fast rotations kept, slow ones divided by `factor`, a ramp between; queries and keys grow.
    Yarn {
        /// The divisor of slow rotations.
        factor: f64,
        /// Pairs that turn more often in `original_max_position_embeddings` positions keep their frequency.
        beta_fast: f64,
        /// Pairs that turn less often are slow.
        beta_slow: f64,
        /// The context of pre-training.
        original_max_position_embeddings: usize,
        /// Whether the ramp begins and ends at whole pairs.
        truncate: bool,
        /// By what rotated queries and keys are multiplied.
        attention_factor: f64,
    },
}

impl Rope {
    /// What a hand-made value has to satisfy.
    pub(super) fn validate(&self) -> Result<()> {
        let context_of = |context: usize| ("rope scaling `original_max_position_embeddings`", context as f64);
        if self.rotary_dim == 0 || !self.rotary_dim.is_multiple_of(2) {
            let found = self.rotary_dim.to_string();
            return Err(Error::mismatch("elements of a head that turn", "an even number above zero", found));
        }
        let numbers = match self.scaling {
            RopeScaling::None | RopeScaling::Dynamic => vec![],
            RopeScaling::Long { ref short, ref long, original_max_position_embeddings, attention_factor } => {
                for (name, factors) in [("`short_factor`", short), ("`long_factor`", long)] {
                    if factors.len() != self.rotary_dim / 2 {
                        let expected =
                            format!("{} numbers, one for each pair that turns", self.rotary_dim / 2);
                        return Err(Error::mismatch(name, expected, factors.len().to_string()));
                    }
                }
                let factors = short.iter().chain(long).map(|factor| ("rope scaling factors", *factor));
                let others = [
                    context_of(original_max_position_embeddings),
                    ("rope scaling `attention_factor`", attention_factor),
                ];
                factors.chain(others).collect()
            }
            RopeScaling::Linear { factor } => vec![("rope scaling `factor`", factor)],
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                if low_freq_factor >= high_freq_factor {
                    return Err(Error::mismatch(
                        "rope scaling `high_freq_factor`",
                        format!("more than `low_freq_factor`, {low_freq_factor}"),
                        high_freq_factor.to_string(),
                    ));
                }
                vec![
                    ("rope scaling `factor`", factor),
                    ("rope scaling `low_freq_factor`", low_freq_factor),
                    ("rope scaling `high_freq_factor`", high_freq_factor),
                    context_of(original_max_position_embeddings),
                ]
            }
            RopeScaling::Yarn {
                factor,
                beta_fast,
                beta_slow,
                original_max_position_embeddings,
                attention_factor,
                ..
            } => {
                // The ramp divides by the logarithm of theta.
                if self.theta == 1. {
                    return Err(Error::mismatch("`rope_theta`", "not 1, with YaRN", "1"));
                }
                if beta_slow >= beta_fast {
                    return Err(Error::mismatch(
                        "rope scaling `beta_fast`",
                        format!("more than `beta_slow`, {beta_slow}"),
                        beta_fast.to_string(),
                    ));
                }
                vec![
                    ("rope scaling `factor`", factor),
                    ("rope scaling `beta_fast`", beta_fast),
                    ("rope scaling `beta_slow`", beta_slow),
                    context_of(original_max_position_embeddings),
                    ("rope scaling `attention_factor`", attention_factor),
                ]
            }
        };
        let mut all = std::iter::once(("`rope_theta`", self.theta)).chain(numbers);
        match all.find(|(_, number)| !is_positive(*number)) {
            None => Ok(()),
            Some((name, bad)) => Err(Error::mismatch(name, POSITIVE, bad.to_string())),
        }
    }

    /// Radians per position of each pair of elements, `rotary_dim / 2` of them, in a text that is longer than
    /// [`short_context`](Self::short_context) or not.
    pub(super) fn inverse_frequencies(&self, is_long: bool) -> Vec<f32> {
        let dim = self.rotary_dim;
        let frequency = |pair: usize| self.theta.powf(-2. * pair as f64 / dim as f64);
        let keep = |pair: usize| match self.scaling {
            RopeScaling::Yarn {
                beta_fast, beta_slow, original_max_position_embeddings, truncate, ..
            } => {
                // The pair that turns so often in the context of pre-training.
                let pair_of = |turns: f64| {
                    let context = original_max_position_embeddings as f64;
                    let turn = context / (turns * std::f64::consts::TAU);
                    dim as f64 * turn.ln() / (2. * self.theta.ln())
                };
                let (first, last) = (pair_of(beta_fast), pair_of(beta_slow));
                let (first, last) = if truncate { (first.floor(), last.ceil()) } else { (first, last) };
                let (first, last) = (first.max(0.), last.min(dim as f64 - 1.));
                let length = if first == last { 0.001 } else { last - first };
                1. - ((pair as f64 - first) / length).clamp(0., 1.)
            }
            _ => 1.,
        };
        let divisors: Cow<[f64]> = match &self.scaling {
            RopeScaling::Long { short, long, .. } => Cow::Borrowed(if is_long { long } else { short }),
            _ => Cow::Owned(vec![1.; dim / 2]),
        };
        let of_pair = |(pair, divisor): (usize, &f64)| {
            (self.scaling.apply(frequency(pair), keep(pair)) / divisor) as f32
        };
        divisors.iter().enumerate().map(of_pair).collect()
    }

    /// The longest text whose frequencies are those of shorter ones, if those of longer ones are others.
    pub(super) fn short_context(&self) -> Option<usize> {
        match self.scaling {
            RopeScaling::Long { original_max_position_embeddings, .. } => {
                Some(original_max_position_embeddings)
            }
            _ => None,
        }
    }

    /// By what rotated queries and keys are multiplied.
    pub(super) fn attention_factor(&self) -> f32 {
        match self.scaling {
            RopeScaling::Yarn { attention_factor, .. } | RopeScaling::Long { attention_factor, .. } => {
                attention_factor as f32
            }
            _ => 1.,
        }
    }
}

impl RopeScaling {
    /// The scaled form of one frequency in radians per position, of which YaRN keeps the share `keep`.
    fn apply(&self, frequency: f64, keep: f64) -> f64 {
        match *self {
            Self::None | Self::Dynamic | Self::Long { .. } => frequency,
            Self::Linear { factor } => frequency / factor,
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
                let turns = original_max_position_embeddings as f64 * frequency / std::f64::consts::TAU;
                // 0 for long wavelengths, 1 for short ones.
                let keep = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0., 1.);
                keep * frequency + (1. - keep) * frequency / factor
            }
            Self::Yarn { factor, .. } => keep * frequency + (1. - keep) * frequency / factor,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fields::Fields;
    use serde_json::{json, Value};

    /// Heads of so many elements.
    fn read(config: &Value, head_dim: usize) -> Result<Rope> {
        let defaults = RopeDefaults {
            context: 2048,
            original: None,
            theta: 1e4,
            partial: 1.,
            may_be_partial: true,
            interleaved: false,
            head_dim,
        };
        Rope::from_fields(Fields::new(config), None, &defaults)
    }

    #[test]
    fn llama3_scaling_keeps_short_waves_and_stretches_long_ones() {
        let config = json!({"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}});
        let scaled = read(&config, 128).unwrap();
        let plain = Rope { scaling: RopeScaling::None, ..scaled.clone() };
        let (scaled, plain) = (scaled.inverse_frequencies(false), plain.inverse_frequencies(false));
        assert_eq!(scaled[0], 1.);
        for (s, p) in scaled.iter().zip(&plain) {
            // The published rule, in wavelengths.
            let wavelength = std::f64::consts::TAU / f64::from(*p);
            let expected = if wavelength < 8192. / 4. {
                f64::from(*p)
            } else if wavelength > 8192. {
                f64::from(*p) / 8.
            } else {
                let smooth = (8192. / wavelength - 1.) / 3.;
                (1. - smooth) * f64::from(*p) / 8. + smooth * f64::from(*p)
            };
            assert!((f64::from(*s) / expected - 1.).abs() < 1e-5, "{s} {expected}");
        }
    }

    #[test]
    fn parameters_are_read_from_either_place() {
        let old = json!({"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}});
        let new = json!({"rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}});
        let scaling = RopeScaling::Linear { factor: 2. };
        let expected = Rope { theta: 1e6, rotary_dim: 4, interleaved: false, scaling };
        assert_eq!(read(&old, 4).unwrap(), expected);
        assert_eq!(read(&new, 4).unwrap(), expected);
        assert_eq!(expected.inverse_frequencies(false), [0.5, 0.5e-3]);
    }

    /// gpt-oss: 64 elements a head, from the published definition.
    #[test]
    fn yarn_keeps_fast_pairs_and_slows_the_others() {
        let yarn = |truncate: bool| {
            let scaling = json!({"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "original_max_position_embeddings": 4096, "truncate": truncate});
            read(&json!({"rope_theta": 150000.0, "rope_scaling": scaling}), 64).unwrap()
        };
        assert!((yarn(false).attention_factor() - 1.346_573_6).abs() < 1e-6);
        // Pairs that turn 32 times and once in 4096 positions: 64 ln(4096 / (32 tau)) / (2 ln 150000) and so on.
        for (truncate, first, last) in [(false, 8.092_779, 17.398_025), (true, 8., 18.)] {
            for (pair, found) in yarn(truncate).inverse_frequencies(false).into_iter().enumerate() {
                let frequency = 150000f64.powf(-(pair as f64) / 32.);
                let slow = ((pair as f64 - first) / (last - first)).clamp(0., 1.);
                let expected = frequency * (1. - slow) + frequency / 32. * slow;
                assert!((f64::from(found) / expected - 1.).abs() < 1e-5, "{pair}: {found} {expected}");
            }
        }
    }

    #[test]
    fn a_yarn_without_a_ramp_is_refused() {
        let rope = |theta: f64, fast: f64| {
            let scaling = json!({"rope_type": "yarn", "factor": 2.0, "beta_fast": fast, "beta_slow": 1.0,
                "original_max_position_embeddings": 64});
            read(&json!({"rope_theta": theta, "rope_scaling": scaling}), 64).unwrap().validate()
        };
        assert!(rope(1e4, 32.).is_ok());
        assert!(rope(1., 32.).unwrap_err().to_string().contains("`rope_theta`: expected not 1"));
        assert!(rope(1e4, 0.5).unwrap_err().to_string().contains("`beta_fast`"));
    }

    #[test]
    fn scaling_that_is_not_implemented_is_named() {
        let config = json!({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}});
        let error = read(&config, 64).unwrap_err().to_string();
        assert!(error.contains("`spiral` is not supported"), "{error}");
    }
}
