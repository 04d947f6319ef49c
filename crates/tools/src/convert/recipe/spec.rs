//! What a tensor is to become, and how that is written.

use candle_core::DType;
use candle_quant::format::{Bits, GgmlType};
use candle_quant::{Error, QuantFormat, Result};
use std::fmt;
use std::str::FromStr;

/// What a tensor is to become.
///
/// ```
/// use candle_quant_tools::convert::Spec;
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
#[non_exhaustive]
pub enum Spec {
    /// Quantized.
    Packed(QuantFormat),
    /// Dense elements of this dtype: F16, BF16 or F32.
    Cast(DType),
    /// What it is.
    Keep,
}

impl Spec {
    /// One step up in precision, for the tensors that deserve it, if the output has such a format; what is not packed
    /// stays as it is.
    pub(in crate::convert) fn step_up(self, has_format: &dyn Fn(QuantFormat) -> bool) -> Self {
        let Self::Packed(format) = self else {
            return self;
        };
        let wider: Vec<_> = match format.element().uint() {
            Some(_) if format == QuantFormat::Q4_K => vec![QuantFormat::Q6_K],
            Some(_) if format == QuantFormat::Q6_K => vec![GgmlType::Q8_0.format()],
            Some(bits) => {
                let wider = Bits::ALL.into_iter().filter(|wider| *wider > bits);
                wider.map(|bits| format.with_bits(bits)).collect()
            }
            None if format.bits() < 8 => vec![QuantFormat::MXFP8, GgmlType::Q8_0.format()],
            None => Vec::new(),
        };
        let wider = wider.into_iter().find(|wider| has_format(*wider));
        Self::Packed(wider.unwrap_or(format))
    }

    /// What mistral.rs makes of embeddings and heads.
    pub(super) fn promoted(self) -> Self {
        match self {
            Self::Packed(format) => {
                let bits = if format.bits() < 6 { Bits::Six } else { Bits::Eight };
                Self::Packed(format.with_bits(bits))
            }
            Self::Cast(_) | Self::Keep => self,
        }
    }
}

/// The type of GGML of this name.
fn ggml_type(name: &str) -> Option<GgmlType> {
    GgmlType::ALL.into_iter().find(|kind| kind.name().eq_ignore_ascii_case(name))
}

impl FromStr for Spec {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Ok(match text.trim().to_ascii_lowercase().as_str() {
            "keep" => Self::Keep,
            "f16" => Self::Cast(DType::F16),
            "bf16" => Self::Cast(DType::BF16),
            "f32" => Self::Cast(DType::F32),
            name if ggml_type(name).is_some() => {
                ggml_type(name).map_or(Self::Keep, |kind| Self::Packed(kind.format()))
            }
            _ => {
                let format = text.parse().ok().filter(|format| QuantFormat::all().contains(format));
                Self::Packed(format.ok_or_else(|| {
                    let expected =
                        format!("{}, q4_0, q8_0, q4_k, q6_k, f16, bf16, f32 or keep", QuantFormat::grammar());
                    Error::mismatch("format", expected, format!("`{text}`"))
                })?)
            }
        })
    }
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Packed(format) => match GgmlType::of(*format) {
                Some(kind) => f.write_str(&kind.name().to_lowercase()),
                None => write!(f, "{format:#}"),
            },
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
        let of_ggml = GgmlType::ALL.into_iter().map(GgmlType::format);
        let packed = QuantFormat::all().into_iter().chain(of_ggml).map(Spec::Packed);
        let others = [DType::F16, DType::BF16, DType::F32].map(Spec::Cast);
        for spec in packed.chain(others).chain([Spec::Keep]) {
            assert_eq!(spec.to_string().parse::<Spec>().unwrap(), spec);
        }
    }

    #[test]
    fn what_is_not_a_spec_is_refused_with_the_grammar() {
        let malformed =
            ["", "7", "affine", "affine:4:64", "affine:4:g16", "4:g", "mxfp4:g32", "q", "+4", "4:g64:x"];
        let only_read = ["symmetric:4", "symmetric:8:g32", "symmetric 4-bit g64"];
        for text in malformed.into_iter().chain(only_read) {
            let error = text.parse::<Spec>().unwrap_err().to_string();
            assert!(
                error.contains("affine:BITS[:gGROUP]") && error.contains(&format!("`{text}`")),
                "{error}"
            );
        }
    }
}
