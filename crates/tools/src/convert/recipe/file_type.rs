//! Types of files that are no format of this crate: their numbers lie or are rounded otherwise.

use candle_quant::format::{GgmlType, Slm1Type, UqffType};
use candle_quant::{QuantFormat, Result};

/// A type of files that is no format of this crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileType {
    /// One of GGML whose format has other scales in MLX's layout: Q4_1 or Q5_1.
    Ggml(GgmlType),
    /// One of mistral.rs.
    Uqff(UqffType),
    /// One of SLM1 files, which is what the type of GGML of its name means there.
    Slm1(Slm1Type),
    /// E4M3 codes with float scales, as compressed-tensors has them. Nothing is quantized to it.
    Fp8(Fp8Scales),
    /// Codes of an affine format with a code for the zero of each group, as compressed-tensors has them. Nothing is quantized to it.
    WithZeros(QuantFormat),
}

/// What shares a scale in FP8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fp8Scales {
    /// All of a weight.
    Tensor,
    /// A row.
    Rows,
    /// So many rows and columns.
    Blocks(usize, usize),
}

impl FileType {
    /// All that have names of their own.
    pub fn all() -> impl Iterator<Item = Self> {
        let of_ggml = GgmlType::ALL.into_iter().filter(|kind| kind.is_affine()).map(Self::Ggml);
        of_ggml.chain(UqffType::ALL.map(Self::Uqff))
    }

    /// The name, in lower case.
    pub fn name(self) -> String {
        match self {
            Self::Ggml(kind) => kind.name().to_lowercase(),
            Self::Uqff(kind) => kind.name().to_owned(),
            Self::Slm1(kind) => kind.name().to_owned(),
            Self::WithZeros(format) => format!("{format} with zeros"),
            Self::Fp8(Fp8Scales::Tensor) => "fp8".to_owned(),
            Self::Fp8(Fp8Scales::Rows) => "fp8 rows".to_owned(),
            Self::Fp8(Fp8Scales::Blocks(rows, columns)) => format!("fp8 {rows} x {columns}"),
        }
    }

    /// The format of this crate that is nearest.
    pub const fn format(self) -> QuantFormat {
        const FP8: QuantFormat = QuantFormat::fp8_opt(128).unwrap();
        match self {
            Self::Fp8(_) => FP8,
            Self::WithZeros(format) => format,
            Self::Ggml(kind) => kind.format(),
            Self::Uqff(kind) => kind.format(),
            Self::Slm1(kind) => kind.format(),
        }
    }

    /// Why a tensor of this shape can't have this type.
    pub(in crate::convert) fn obstacle(self, dims: &[usize]) -> Option<String> {
        match self {
            Self::Ggml(kind) => rows(dims, kind.block().0),
            Self::Slm1(kind) => rows(dims, kind.block(dims.last().copied().unwrap_or(0)).max(1)),
            Self::Fp8(_) => Some("fp8 with float scales, which is only copied".to_owned()),
            Self::WithZeros(_) => Some("integers with zeros, which are only copied".to_owned()),
            Self::Uqff(kind) if dims.len() != 2 => Some(of_experts(kind)),
            Self::Uqff(kind) => {
                let elements = dims.iter().try_fold(1usize, |all, dim| all.checked_mul(*dim));
                let checked: Result<()> = kind.check(elements.unwrap_or(1));
                checked.err().map(|error| error.to_string())
            }
        }
    }
}

/// Why experts are not of this type.
pub(in crate::convert) fn of_experts(kind: UqffType) -> String {
    format!("experts, of which mistral.rs reads none in {}", kind.name())
}

/// Why rows are not of this many elements, again and again.
pub(in crate::convert) fn rows(dims: &[usize], granularity: usize) -> Option<String> {
    let k = dims.last().copied().unwrap_or(0);
    (!k.is_multiple_of(granularity))
        .then(|| format!("rows of {k} are no whole number of groups of {granularity}"))
}
