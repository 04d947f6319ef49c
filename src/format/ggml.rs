//! Formats of GGML: types of GGUF files that no other tool has. They are only read, and dequantize to the bits of ggml's
//! `dequantize_row` functions (ggml-quants.c).
//!
//! The K types have two levels of scales: integers of a byte for groups, an f16 number for each super-block of 256
//! elements. A product of both is exact in f32, so that their dequantization is that of affine and symmetric formats.

use super::{Bits, Element, QuantFormat, Scale, ZeroPoint};

/// Elements that share a scale of [`Scale::SuperBlock`].
pub const SUPER_BLOCK: usize = 256;

/// Values of the sixteen codes of IQ4_NL and IQ4_XS (`kvalues_iq4nl` in ggml-common.h).
pub const IQ4_NL: [f32; 16] =
    [-127., -104., -83., -65., -49., -35., -22., -10., 1., 13., 25., 38., 53., 69., 89., 113.];

impl QuantFormat {
    /// Q2_K: 2-bit codes, 4-bit scales and biases for each 16, in super-blocks.
    pub const Q2_K: Self = Self::of_super_blocks(Element::Uint(Bits::Two), ZeroPoint::Bias, 16);
    /// Q3_K: 3-bit codes around 4, 6-bit scales for each 16, in super-blocks.
    pub const Q3_K: Self = Self::of_super_blocks(Element::Uint(Bits::Three), ZeroPoint::Midpoint, 16);
    /// Q4_K: 4-bit codes, 6-bit scales and biases for each 32, in super-blocks.
    pub const Q4_K: Self = Self::of_super_blocks(Element::Uint(Bits::Four), ZeroPoint::Bias, 32);
    /// Q5_K: 5-bit codes, 6-bit scales and biases for each 32, in super-blocks.
    pub const Q5_K: Self = Self::of_super_blocks(Element::Uint(Bits::Five), ZeroPoint::Bias, 32);
    /// Q6_K: 6-bit codes around 32, 8-bit scales for each 16, in super-blocks.
    pub const Q6_K: Self = Self::of_super_blocks(Element::Uint(Bits::Six), ZeroPoint::Midpoint, 16);
    /// IQ4_XS: one of sixteen integers, 6-bit scales for each 32, in super-blocks.
    pub const IQ4_XS: Self = Self::of_super_blocks(Element::Iq4Nl, ZeroPoint::None, 32);
    /// IQ4_NL: one of sixteen integers, a float scale for each 32.
    pub const IQ4_NL: Self = Self::of(Element::Iq4Nl, Scale::Float, ZeroPoint::None, 32);

    /// The names of all these.
    pub(super) const GGML: [(&'static str, Self); 7] = [
        ("q2_k", Self::Q2_K),
        ("q3_k", Self::Q3_K),
        ("q4_k", Self::Q4_K),
        ("q5_k", Self::Q5_K),
        ("q6_k", Self::Q6_K),
        ("iq4_xs", Self::IQ4_XS),
        ("iq4_nl", Self::IQ4_NL),
    ];

    const fn of_super_blocks(element: Element, zero_point: ZeroPoint, group_size: usize) -> Self {
        Self::of(element, Scale::SuperBlock, zero_point, group_size)
    }

    /// Elements along K that no slice of a weight separates: a group, or a super-block.
    pub const fn granularity(self) -> usize {
        match self.scale {
            Scale::SuperBlock => SUPER_BLOCK,
            Scale::Float | Scale::E8m0 | Scale::E4m3 => self.group_size,
        }
    }
}
