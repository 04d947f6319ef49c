//! What a tensor is to become, and how that is written.

use super::Target;
use crate::{Error, QuantFormat, Result};
use candle_core::DType;
use std::fmt;
use std::str::FromStr;

/// What a tensor is to become.
///
/// ```
/// use candle_quant::convert::Spec;
/// use candle_quant::QuantFormat;
///
/// for text in ["affine:4:g64", "affine:4", "4", "q4", "int4", "4bit", "afq4"] {
///     assert_eq!(text.parse::<Spec>()?, Spec::Packed(QuantFormat::affine(4, 64)?));
/// }
/// assert_eq!("6:g32".parse::<Spec>()?.to_string(), "affine:6:g32");
/// assert_eq!("keep".parse::<Spec>()?, Spec::Keep);
/// # Ok::<(), candle_quant::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spec {
    /// Quantized.
    Packed(QuantFormat),
    /// Plain numbers of this dtype: F16, BF16 or F32.
    Cast(DType),
    /// What it is.
    Keep,
}

/// The group size of affine formats for which none is given.
const DEFAULT_GROUP_SIZE: usize = 64;

impl Spec {
    /// One step up in precision, for the tensors that deserve it, if the output has such a format; what is not packed
    /// stays as it is.
    pub(super) fn step_up(self, target: Target) -> Self {
        let Self::Packed(format) = self else {
            return self;
        };
        let wider = match format {
            QuantFormat::Affine { bits, group_size } => {
                let wider = QuantFormat::AFFINE_BITS.into_iter().filter(|wider| *wider > bits);
                wider.map(|bits| QuantFormat::Affine { bits, group_size }).collect()
            }
            _ => vec![QuantFormat::Mxfp8],
        };
        let wider = wider.into_iter().find(|wider| target.kind().check(*wider).is_ok());
        Self::Packed(wider.unwrap_or(format))
    }

    /// What mistral.rs makes of embeddings and heads.
    pub(super) fn promoted(self) -> Self {
        match self {
            Self::Packed(QuantFormat::Affine { bits, group_size }) => {
                let bits = if bits < 6 { 6 } else { 8 };
                Self::Packed(QuantFormat::Affine { bits, group_size })
            }
            other => other,
        }
    }
}

impl FromStr for Spec {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = || {
            let expected = "affine:BITS[:gGROUP] (BITS 1, 2, 3, 4, 5, 6 or 8; GROUP 32, 64 or 128), \
                            a width alone (4, q4, int4, 4bit, afq4), mxfp4, mxfp8, nvfp4, f16, bf16, f32 or keep";
            Error::mismatch("format", expected, format!("`{text}`"))
        };
        let lower = text.trim().to_ascii_lowercase();
        let mut words = lower.split(':');
        let spec = match words.next().unwrap_or_default() {
            "keep" => Self::Keep,
            "f16" => Self::Cast(DType::F16),
            "bf16" => Self::Cast(DType::BF16),
            "f32" => Self::Cast(DType::F32),
            "mxfp4" => Self::Packed(QuantFormat::Mxfp4),
            "mxfp8" => Self::Packed(QuantFormat::Mxfp8),
            "nvfp4" => Self::Packed(QuantFormat::Nvfp4),
            word => {
                let bits = match word {
                    "affine" => words.next().ok_or_else(wrong)?,
                    alias => ["q", "int", "afq"]
                        .into_iter()
                        .find_map(|prefix| alias.strip_prefix(prefix))
                        .or_else(|| alias.strip_suffix("bit"))
                        .unwrap_or(alias),
                };
                let group_size = match words.next() {
                    None => DEFAULT_GROUP_SIZE,
                    Some(group) => number(group.strip_prefix('g').unwrap_or_default()).ok_or_else(wrong)?,
                };
                let bits = number(bits).ok_or_else(wrong)?;
                Self::Packed(QuantFormat::affine(bits, group_size).map_err(|_| wrong())?)
            }
        };
        match words.next() {
            None => Ok(spec),
            Some(_) => Err(wrong()),
        }
    }
}

/// A number of digits only: `parse` also takes a sign.
fn number(text: &str) -> Option<usize> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Packed(QuantFormat::Affine { bits, group_size }) => {
                write!(f, "affine:{bits}:g{group_size}")
            }
            Self::Packed(format) => f.write_str(format.mode()),
            Self::Cast(dtype) => f.write_str(dtype.as_str()),
            Self::Keep => f.write_str("keep"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spec_is_read_as_it_is_written() {
        let packed = QuantFormat::all().into_iter().map(Spec::Packed);
        let others = [DType::F16, DType::BF16, DType::F32].map(Spec::Cast);
        for spec in packed.chain(others).chain([Spec::Keep]) {
            assert_eq!(spec.to_string().parse::<Spec>().unwrap(), spec);
        }
    }

    #[test]
    fn what_is_not_a_spec_is_refused_with_the_grammar() {
        for text in
            ["", "7", "affine", "affine:4:64", "affine:4:g16", "4:g", "mxfp4:g32", "q", "+4", "4:g64:x"]
        {
            let error = text.parse::<Spec>().unwrap_err().to_string();
            assert!(
                error.contains("affine:BITS[:gGROUP]") && error.contains(&format!("`{text}`")),
                "{error}"
            );
        }
    }

    #[test]
    fn a_step_up_is_the_next_width_that_exists() {
        let up = |text: &str| text.parse::<Spec>().unwrap().step_up(Target::Mlx).to_string();
        assert_eq!(up("4:g32"), "affine:5:g32");
        assert_eq!(up("6"), "affine:8:g64");
        assert_eq!(up("8"), "affine:8:g64");
        assert_eq!(up("nvfp4"), "mxfp8");
        assert_eq!(up("bf16"), "bf16");
        let up = |text: &str| text.parse::<Spec>().unwrap().step_up(Target::Uqff).to_string();
        assert_eq!(up("4"), "affine:6:g64");
        assert_eq!(up("mxfp4"), "mxfp4");
    }
}
