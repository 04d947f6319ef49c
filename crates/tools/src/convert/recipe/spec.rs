//! What a tensor is to become, and how that is written.

use super::file_type::FileType;
use candle_core::DType;
use candle_quant::format::{Bits, GgmlType, UqffType};
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
    /// Quantized, as a type of files that is no format.
    Type(FileType),
    /// Dense elements of this dtype: F16, BF16 or F32.
    Cast(DType),
    /// What it is.
    Keep,
}

impl Spec {
    /// One step up in precision, for the tensors that deserve it, if the output has such a format; what is not packed
    /// stays as it is.
    pub(in crate::convert) fn step_up(self, has_format: &dyn Fn(QuantFormat) -> bool) -> Self {
        let format = match self {
            Self::Packed(format) => format,
            Self::Type(FileType::Ggml(kind)) => {
                let wider = GgmlType::Q8_0.format();
                return if has_format(wider) { Self::Packed(wider) } else { Self::ggml(kind) };
            }
            Self::Type(FileType::Uqff(_) | FileType::Slm1(_) | FileType::Fp8(_) | FileType::WithZeros(_))
            | Self::Cast(_)
            | Self::Keep => return self,
        };
        let wider: Vec<_> = match GgmlType::of(format) {
            Some(GgmlType::Q2K | GgmlType::Q3K | GgmlType::Q4K | GgmlType::Q5K) => vec![QuantFormat::Q6_K],
            Some(GgmlType::Q4_0 | GgmlType::Q5_0 | GgmlType::Q6K) => vec![GgmlType::Q8_0.format()],
            _ => wider_formats(format),
        };
        let wider = wider.into_iter().find(|wider| has_format(*wider));
        Self::Packed(wider.unwrap_or(format))
    }

    /// A type of GGML.
    pub fn ggml(kind: GgmlType) -> Self {
        match kind.is_affine() {
            true => Self::Type(FileType::Ggml(kind)),
            false => Self::Packed(kind.format()),
        }
    }

    /// The format, or the nearest one; `None` if it is none.
    pub(in crate::convert) fn format(self) -> Option<QuantFormat> {
        match self {
            Self::Packed(format) => Some(format),
            Self::Type(of_files) => Some(of_files.format()),
            Self::Cast(_) | Self::Keep => None,
        }
    }

    /// What mistral.rs makes of embeddings and heads.
    pub(super) fn promoted(self) -> Self {
        let format = match self {
            Self::Packed(format) => format,
            Self::Type(FileType::Ggml(GgmlType::Q4_1)) => return Self::Packed(QuantFormat::Q6_K),
            Self::Type(FileType::Ggml(_)) => return Self::ggml(GgmlType::Q8_0),
            Self::Type(FileType::Uqff(_) | FileType::Slm1(_) | FileType::Fp8(_) | FileType::WithZeros(_))
            | Self::Cast(_)
            | Self::Keep => return self,
        };
        match GgmlType::of(format) {
            Some(GgmlType::Q4_0 | GgmlType::Q2K | GgmlType::Q3K | GgmlType::Q4K) => {
                Self::Packed(QuantFormat::Q6_K)
            }
            Some(GgmlType::Q5_0 | GgmlType::Q5K | GgmlType::Q6K | GgmlType::Q8_0) => {
                Self::ggml(GgmlType::Q8_0)
            }
            _ => {
                let bits = if format.bits() < 6 { Bits::Six } else { Bits::Eight };
                Self::Packed(format.with_bits(bits))
            }
        }
    }
}

/// Formats of more bits, the narrowest first.
fn wider_formats(format: QuantFormat) -> Vec<QuantFormat> {
    match format.element().uint() {
        Some(bits) => {
            let wider = Bits::ALL.into_iter().filter(|wider| *wider > bits);
            wider.map(|bits| format.with_bits(bits)).collect()
        }
        None if format.bits() < 8 => vec![QuantFormat::MXFP8, GgmlType::Q8_0.format()],
        None => Vec::new(),
    }
}

/// The type of files of this name, which mistral.rs writes without a line in `q4k`.
fn file_type(name: &str) -> Option<Spec> {
    let is_meant = |kind: &GgmlType| {
        kind.name().eq_ignore_ascii_case(name) || kind.name().replace("_K", "K").eq_ignore_ascii_case(name)
    };
    let of_ggml = GgmlType::ALL.into_iter().find(is_meant).map(Spec::ggml);
    let of_uqff = || FileType::all().find(|kind| kind.name() == name).map(Spec::Type);
    of_ggml.or_else(of_uqff)
}

/// The names of all types of files that are not those of formats.
fn file_types() -> String {
    let is_own = |kind: &GgmlType| !QuantFormat::all().contains(&kind.format()) || kind.is_affine();
    let of_ggml = GgmlType::ALL.into_iter().filter(is_own);
    let names: Vec<_> = of_ggml.map(|kind| kind.name().to_lowercase()).collect();
    let of_uqff = UqffType::ALL.map(|kind| kind.name().to_owned());
    [&names[..], &of_uqff].concat().join(", ")
}

impl FromStr for Spec {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Ok(match text.trim().to_ascii_lowercase().as_str() {
            "keep" => Self::Keep,
            "f16" => Self::Cast(DType::F16),
            "bf16" => Self::Cast(DType::BF16),
            "f32" => Self::Cast(DType::F32),
            name => {
                if let Some(spec) = file_type(name) {
                    return Ok(spec);
                }
                let format = text.parse().ok().filter(|format| QuantFormat::all().contains(format));
                Self::Packed(format.ok_or_else(|| {
                    let expected =
                        format!("{}, {}, f16, bf16, f32 or keep", QuantFormat::grammar(), file_types());
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
            Self::Type(of_files) => f.write_str(&of_files.name()),
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
        let of_ggml = GgmlType::ALL.into_iter().map(Spec::ggml);
        let packed = QuantFormat::all().into_iter().map(Spec::Packed).chain(of_ggml);
        let packed = packed.chain(FileType::all().map(Spec::Type));
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
