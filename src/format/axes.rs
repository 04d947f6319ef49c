//! The axes of a format: what a code stands for, how scales are stored, and where zero is.

use super::ggml::{IqTable, IQ4_NL};
use super::nf4::{nearest_fp4, FP4, NF4};
use super::numeric::{clamped, small_integer, Real};
use super::small_floats::{e4m3_to_f32, e8m0_to_f32, f32_to_e4m3, nearest_e2m1, E2M1, E2M1_MAX, E4M3_MAX};

/// Bits of an unsigned integer code. Codes of seven bits do not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Bits {
    /// 1
    One = 1,
    /// 2
    Two = 2,
    /// 3
    Three = 3,
    /// 4
    Four = 4,
    /// 5
    Five = 5,
    /// 6
    Six = 6,
    /// 8
    Eight = 8,
}

impl Bits {
    /// Every width, ascending.
    pub const ALL: [Self; 7] =
        [Self::One, Self::Two, Self::Three, Self::Four, Self::Five, Self::Six, Self::Eight];

    /// The width of that many bits, if there is one.
    pub const fn new(bits: usize) -> Option<Self> {
        match bits {
            1 => Some(Self::One),
            2 => Some(Self::Two),
            3 => Some(Self::Three),
            4 => Some(Self::Four),
            5 => Some(Self::Five),
            6 => Some(Self::Six),
            8 => Some(Self::Eight),
            _ => None,
        }
    }

    /// The number of bits.
    pub const fn get(self) -> usize {
        self as usize
    }

    /// The largest code.
    pub const fn largest_code(self) -> u8 {
        ((1u32 << self.get()) - 1) as u8
    }

    /// The code in the middle of the range, `2^(bits - 1)`: the zero point of symmetric formats.
    pub const fn midpoint(self) -> u8 {
        1 << (self.get() - 1)
    }
}

/// What a code stands for, before scale and zero point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Element {
    /// An unsigned integer.
    Uint(Bits),
    /// A 4-bit float: 1 sign, 2 exponent and 1 mantissa bits.
    E2m1,
    /// An 8-bit float: 1 sign, 4 exponent and 3 mantissa bits, no infinity.
    E4m3,
    /// A two's-complement integer times 2^-6, from -127 on.
    Int8,
    /// One of the sixteen NF4 values of bitsandbytes.
    Nf4,
    /// One of the sixteen FP4 values of bitsandbytes, two of them zero.
    Fp4,
    /// One of the sixteen integers of GGML's IQ4 types.
    Iq4Nl,
    /// One of the numbers of another IQ type of GGML.
    Iq(IqTable),
}

impl Element {
    /// Bits of a code.
    pub const fn bits(self) -> usize {
        match self {
            Self::Uint(bits) => bits.get(),
            Self::E2m1 | Self::Nf4 | Self::Fp4 | Self::Iq4Nl => 4,
            Self::E4m3 | Self::Int8 => 8,
            Self::Iq(table) => table.bits(),
        }
    }

    /// The width of the codes, if they are unsigned integers.
    pub const fn uint(self) -> Option<Bits> {
        match self {
            Self::Uint(bits) => Some(bits),
            Self::E2m1 | Self::E4m3 | Self::Int8 | Self::Nf4 | Self::Fp4 | Self::Iq4Nl | Self::Iq(_) => None,
        }
    }

    /// Writes `of` the value of each code: one loop for each kind of elements, each without a branch.
    #[inline(always)]
    pub(super) fn map(self, codes: &[u8], values: &mut [f32], of: impl Fn(f32) -> f32) {
        let pairs = values.iter_mut().zip(codes);
        match self {
            Self::Uint(_) => pairs.for_each(|(value, code)| *value = of(f32::from(*code))),
            Self::E2m1 => pairs.for_each(|(value, code)| *value = of(Self::E2m1.value(*code))),
            Self::E4m3 => pairs.for_each(|(value, code)| *value = of(Self::E4m3.value(*code))),
            Self::Int8 => pairs.for_each(|(value, code)| *value = of(Self::Int8.value(*code))),
            Self::Nf4 => pairs.for_each(|(value, code)| *value = of(Self::Nf4.value(*code))),
            Self::Fp4 => pairs.for_each(|(value, code)| *value = of(Self::Fp4.value(*code))),
            Self::Iq4Nl => pairs.for_each(|(value, code)| *value = of(Self::Iq4Nl.value(*code))),
            Self::Iq(table) => {
                let values = table.values();
                pairs.for_each(|(value, code)| *value = of(values[usize::from(code & 15)]));
            }
        }
    }

    /// The value of a code. Bits above [`Element::bits`] are ignored for tables and kept for integers.
    #[inline(always)]
    pub fn value(self, code: u8) -> f32 {
        match self {
            Self::Uint(_) => f32::from(code),
            Self::E2m1 => E2M1[usize::from(code & 15)],
            Self::E4m3 => e4m3_to_f32(code),
            Self::Int8 => f32::from(code as i8) / 64.,
            Self::Nf4 => NF4[usize::from(code & 15)],
            Self::Fp4 => FP4[usize::from(code & 15)],
            Self::Iq4Nl => IQ4_NL[usize::from(code & 15)],
            Self::Iq(table) => table.values()[usize::from(code & 15)],
        }
    }

    /// The code whose value is nearest to `value`, a number of `T`, as MLX rounds in that dtype; some code for NaN.
    #[inline(always)]
    pub fn nearest<T: Real>(self, value: f32) -> u8 {
        match self {
            Self::Uint(bits) => small_integer(clamped(value, f32::from(bits.largest_code()))),
            Self::E2m1 => nearest_e2m1::<T>(value),
            Self::E4m3 => f32_to_e4m3(value),
            Self::Nf4 => nearest_of(&NF4, value),
            Self::Fp4 => nearest_fp4(value),
            Self::Iq4Nl => nearest_of(&IQ4_NL, value),
            Self::Iq(table) => table.nearest(value),
            Self::Int8 => (value * 64.).round_ties_even().clamp(-127., 127.) as i8 as u8,
        }
    }

    /// The code nearest to each of `values`: one loop for each kind of elements.
    #[inline(always)]
    pub(super) fn nearest_all<T: Real>(self, values: impl IntoIterator<Item = f32>) -> Vec<u8> {
        let values = values.into_iter();
        match self {
            Self::Uint(bits) => values.map(|value| Self::Uint(bits).nearest::<T>(value)).collect(),
            Self::E2m1 => values.map(|value| Self::E2m1.nearest::<T>(value)).collect(),
            Self::E4m3 => values.map(|value| Self::E4m3.nearest::<T>(value)).collect(),
            Self::Int8 => values.map(|value| Self::Int8.nearest::<T>(value)).collect(),
            Self::Nf4 => values.map(|value| Self::Nf4.nearest::<T>(value)).collect(),
            Self::Fp4 => values.map(|value| Self::Fp4.nearest::<T>(value)).collect(),
            Self::Iq4Nl => values.map(|value| Self::Iq4Nl.nearest::<T>(value)).collect(),
            Self::Iq(table) => values.map(|value| table.nearest(value)).collect(),
        }
    }

    /// The smallest and the largest value.
    pub fn range(self) -> (f32, f32) {
        match self {
            Self::Uint(bits) => (0., f32::from(bits.largest_code())),
            Self::E2m1 => (-E2M1_MAX, E2M1_MAX),
            Self::E4m3 => (-E4M3_MAX, E4M3_MAX),
            Self::Int8 => (-127. / 64., 127. / 64.),
            Self::Nf4 | Self::Fp4 => (-1., 1.),
            Self::Iq4Nl => (-127., 113.),
            Self::Iq(table) => table.range(),
        }
    }
}

/// The code of an ascending table whose value is nearest; 0 for NaN.
#[inline(always)]
fn nearest_of(table: &[f32; 16], value: f32) -> u8 {
    table.windows(2).map(|pair| u8::from(value > (pair[0] + pair[1]) / 2.)).sum()
}

/// How the scales of a format are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Scale {
    /// An f16, bf16 or f32 number.
    Float,
    /// One byte, the biased exponent of a power of two.
    E8m0,
    /// One byte, an 8-bit float.
    E4m3,
    /// One byte, a two's-complement integer, times an f16 number that a super-block of 256 elements shares: the K types of
    /// GGML. Their biases are such products, too.
    SuperBlock,
}

impl Scale {
    /// Whether a scale is one byte.
    pub const fn is_byte(self) -> bool {
        match self {
            Self::Float => false,
            Self::E8m0 | Self::E4m3 | Self::SuperBlock => true,
        }
    }

    /// The value of a scale's byte, before it is multiplied by the number of its super-block, if there is one; NaN for
    /// [`Scale::Float`], whose scales are no bytes.
    #[inline(always)]
    pub fn value(self, byte: u8) -> f32 {
        match self {
            Self::E8m0 => e8m0_to_f32(byte),
            Self::E4m3 => e4m3_to_f32(byte),
            Self::SuperBlock => f32::from(byte as i8),
            Self::Float => f32::NAN,
        }
    }
}

/// Which code of a group stands for zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ZeroPoint {
    /// Code 0, or none: the elements are signed.
    None,
    /// Stored for each group as the number that is added to `code * scale` (MLX's `biases`).
    Bias,
    /// The middle code, `2^(bits - 1)`.
    Midpoint,
}
