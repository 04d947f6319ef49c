//! Formats of GGML: types of GGUF files that no other tool has. They are only read, and dequantize to the bits of ggml's
//! `dequantize_row` functions (ggml-quants.c).
//!
//! The K types have two levels of scales: integers of a byte for groups, an f16 number for each super-block of 256
//! elements. A product of both is exact in f32, so that their dequantization is that of affine and symmetric formats.
//!
//! The IQ1, IQ2 and IQ3 types have such scales, too. In files their elements are patterns of a grid, of eight or of four; here
//! each has a code of its own, so that kernels need not know the grids: the numbers are the same, the codes take more room.

use super::{Bits, Element, QuantFormat, Scale, ZeroPoint};

/// Elements that share a scale of [`Scale::SuperBlock`].
pub const SUPER_BLOCK: usize = 256;

/// Values of the sixteen codes of IQ4_NL and IQ4_XS (`kvalues_iq4nl` in ggml-common.h).
pub const IQ4_NL: [f32; 16] =
    [-127., -104., -83., -65., -49., -35., -22., -10., 1., 13., 25., 38., 53., 69., 89., 113.];

/// The numbers of GGML's IQ1, IQ2 and IQ3 types. Those of powers of two that are the same for all elements are here and not
/// in the scales, so that these are products of integers and of what files have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum IqTable {
    /// IQ1_S: `q - 7/8`, for -1, 0 and 1 with an eighth added. Where one is taken away, all signs change: that of the scale.
    Iq1S,
    /// IQ1_M: the same in three bits, of which the highest is the sign, since groups do not share it.
    Iq1M,
    /// IQ2_XXS, IQ2_XS and IQ2_S: eighths of 8, 25 and 43, and a sign. There is no fourth in files.
    Iq2,
    /// IQ3_XXS: quarters of 4, 12, 20, 28, 36, 44, 52 and 62, and a sign.
    Iq3Xxs,
    /// IQ3_S: 1, 3, 5, 7, 9, 11, 13 and 15, and a sign.
    Iq3S,
}

/// Numbers, again and again; every second time with the other sign if `signs`.
const fn repeated(numbers: &[f32], signs: bool) -> [f32; 16] {
    let mut values = [0.; 16];
    let mut code = 0;
    while code < 16 {
        let number = numbers[code % numbers.len()];
        values[code] = if signs && code / numbers.len() % 2 == 1 { -number } else { number };
        code += 1;
    }
    values
}

/// What an eighth makes of -1, 0 and 1. There is no fourth number in files.
const IQ1: [f32; 4] = [-0.875, 0.125, 1.125, 2.125];

impl IqTable {
    /// Bits of a code.
    pub const fn bits(self) -> usize {
        match self {
            Self::Iq1S => 2,
            Self::Iq1M | Self::Iq2 => 3,
            Self::Iq3Xxs | Self::Iq3S => 4,
        }
    }

    /// The number of each code; those of fewer bits than four repeat, so that bits above them do not matter.
    pub(crate) const fn values(self) -> &'static [f32; 16] {
        match self {
            Self::Iq1S => const { &repeated(&IQ1, false) },
            Self::Iq1M => const { &repeated(&IQ1, true) },
            Self::Iq2 => const { &repeated(&[1., 3.125, 5.375, 7.75], true) },
            Self::Iq3Xxs => const { &repeated(&[1., 3., 5., 7., 9., 11., 13., 15.5], true) },
            Self::Iq3S => const { &repeated(&[1., 3., 5., 7., 9., 11., 13., 15.], true) },
        }
    }

    /// The code whose number is nearest; some code for NaN.
    pub(super) fn nearest(self, value: f32) -> u8 {
        let distance = |code: &u8| (self.values()[usize::from(code & 15)] - value).abs();
        (0..1 << self.bits()).min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap_or_default()
    }

    /// The smallest and the largest number.
    pub(super) fn range(self) -> (f32, f32) {
        self.values().iter().fold((0., 0.), |(low, high), value| (value.min(low), value.max(high)))
    }
}

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

    /// IQ1_S: numbers of two bits, scales of three bits and a sign for each 32, in super-blocks.
    pub const IQ1_S: Self = Self::of_super_blocks(Element::Iq(IqTable::Iq1S), ZeroPoint::None, 32);
    /// IQ1_M: numbers of three bits, scales of three bits for each 16, in super-blocks.
    pub const IQ1_M: Self = Self::of_super_blocks(Element::Iq(IqTable::Iq1M), ZeroPoint::None, 16);
    /// IQ2_XXS: numbers of three bits, scales of four bits for each 32, in super-blocks.
    pub const IQ2_XXS: Self = Self::of_super_blocks(Element::Iq(IqTable::Iq2), ZeroPoint::None, 32);
    /// IQ2_XS, and IQ2_S with it: numbers of three bits, scales of four bits for each 16, in super-blocks.
    pub const IQ2_XS: Self = Self::of_super_blocks(Element::Iq(IqTable::Iq2), ZeroPoint::None, 16);
    /// IQ3_XXS: numbers of four bits, scales of four bits for each 32, in super-blocks.
    pub const IQ3_XXS: Self = Self::of_super_blocks(Element::Iq(IqTable::Iq3Xxs), ZeroPoint::None, 32);
    /// IQ3_S: odd integers of four bits, scales of four bits for each 32, in super-blocks.
    pub const IQ3_S: Self = Self::of_super_blocks(Element::Iq(IqTable::Iq3S), ZeroPoint::None, 32);

    /// The names of all these.
    pub(super) const GGML: [(&'static str, Self); 13] = [
        ("q2_k", Self::Q2_K),
        ("q3_k", Self::Q3_K),
        ("q4_k", Self::Q4_K),
        ("q5_k", Self::Q5_K),
        ("q6_k", Self::Q6_K),
        ("iq4_xs", Self::IQ4_XS),
        ("iq4_nl", Self::IQ4_NL),
        ("iq1_s", Self::IQ1_S),
        ("iq1_m", Self::IQ1_M),
        ("iq2_xxs", Self::IQ2_XXS),
        ("iq2_xs", Self::IQ2_XS),
        ("iq3_xxs", Self::IQ3_XXS),
        ("iq3_s", Self::IQ3_S),
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
