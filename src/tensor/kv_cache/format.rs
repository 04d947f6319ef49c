//! How a KV cache holds numbers.

use crate::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// How a [`KvCache`](super::KvCache) or [`DeviceKvCache`](super::DeviceKvCache) holds its keys or its values.
///
/// | format | bytes for each number | what is lost |
/// |---|---|---|
/// | `F32` | 4 | nothing |
/// | `F16` | 2 | rounding to 11 bits; magnitudes above 65504 become infinite |
/// | `Bf16` | 2 | rounding to 8 bits |
/// | `Affine8` | 1.0625 | 8-bit codes in groups of 64, each with a scale and a bias in f16 |
/// | `Affine4` | 0.625 | 4-bit codes in groups of 32, likewise, of numbers rotated by a Hadamard matrix |
///
/// Codes are those of [`QuantFormat::affine`](crate::QuantFormat::affine) with scales in f16. Groups lie in one head of one
/// token; the last one is shorter where the head's size is no multiple.
///
/// ```
/// use candle_quant::KvFormat;
///
/// assert_eq!("8bit".parse::<KvFormat>()?, KvFormat::Affine8);
/// assert_eq!(KvFormat::Bf16.to_string(), "bf16");
/// # Ok::<(), candle_quant::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KvFormat {
    /// 32-bit floats.
    F32,
    /// IEEE 16-bit floats.
    F16,
    /// The upper half of 32-bit floats, rounded.
    Bf16,
    /// 8-bit codes, groups of 64.
    Affine8,
    /// 4-bit codes, groups of 32. The numbers of a head are rotated first, which spreads outliers over all of them: queries
    /// are rotated like keys, and outputs rotated back, so that nothing changes but the error.
    Affine4,
}

impl KvFormat {
    const ALL: [Self; 5] = [Self::F32, Self::F16, Self::Bf16, Self::Affine8, Self::Affine4];

    /// Bits of a number or a code.
    pub(crate) fn bits(self) -> usize {
        match self {
            Self::F32 => 32,
            Self::F16 | Self::Bf16 => 16,
            Self::Affine8 => 8,
            Self::Affine4 => 4,
        }
    }

    /// Codes that share a scale and a bias; none for floats.
    pub(crate) fn group_size(self) -> Option<usize> {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => None,
            Self::Affine8 => Some(64),
            Self::Affine4 => Some(32),
        }
    }

    /// Groups of a head of so many elements; none for floats.
    pub(crate) fn groups(self, head_dim: usize) -> usize {
        self.group_size().map_or(0, |size| head_dim.div_ceil(size))
    }

    /// Whether numbers are held as codes, with scales and biases, not as floats.
    pub fn is_quantized(self) -> bool {
        self.group_size().is_some()
    }

    /// Whether the numbers of a head are rotated by a Hadamard matrix.
    pub(crate) fn is_rotated(self) -> bool {
        self == Self::Affine4
    }

    fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Affine8 => "8bit",
            Self::Affine4 => "4bit",
        }
    }
}

impl fmt::Display for KvFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for KvFormat {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let named = Self::ALL.into_iter().find(|format| format.name().eq_ignore_ascii_case(text));
        named.ok_or_else(|| Error::mismatch("format of a KV cache", "f32, f16, bf16, 8bit or 4bit", text))
    }
}
