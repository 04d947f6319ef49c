//! What the bits of a quantized weight mean.
//!
//! A weight of logical shape `[.., N, K]` is stored as rows of packed codes, with one scale (and for affine formats one
//! bias) for each group of consecutive elements along K. A format is data, a [`QuantFormat`] of four axes:
//!
//! | format | dequantized element | [`Element`] | [`Scale`] of a group | [`ZeroPoint`] | bits per weight |
//! |---|---|---|---|---|---|
//! | affine, b bits | `q * scale + bias` | `Uint` | f16, bf16 or f32 | `Bias`, dtype as the scale | b + 32 / group (16-bit scales) |
//! | symmetric, b bits | `(q - 2^(b - 1)) * scale` | `Uint` | f32 | `Midpoint` | b + 32 / group |
//! | MXFP4 | `e2m1 * 2^(s - 127)` | `E2m1` | E8M0, 32 elements | `None` | 4.25 |
//! | NVFP4 | `e2m1 * (e4m3 * global)` | `E2m1` | E4M3, 16 elements | `None` | 4.5 |
//! | MXFP8 | `e4m3 * 2^(s - 127)` | `E4m3` | E8M0, 32 elements | `None` | 8.25 |
//! | FP8 | `e4m3 * scale` | `E4m3` | f16, bf16 or f32, 32, 64 or 128 elements | `None` | 8 + 16 / group (16-bit scales) |
//! | MXINT8 | `int8 / 64 * 2^(s - 127)` | `Int8` | E8M0, 32 elements | `None` | 8.25 |
//! | NF4, FP4 | `nf4 * scale`, `fp4 * scale` | `Nf4`, `Fp4` | f16, bf16 or f32, 64 elements | `None` | 4.25 (16-bit scales) |
//! | Q4_K, Q5_K; Q2_K | `q * scale + bias` | `Uint` | `int8 * f16` of 256, 32 elements; 16 | `Bias` | 4.63, 5.63; 3.13 |
//! | Q3_K, Q6_K | `(q - 2^(b - 1)) * scale` | `Uint` | `int8 * f16` of 256, 16 elements | `Midpoint` | 3.56, 6.56 |
//! | IQ1_S; IQ1_M | `iq * scale` | `Iq` | `int8 * f16` of 256, 32 elements; 16 | `None` | 2.31; 3.56 |
//! | IQ2_XXS; IQ2_XS, IQ2_S | `iq * scale` | `Iq` | `int8 * f16` of 256, 32 elements; 16 | `None` | 3.31; 3.56 |
//! | IQ3_XXS, IQ3_S | `iq * scale` | `Iq` | `int8 * f16` of 256, 32 elements | `None` | 4.31 |
//! | IQ4_XS; IQ4_NL | `iq4 * scale` | `Iq4Nl` | `int8 * f16` of 256; a float; 32 elements | `None` | 4.31; 4.5 |
//!
//! A row is one contiguous little-endian bit stream: element `i` owns the bits `[i * b, (i + 1) * b)`,
//! bit 0 being the least significant bit of byte 0. 32 elements are exactly `b` 32-bit words.
//!
//! [`QuantizedRows`] and [`dequantize_row`] are the scalar reference. Each family of formats has one file with its
//! quantization and clip search: `affine.rs`, `mx.rs`, `nvfp4.rs` and `nf4.rs`; those of `ggml.rs` are only read.
//! [`GgmlType`] and [`UqffType`] are types of files that rows, or whole weights, are quantized to.

#![deny(clippy::wildcard_enum_match_arm)]

mod affine;
mod axes;
mod bits;
mod clip_search;
mod feedback;
mod ggml;
mod ggml_blocks;
mod ggml_quantize;
mod ggml_super_blocks;
mod ggml_super_layouts;
mod grammar;
mod hqq;
mod layout;
mod mx;
mod nf4;
mod numeric;
mod nvfp4;
mod rows;
mod slm1_types;
mod small_floats;
mod uqff_types;

pub(crate) use affine::quantize_group as quantize_affine_group;
pub use axes::{Bits, Element, Scale, ZeroPoint};
pub(crate) use bits::unpack;
pub use bits::{code_at, pack};
use clip_search::Row;
pub use feedback::ErrorFeedback;
pub(crate) use ggml::IQ4_NL;
pub use ggml::{IqTable, SUPER_BLOCK};
pub use ggml_blocks::GgmlType;
pub(crate) use nf4::{FP4, NF4};
pub use numeric::Real;
pub use nvfp4::{global_scale_from_absmax, NVFP4_MAX};
pub use rows::{dequantize_row, GroupScales, QuantizedRows, Quantizer};
use rows::{GroupScalesMut, RowMut};
pub use slm1_types::Slm1Type;
pub(crate) use small_floats::E2M1;
pub use uqff_types::{UqffNumbers, UqffType};

use crate::{Error, Result};

/// The quantization of one weight: how codes, scales and biases become numbers.
///
/// There are only values of formats that exist: constructors and the constants make them, and nothing changes them.
///
/// ```
/// use candle_quant::format::{Bits, Element, Scale, ZeroPoint};
/// use candle_quant::QuantFormat;
///
/// let format = QuantFormat::affine(4, 64)?;
/// assert_eq!(format.element(), Element::Uint(Bits::Four));
/// assert_eq!((format.scale(), format.zero_point()), (Scale::Float, ZeroPoint::Bias));
/// assert_eq!(format.words_per_row(4096)?, 512);
/// assert_eq!(format.groups_per_row(4096)?, 64);
/// assert_eq!(format.to_string(), "affine 4-bit g64");
/// assert_eq!("affine:4:g64".parse::<QuantFormat>()?, format);
/// assert_eq!("mxfp4".parse::<QuantFormat>()?, QuantFormat::MXFP4);
/// # Ok::<(), candle_quant::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QuantFormat {
    element: Element,
    scale: Scale,
    zero_point: ZeroPoint,
    group_size: usize,
}

impl QuantFormat {
    /// OCP MXFP4: E2M1 elements, an E8M0 scale for each 32.
    pub const MXFP4: Self = Self::of(Element::E2m1, Scale::E8m0, ZeroPoint::None, 32);
    /// NVFP4: E2M1 elements, an E4M3 scale for each 16, optionally a global scale.
    pub const NVFP4: Self = Self::of(Element::E2m1, Scale::E4m3, ZeroPoint::None, 16);
    /// OCP MXFP8 (E4M3): E4M3 elements, an E8M0 scale for each 32.
    pub const MXFP8: Self = Self::of(Element::E4m3, Scale::E8m0, ZeroPoint::None, 32);
    /// OCP MXINT8: two's-complement integers times 2^-6, an E8M0 scale for each 32.
    pub const MXINT8: Self = Self::of(Element::Int8, Scale::E8m0, ZeroPoint::None, 32);
    /// NF4 of bitsandbytes: one of sixteen values, a float scale for each 64.
    pub const NF4: Self = Self::of(Element::Nf4, Scale::Float, ZeroPoint::None, 64);
    /// FP4 of bitsandbytes: one of sixteen values, a float scale for each 64.
    pub const FP4: Self = Self::of(Element::Fp4, Scale::Float, ZeroPoint::None, 64);
    /// Formats with a name and without parameters.
    const NAMED: [(&'static str, Self); 6] = [
        ("mxfp4", Self::MXFP4),
        ("nvfp4", Self::NVFP4),
        ("mxfp8", Self::MXFP8),
        ("mxint8", Self::MXINT8),
        ("nf4", Self::NF4),
        ("fp4", Self::FP4),
    ];
    /// The group sizes of affine and symmetric formats.
    pub const AFFINE_GROUP_SIZES: [usize; 3] = [32, 64, 128];

    const fn of(element: Element, scale: Scale, zero_point: ZeroPoint, group_size: usize) -> Self {
        Self { element, scale, zero_point, group_size }
    }

    /// A format that nobody has, for tests of what happens then.
    #[cfg(test)]
    pub(crate) const fn made_up(
        element: Element,
        scale: Scale,
        zero_point: ZeroPoint,
        group_size: usize,
    ) -> Self {
        Self::of(element, scale, zero_point, group_size)
    }

    /// An affine format, `q * scale + bias`.
    ///
    /// # Errors
    /// If `bits` is not 1, 2, 3, 4, 5, 6 or 8, or `group_size` not 32, 64 or 128.
    pub fn affine(bits: usize, group_size: usize) -> Result<Self> {
        Self::affine_opt(bits, group_size).ok_or_else(|| no_integers(bits, group_size))
    }

    /// [`QuantFormat::affine`] for constants.
    pub const fn affine_opt(bits: usize, group_size: usize) -> Option<Self> {
        Self::integers(bits, group_size, ZeroPoint::Bias)
    }

    /// A symmetric format, `(q - 2^(bits - 1)) * scale`.
    ///
    /// # Errors
    /// If `bits` is not 1, 2, 3, 4, 5, 6 or 8, or `group_size` not 32, 64 or 128.
    pub fn symmetric(bits: usize, group_size: usize) -> Result<Self> {
        Self::symmetric_opt(bits, group_size).ok_or_else(|| no_integers(bits, group_size))
    }

    /// [`QuantFormat::symmetric`] for constants.
    pub const fn symmetric_opt(bits: usize, group_size: usize) -> Option<Self> {
        Self::integers(bits, group_size, ZeroPoint::Midpoint)
    }

    /// FP8 with float scales: E4M3 elements, a scale for each 32, 64 or 128; it is only read.
    ///
    /// # Errors
    /// If `group_size` is not 32, 64 or 128.
    pub fn fp8(group_size: usize) -> Result<Self> {
        Self::fp8_opt(group_size)
            .ok_or_else(|| Error::mismatch("fp8 format", "group size 32, 64 or 128", group_size.to_string()))
    }

    /// [`QuantFormat::fp8`] for constants.
    pub const fn fp8_opt(group_size: usize) -> Option<Self> {
        match group_size {
            32 | 64 | 128 => Some(Self::of(Element::E4m3, Scale::Float, ZeroPoint::None, group_size)),
            _ => None,
        }
    }

    const fn integers(bits: usize, group_size: usize, zero_point: ZeroPoint) -> Option<Self> {
        match (Bits::new(bits), group_size) {
            (Some(bits), 32 | 64 | 128) => {
                Some(Self::of(Element::Uint(bits), Scale::Float, zero_point, group_size))
            }
            _ => None,
        }
    }

    /// # Errors
    /// If nothing quantizes to the format.
    #[cfg(feature = "cuda")]
    pub(crate) fn ensure_quantizable(self) -> Result<()> {
        family(self).map(drop)
    }

    /// Every format that weights can be quantized to, affine ones first, by width and group size. Others are
    /// [only read](QuantFormat::only_read).
    pub fn all() -> Vec<Self> {
        Self::all_affine().chain(Self::NAMED.map(|(_, format)| format)).collect()
    }

    /// The formats that nothing quantizes to: symmetric ones, FP8 with float scales, and GGML's types.
    pub fn only_read() -> impl Iterator<Item = Self> {
        let sizes = || Self::AFFINE_GROUP_SIZES.into_iter();
        let symmetric = Bits::ALL
            .into_iter()
            .flat_map(move |bits| sizes().filter_map(move |size| Self::symmetric_opt(bits.get(), size)));
        symmetric
            .chain(sizes().filter_map(Self::fp8_opt))
            .chain(Self::GGML.into_iter().map(|(_, format)| format))
    }

    /// The formats that MLX has: those that files of MLX and Ollama can be without saying so.
    pub fn mlx() -> Vec<Self> {
        Self::all_affine().chain([Self::MXFP4, Self::NVFP4, Self::MXFP8]).collect()
    }

    fn all_affine() -> impl Iterator<Item = Self> {
        Bits::ALL.into_iter().flat_map(|bits| {
            Self::AFFINE_GROUP_SIZES.into_iter().filter_map(move |size| Self::affine_opt(bits.get(), size))
        })
    }

    /// What a code stands for.
    pub const fn element(self) -> Element {
        self.element
    }

    /// How scales are stored.
    pub const fn scale(self) -> Scale {
        self.scale
    }

    /// Which code stands for zero.
    pub const fn zero_point(self) -> ZeroPoint {
        self.zero_point
    }

    /// Elements that share a scale.
    pub const fn group_size(self) -> usize {
        self.group_size
    }

    /// Bits of one code.
    pub const fn bits(self) -> usize {
        self.element.bits()
    }

    /// Whether each group has a bias beside its scale.
    pub const fn has_biases(self) -> bool {
        match self.zero_point {
            ZeroPoint::Bias => true,
            ZeroPoint::Midpoint | ZeroPoint::None => false,
        }
    }

    /// The format whose biases say what the midpoint of a symmetric one says; every other format is itself.
    pub const fn with_biases(self) -> Self {
        match self.zero_point {
            ZeroPoint::Midpoint => Self { zero_point: ZeroPoint::Bias, ..self },
            ZeroPoint::Bias | ZeroPoint::None => self,
        }
    }

    /// The same format with integer codes of another width; itself, if its codes are no integers.
    pub const fn with_bits(self, bits: Bits) -> Self {
        match (self.element, self.scale) {
            (Element::Uint(_), Scale::Float) => Self { element: Element::Uint(bits), ..self },
            _ => self,
        }
    }

    /// The formats that differ in a smaller group size only, the largest of these first.
    pub fn smaller_groups(self) -> impl Iterator<Item = Self> {
        let sizes = match (self.element, self.scale) {
            (Element::Uint(_), Scale::Float) => &Self::AFFINE_GROUP_SIZES[..],
            _ => &[],
        };
        let smaller = sizes.iter().rev().filter(move |size| **size < self.group_size);
        smaller.map(move |group_size| Self { group_size: *group_size, ..self })
    }

    /// The code in the middle of an integer format's range, as a number: the zero point of symmetric formats.
    pub fn midpoint(self) -> f32 {
        self.element.uint().map_or(0., |bits| f32::from(bits.midpoint()))
    }

    /// The smallest and the largest number that round to a code of a group without being clipped.
    pub fn representable(self, scale: f32, bias: f32) -> (f32, f32) {
        let (low, high) = self.element.range();
        let (low, high) = match self.element.uint() {
            // Steps are even, so that half a step beyond the ends still rounds to them.
            Some(_) => (low - 0.5, high + 0.5),
            None => (low, high),
        };
        let (first, last) = (low * scale + bias, high * scale + bias);
        (first.min(last), first.max(last))
    }
}

fn no_integers(bits: usize, group_size: usize) -> Error {
    Error::mismatch(
        "affine format",
        "bits 1, 2, 3, 4, 5, 6 or 8 and group size 32, 64 or 128",
        format!("bits {bits}, group size {group_size}"),
    )
}

/// The families of formats, each in a file of its own.
enum Family {
    Affine(Bits),
    Mx,
    Nf4,
    Nvfp4,
}

/// The family that quantizes to a format.
fn family(format: QuantFormat) -> Result<Family> {
    match (format.element, format.scale, format.zero_point) {
        (Element::Uint(bits), Scale::Float, ZeroPoint::Bias) => Ok(Family::Affine(bits)),
        (Element::E2m1 | Element::E4m3 | Element::Int8, Scale::E8m0, ZeroPoint::None) => Ok(Family::Mx),
        (Element::E2m1, Scale::E4m3, ZeroPoint::None) => Ok(Family::Nvfp4),
        (Element::Nf4 | Element::Fp4, Scale::Float, ZeroPoint::None) => Ok(Family::Nf4),
        (
            Element::Uint(_)
            | Element::E2m1
            | Element::E4m3
            | Element::Int8
            | Element::Nf4
            | Element::Fp4
            | Element::Iq4Nl
            | Element::Iq(_),
            _,
            _,
        ) => Err(Error::Unsupported {
            what: format!("quantizing to {format}"),
            remedy: format!("quantize to one of {}", QuantFormat::grammar()),
        }),
    }
}

impl<T: Real> RowMut<'_, T> {
    /// Quantizes a row of K finite weights; see [`QuantizedRows::quantize`].
    ///
    /// # Errors
    /// If nothing quantizes to the format, or the row is of another format.
    pub fn quantize(
        self,
        format: QuantFormat,
        quantizer: Quantizer,
        weights: &[T],
        absmax: Option<f32>,
    ) -> Result<()> {
        let Self { words, scales } = self;
        match (family(format)?, scales) {
            (Family::Affine(bits), GroupScalesMut::Float { scales, biases }) => {
                let layout = (bits, format.group_size());
                match quantizer {
                    Quantizer::Mlx => affine::quantize_mlx(layout, weights, words, scales, biases),
                    Quantizer::Afq => affine::quantize_afq(layout, weights, words, scales, biases),
                    Quantizer::Midpoint => affine::quantize_midpoint(layout, weights, words, scales, biases),
                }
            }
            (Family::Nf4, GroupScalesMut::Float { scales, .. }) => {
                nf4::quantize(format, weights, words, scales)
            }
            (Family::Mx, GroupScalesMut::Bytes(scales)) => mx::quantize(format, weights, words, scales),
            (Family::Nvfp4, GroupScalesMut::Bytes(scales)) => {
                nvfp4::quantize(format, weights, absmax, words, scales)
            }
            (Family::Affine(_) | Family::Nf4, GroupScalesMut::Bytes(_))
            | (Family::Mx | Family::Nvfp4, GroupScalesMut::Float { .. }) => return Err(other_format(format)),
        }
        Ok(())
    }

    /// Improves a quantized row by clip search; see [`QuantizedRows::improve`].
    ///
    /// # Errors
    /// If nothing quantizes to the format, or the row is of another format.
    fn improve(self, format: QuantFormat, weights: Row<T>) -> Result<()> {
        let Self { words, scales } = self;
        match (family(format)?, scales) {
            (Family::Affine(bits), GroupScalesMut::Float { scales, biases }) => {
                affine::improve(format, bits, weights, words, scales, biases)
            }
            (Family::Nf4, GroupScalesMut::Float { scales, .. }) => {
                nf4::improve(format, weights, words, scales)
            }
            (Family::Mx, GroupScalesMut::Bytes(scales)) => mx::improve(format, weights, words, scales),
            (Family::Nvfp4, GroupScalesMut::Bytes(scales)) => nvfp4::improve(format, weights, words, scales),
            (Family::Affine(_) | Family::Nf4, GroupScalesMut::Bytes(_))
            | (Family::Mx | Family::Nvfp4, GroupScalesMut::Float { .. }) => return Err(other_format(format)),
        }
        Ok(())
    }
}

fn other_format(format: QuantFormat) -> Error {
    Error::mismatch("quantized rows", format!("rows of {format}"), "rows of another format")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widths_and_groups_outside_the_table_are_refused() {
        for (bits, group_size) in [(0, 64), (7, 64), (9, 64), (4, 16), (4, 256), (4, 0)] {
            for format in [QuantFormat::affine(bits, group_size), QuantFormat::symmetric(bits, group_size)] {
                let error = format.unwrap_err().to_string();
                assert!(error.contains(&format!("bits {bits}, group size {group_size}")), "{error}");
            }
        }
    }

    #[test]
    fn nothing_quantizes_to_symmetric_formats_and_that_is_said() {
        let format = QuantFormat::symmetric(4, 32).unwrap();
        let error = QuantizedRows::quantize(format, Quantizer::Mlx, &[1f32; 32], 32, None).unwrap_err();
        assert!(error.to_string().contains("symmetric 4-bit g32"), "{error}");
    }

    #[test]
    fn a_part_of_a_row_is_not_quantized() {
        let error = QuantizedRows::quantize(QuantFormat::MXFP4, Quantizer::Mlx, &[1f32; 96], 64, None);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("rows of 64") && error.contains("96 weights"), "{error}");
    }

    #[test]
    fn a_number_within_the_representable_range_is_off_by_half_a_step_at_most() {
        let format = QuantFormat::affine(2, 32).unwrap();
        assert_eq!(format.representable(2., -1.), (-2., 6.));
        assert_eq!(format.representable(-2., -1.), (-8., 0.));
        assert_eq!(QuantFormat::MXFP4.representable(0.5, 0.), (-3., 3.));
    }
}
