//! Rotary position embedding: angles from a config, applied to the two halves of each head.

use super::fields::{is_positive, Fields, POSITIVE};
use candle_core::{DType, Device, Tensor};
use candle_quant::{Error, Result};
use serde_json::Value;

/// Base frequency and scaling of the rotary position embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// `rope_theta`.
    pub theta: f64,
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
    /// Reads `rope_theta` and `rope_scaling`, or the `rope_parameters` that newer configs put both in.
    pub(super) fn from_json(config: &Value) -> Result<Self> {
        const DEFAULT_THETA: f64 = 10_000.;
        let top = Fields::new(config);
        let (key, scaling) = match (top.get("rope_parameters"), top.get("rope_scaling")) {
            (Some(parameters), _) => ("rope_parameters", Some(parameters)),
            (None, scaling) => ("rope_scaling", scaling),
        };
        let inner = scaling.map(|value| Fields::under(key, value));
        let theta = match inner.map(|fields| fields.positive("rope_theta")).transpose()?.flatten() {
            Some(theta) => theta,
            None => top.positive("rope_theta")?.unwrap_or(DEFAULT_THETA),
        };
        for fields in [Some(top), inner].into_iter().flatten() {
            if fields.positive("partial_rotary_factor")?.is_some_and(|factor| factor != 1.) {
                return Err(unsupported("partial rotary embedding".to_string()));
            }
        }
        let scaling = match inner {
            None => RopeScaling::None,
            Some(fields) => RopeScaling::from_fields(fields, top)?,
        };
        Ok(Self { theta, scaling })
    }

    /// What a hand-made value has to satisfy.
    pub(super) fn validate(&self) -> Result<()> {
        let context_of = |context: usize| ("rope scaling `original_max_position_embeddings`", context as f64);
        let numbers = match self.scaling {
            RopeScaling::None => vec![],
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

    /// Radians per position of each pair of elements, `head_dim / 2` of them.
    pub(super) fn inverse_frequencies(&self, head_dim: usize) -> Vec<f32> {
        let frequency = |pair: usize| self.theta.powf(-2. * pair as f64 / head_dim as f64);
        let keep = |pair: usize| match self.scaling {
            RopeScaling::Yarn {
                beta_fast, beta_slow, original_max_position_embeddings, truncate, ..
            } => {
                // The pair that turns so often in the context of pre-training.
                let pair_of = |turns: f64| {
                    let context = original_max_position_embeddings as f64;
                    let turn = context / (turns * std::f64::consts::TAU);
                    head_dim as f64 * turn.ln() / (2. * self.theta.ln())
                };
                let (first, last) = (pair_of(beta_fast), pair_of(beta_slow));
                let (first, last) = if truncate { (first.floor(), last.ceil()) } else { (first, last) };
                let (first, last) = (first.max(0.), last.min(head_dim as f64 - 1.));
                let length = if first == last { 0.001 } else { last - first };
                1. - ((pair as f64 - first) / length).clamp(0., 1.)
            }
            _ => 1.,
        };
        (0..head_dim / 2).map(|pair| self.scaling.apply(frequency(pair), keep(pair)) as f32).collect()
    }

    /// By what rotated queries and keys are multiplied.
    pub(super) fn attention_factor(&self) -> f32 {
        match self.scaling {
            RopeScaling::Yarn { attention_factor, .. } => attention_factor as f32,
            _ => 1.,
        }
    }
}

impl RopeScaling {
    fn from_fields(fields: Fields, top: Fields) -> Result<Self> {
        let kind = match fields.text("rope_type")? {
            Some(kind) => kind,
            None => fields.text("type")?.unwrap_or("default"),
        };
        match kind {
            "default" => Ok(Self::None),
            "linear" => Ok(Self::Linear { factor: fields.required_positive("factor")? }),
            "llama3" => Ok(Self::Llama3 {
                factor: fields.required_positive("factor")?,
                low_freq_factor: fields.positive("low_freq_factor")?.unwrap_or(1.),
                high_freq_factor: fields.positive("high_freq_factor")?.unwrap_or(4.),
                original_max_position_embeddings: fields
                    .size("original_max_position_embeddings")?
                    .unwrap_or(8192),
            }),
            "yarn" => {
                let factor = fields.required_positive("factor")?;
                let context = match fields.size("original_max_position_embeddings")? {
                    Some(context) => context,
                    None => top.required_size("max_position_embeddings")?,
                };
                let stretch = |scale: f64| if factor > 1. { 0.1 * scale * factor.ln() + 1. } else { 1. };
                let attention_factor = match (
                    fields.positive("attention_factor")?,
                    fields.positive("mscale")?,
                    fields.positive("mscale_all_dim")?,
                ) {
                    (Some(attention_factor), _, _) => attention_factor,
                    (None, Some(scale), Some(of_all)) => stretch(scale) / stretch(of_all),
                    _ => stretch(1.),
                };
                Ok(Self::Yarn {
                    factor,
                    beta_fast: fields.positive("beta_fast")?.unwrap_or(32.),
                    beta_slow: fields.positive("beta_slow")?.unwrap_or(1.),
                    original_max_position_embeddings: context,
                    truncate: fields.flag("truncate")?.unwrap_or(true),
                    attention_factor,
                })
            }
            other => Err(unsupported(format!("rope scaling `{other}`"))),
        }
    }

    /// The scaled form of one frequency in radians per position, of which YaRN keeps the share `keep`.
    fn apply(&self, frequency: f64, keep: f64) -> f64 {
        match *self {
            Self::None => frequency,
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

fn unsupported(what: String) -> Error {
    Error::Unsupported {
        what,
        remedy: "use a model with default, linear, llama3 or yarn scaling".to_string(),
    }
}

/// Cosines and sines for one run of positions, shared by all layers of a forward pass.
pub(super) struct Rotation {
    cos: Tensor,
    sin: Tensor,
}

impl Rotation {
    /// Tables `[len, head_dim / 2]` for the positions from `offset` on. Angles are f32 products, as in
    /// the implementations the models were trained with; the tables, times `factor`, are then rounded to
    /// `dtype`.
    pub fn new(
        inverse_frequencies: &[f32],
        factor: f32,
        offset: usize,
        len: usize,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Self> {
        let table = |f: fn(f32) -> f32| {
            let values: Vec<f32> = (offset..offset + len)
                .flat_map(|position| {
                    inverse_frequencies.iter().map(move |frequency| f(position as f32 * frequency) * factor)
                })
                .collect();
            Tensor::from_vec(values, (len, inverse_frequencies.len()), device)?.to_dtype(dtype)
        };
        Ok(Self { cos: table(f32::cos)?, sin: table(f32::sin)? })
    }

    /// The rotation back, times the same factor: that of gradients.
    pub fn inverse(&self) -> candle_core::Result<Self> {
        Ok(Self { cos: self.cos.clone(), sin: self.sin.neg()? })
    }

    /// Rotates `x`, `[B, T, heads, head_dim]`: element i of a head pairs with element i + head_dim / 2.
    pub fn apply(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        candle_nn::rotary_emb::rope_thd(x, &self.cos, &self.sin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn llama3_scaling_keeps_short_waves_and_stretches_long_ones() {
        let config = json!({"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}});
        let scaled = Rope::from_json(&config).unwrap();
        let plain = Rope { scaling: RopeScaling::None, ..scaled.clone() };
        let (scaled, plain) = (scaled.inverse_frequencies(128), plain.inverse_frequencies(128));
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
        let expected = Rope { theta: 1e6, scaling: RopeScaling::Linear { factor: 2. } };
        assert_eq!(Rope::from_json(&old).unwrap(), expected);
        assert_eq!(Rope::from_json(&new).unwrap(), expected);
        assert_eq!(expected.inverse_frequencies(4), [0.5, 0.5e-3]);
    }

    /// gpt-oss: 64 elements a head, from the published definition.
    #[test]
    fn yarn_keeps_fast_pairs_and_slows_the_others() {
        let yarn = |truncate: bool| {
            let scaling = json!({"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "original_max_position_embeddings": 4096, "truncate": truncate});
            Rope::from_json(&json!({"rope_theta": 150000.0, "rope_scaling": scaling})).unwrap()
        };
        assert!((yarn(false).attention_factor() - 1.346_573_6).abs() < 1e-6);
        // Pairs that turn 32 times and once in 4096 positions: 64 ln(4096 / (32 tau)) / (2 ln 150000) and so on.
        for (truncate, first, last) in [(false, 8.092_779, 17.398_025), (true, 8., 18.)] {
            for (pair, found) in yarn(truncate).inverse_frequencies(64).into_iter().enumerate() {
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
            Rope::from_json(&json!({"rope_theta": theta, "rope_scaling": scaling})).unwrap().validate()
        };
        assert!(rope(1e4, 32.).is_ok());
        assert!(rope(1., 32.).unwrap_err().to_string().contains("`rope_theta`: expected not 1"));
        assert!(rope(1e4, 0.5).unwrap_err().to_string().contains("`beta_fast`"));
    }

    #[test]
    fn scaling_that_is_not_implemented_is_named() {
        let config = json!({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}});
        let error = Rope::from_json(&config).unwrap_err().to_string();
        assert!(error.contains("`dynamic` is not supported"), "{error}");
    }
}
