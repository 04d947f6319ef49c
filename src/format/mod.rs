//! What the bits of a quantized weight mean.
//!
//! A weight of logical shape `[.., N, K]` is stored as rows of packed codes plus one scale (and, for
//! affine formats, one bias) for each group of consecutive elements along K:
//!
//! | format | decoded element | codes | scale of a group | bits per weight |
//! |---|---|---|---|---|
//! | affine, b bits | `q * scale + bias` | unsigned b-bit integers | f16, bf16 or f32, and as many biases | b + 32 / group (16-bit scales) |
//! | affine, symmetric | `(q - 2^(b - 1)) * scale` | unsigned b-bit integers | f32, without biases | b + 32 / group |
//! | MXFP4 | `e2m1 * 2^(s - 127)` | E2M1 | E8M0, 32 elements | 4.25 |
//! | NVFP4 | `e2m1 * (e4m3 * global)` | E2M1 | E4M3, 16 elements | 4.5 |
//! | MXFP8 | `e4m3 * 2^(s - 127)` | E4M3 | E8M0, 32 elements | 8.25 |
//!
//! A row is one contiguous little-endian bit stream: element `i` owns the bits `[i * b, (i + 1) * b)`,
//! bit 0 being the least significant bit of byte 0. 32 elements are exactly `b` 32-bit words.
//!
//! [`decode`] and [`encode`] are the readable scalar reference; every other implementation in the
//! crate is tested against them. [`search`] improves what an encoder has left.

pub mod decode;
pub mod element;
pub mod encode;
pub mod packing;
pub mod search;

use crate::{Error, Result};
use std::fmt;

/// The quantization of one weight: how codes, scales and biases become numbers.
///
/// ```
/// use candle_quant::QuantFormat;
///
/// let format = QuantFormat::affine(4, 64)?;
/// assert_eq!(format.words_per_row(4096)?, 512);
/// assert_eq!(format.groups_per_row(4096)?, 64);
/// assert_eq!(format.to_string(), "affine 4-bit g64");
/// # Ok::<(), candle_quant::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QuantFormat {
    /// `q * scale + bias` with unsigned `bits`-bit codes.
    Affine {
        /// Bits of a code: 1, 2, 3, 4, 5, 6 or 8.
        bits: usize,
        /// Elements that share a scale and a bias: 32, 64 or 128.
        group_size: usize,
    },
    /// OCP MXFP4: E2M1 elements, an E8M0 scale for each 32.
    Mxfp4,
    /// NVFP4: E2M1 elements, an E4M3 scale for each 16, optionally a global scale.
    Nvfp4,
    /// OCP MXFP8 (E4M3): E4M3 elements, an E8M0 scale for each 32.
    Mxfp8,
}

/// How the scales of a format are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleKind {
    /// f16, bf16 or f32 numbers, accompanied by biases.
    Float,
    /// One byte, the biased exponent of a power of two.
    E8m0,
    /// One byte, an 8-bit float.
    E4m3,
}

impl QuantFormat {
    /// The affine widths that exist.
    pub const AFFINE_BITS: [usize; 7] = [1, 2, 3, 4, 5, 6, 8];
    /// The affine group sizes that exist.
    pub const AFFINE_GROUP_SIZES: [usize; 3] = [32, 64, 128];

    /// An affine format, checked.
    ///
    /// # Errors
    /// If `bits` is not 1, 2, 3, 4, 5, 6 or 8, or `group_size` not 32, 64 or 128.
    pub fn affine(bits: usize, group_size: usize) -> Result<Self> {
        let format = Self::Affine { bits, group_size };
        format.validate()?;
        Ok(format)
    }

    /// Every format there is, affine ones first, by width and group size.
    pub fn all() -> Vec<Self> {
        let affine = Self::AFFINE_BITS.into_iter().flat_map(|bits| {
            Self::AFFINE_GROUP_SIZES.into_iter().map(move |group_size| Self::Affine { bits, group_size })
        });
        affine.chain([Self::Mxfp4, Self::Nvfp4, Self::Mxfp8]).collect()
    }

    /// Checks the public fields of [`QuantFormat::Affine`].
    ///
    /// # Errors
    /// If bits or group size are none of those that exist.
    pub fn validate(self) -> Result<()> {
        match self {
            Self::Affine { bits, group_size }
                if !Self::AFFINE_BITS.contains(&bits) || !Self::AFFINE_GROUP_SIZES.contains(&group_size) =>
            {
                Err(Error::mismatch(
                    "affine format",
                    "bits 1, 2, 3, 4, 5, 6 or 8 and group size 32, 64 or 128",
                    format!("bits {bits}, group size {group_size}"),
                ))
            }
            _ => Ok(()),
        }
    }

    /// Bits of one code.
    pub fn bits(self) -> usize {
        match self {
            Self::Affine { bits, .. } => bits,
            Self::Mxfp4 | Self::Nvfp4 => 4,
            Self::Mxfp8 => 8,
        }
    }

    /// Elements that share a scale.
    pub fn group_size(self) -> usize {
        match self {
            Self::Affine { group_size, .. } => group_size,
            Self::Mxfp4 | Self::Mxfp8 => 32,
            Self::Nvfp4 => 16,
        }
    }

    /// How scales are stored.
    pub fn scale_kind(self) -> ScaleKind {
        match self {
            Self::Affine { .. } => ScaleKind::Float,
            Self::Mxfp4 | Self::Mxfp8 => ScaleKind::E8m0,
            Self::Nvfp4 => ScaleKind::E4m3,
        }
    }

    /// Whether each group has a bias beside its scale.
    pub fn has_biases(self) -> bool {
        matches!(self, Self::Affine { .. })
    }

    /// MLX's word for the format: `affine`, `mxfp4`, `nvfp4` or `mxfp8`.
    pub fn mode(self) -> &'static str {
        match self {
            Self::Affine { .. } => "affine",
            Self::Mxfp4 => "mxfp4",
            Self::Nvfp4 => "nvfp4",
            Self::Mxfp8 => "mxfp8",
        }
    }

    /// Groups of a row of `k` elements.
    ///
    /// # Errors
    /// If `k` is zero or not a multiple of the group size.
    pub fn groups_per_row(self, k: usize) -> Result<usize> {
        self.check_row(k)?;
        Ok(k / self.group_size())
    }

    /// 32-bit words of a row of `k` elements. Every whole group is a whole number of words.
    ///
    /// # Errors
    /// If `k` is zero, not a multiple of the group size, or too large to address.
    pub fn words_per_row(self, k: usize) -> Result<usize> {
        self.check_row(k)?;
        k.checked_mul(self.bits())
            .map(|bits| bits / 32)
            .ok_or_else(|| Error::mismatch("K", "a row that fits the address space", k.to_string()))
    }

    fn check_row(self, k: usize) -> Result<()> {
        self.validate()?;
        let group_size = self.group_size();
        if k == 0 || !k.is_multiple_of(group_size) {
            return Err(Error::mismatch(
                format!("K of {self}"),
                format!("a positive multiple of {group_size}"),
                k.to_string(),
            ));
        }
        Ok(())
    }
}

impl fmt::Display for QuantFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Affine { bits, group_size } => write!(f, "affine {bits}-bit g{group_size}"),
            other => f.write_str(other.mode()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_is_the_bit_stream_of_the_spec() {
        for format in QuantFormat::all() {
            for k in [32, 64, 96, 128, 4096, 16384] {
                if k % format.group_size() != 0 {
                    assert!(format.words_per_row(k).is_err(), "{format} K={k}");
                    continue;
                }
                assert_eq!(format.words_per_row(k).unwrap() * 32, k * format.bits());
                assert_eq!(format.groups_per_row(k).unwrap() * format.group_size(), k);
            }
        }
    }

    #[test]
    fn widths_and_groups_outside_the_table_are_refused() {
        for (bits, group_size) in [(0, 64), (7, 64), (9, 64), (4, 16), (4, 256), (4, 0)] {
            let error = QuantFormat::affine(bits, group_size).unwrap_err().to_string();
            assert!(error.contains(&format!("bits {bits}, group size {group_size}")), "{error}");
        }
    }

    #[test]
    fn rows_that_end_inside_a_group_are_refused() {
        for k in [0, 31, 48] {
            assert!(QuantFormat::Mxfp4.groups_per_row(k).is_err());
        }
        assert_eq!(QuantFormat::Nvfp4.groups_per_row(48).unwrap(), 3);
        assert!(QuantFormat::Affine { bits: 8, group_size: 64 }.words_per_row(usize::MAX - 63).is_err());
    }
}
