//! The codes of a format as integers, for kernels that multiply integers.

use crate::format::{Bits, Element, IqTable, Scale, ZeroPoint};
use crate::QuantFormat;

/// What the codes are.
#[derive(Clone, Copy)]
pub(in super::super) enum Kind {
    /// Unsigned integers with float scales, or those of super-blocks.
    Uint(Bits),
    /// E2M1 elements, to be looked up, with E8M0 scales: these have any exponent that f32 has, and only their products with
    /// activations are sure to be finite.
    Mxfp4,
    /// E2M1 elements, to be looked up, with E4M3 scales.
    Nvfp4,
    /// Elements of GGML's IQ4 types, to be looked up, with scales that are read as f32.
    Iq4,
    /// The same of another IQ type.
    Iq(IqTable),
}

/// How the codes of a format are integers.
#[derive(Clone, Copy)]
pub(in super::super) struct IntegerCodes {
    pub(super) kind: Kind,
    /// The integer of a code less this is a multiple of `unit`, and around zero.
    pub(super) center: i32,
    pub(super) unit: f32,
}

/// Whether codes of this width are doubled, so that their center is an integer. Those of 6 and 8 bits
/// are not, for want of room in a sum and a byte; their center is off by a small part of their range.
pub(super) const fn doubled(bits: usize) -> bool {
    bits < 6
}

/// What codes of this width, doubled or not, are relative to.
pub(super) const fn center(bits: usize) -> i32 {
    if doubled(bits) {
        (1 << bits) - 1
    } else {
        1 << (bits - 1)
    }
}

/// The bits of a format of unsigned integers with a zero point and scales that are read as f32: affine and symmetric
/// formats, and GGML's K types.
fn integer_bits(format: QuantFormat) -> Option<Bits> {
    let has_zero_point = match format.zero_point() {
        ZeroPoint::Bias | ZeroPoint::Midpoint => true,
        ZeroPoint::None => false,
    };
    let scales_are_read = match format.scale() {
        Scale::Float => QuantFormat::AFFINE_GROUP_SIZES.contains(&format.group_size()),
        Scale::SuperBlock => true,
        Scale::E8m0 | Scale::E4m3 => false,
    };
    format.element().uint().filter(|_| has_zero_point && scales_are_read)
}

impl IntegerCodes {
    /// None if codes are no integers, or the kernel does not know their scales.
    pub(super) fn of(format: QuantFormat) -> Option<Self> {
        if let Some(bits) = integer_bits(format) {
            let unit = if doubled(bits.get()) { 0.5 } else { 1.0 };
            return Some(Self { kind: Kind::Uint(bits), center: center(bits.get()), unit });
        }
        let e2m1 = |kind| Some(Self { kind, center: 12, unit: 0.5 });
        match format {
            QuantFormat::MXFP4 => e2m1(Kind::Mxfp4),
            QuantFormat::NVFP4 => e2m1(Kind::Nvfp4),
            _ => match (format.scale(), format.zero_point()) {
                (Scale::Float | Scale::SuperBlock, ZeroPoint::None) => Self::of_table(format.element()),
                _ => None,
            },
        }
    }

    /// Elements that become integers when they are multiplied by a power of two, as `unpack.rs` has them.
    fn of_table(element: Element) -> Option<Self> {
        let iq = |table, center, unit| Some(Self { kind: Kind::Iq(table), center, unit });
        match element {
            Element::Iq4Nl => Some(Self { kind: Kind::Iq4, center: 127, unit: 1. }),
            Element::Iq(table @ IqTable::Iq1S) => iq(table, 7, 0.125),
            Element::Iq(table @ IqTable::Iq1M) => iq(table, 17, 0.125),
            Element::Iq(table @ IqTable::Iq2) => iq(table, 62, 0.125),
            Element::Iq(table @ IqTable::Iq3Xxs) => iq(table, 31, 0.5),
            Element::Iq(table @ IqTable::Iq3S) => iq(table, 15, 1.),
            Element::Uint(_)
            | Element::E2m1
            | Element::E4m3
            | Element::Int8
            | Element::Nf4
            | Element::Fp4 => None,
        }
    }

    /// Whether groups have biases, or a zero point.
    pub(super) fn has_biases(&self) -> bool {
        match self.kind {
            Kind::Uint(_) => true,
            Kind::Mxfp4 | Kind::Nvfp4 | Kind::Iq4 | Kind::Iq(_) => false,
        }
    }

    /// The width of a code.
    pub(super) fn bits(&self) -> Bits {
        match self.kind {
            Kind::Uint(bits) => bits,
            Kind::Iq(IqTable::Iq1S) => Bits::Two,
            Kind::Iq(IqTable::Iq1M | IqTable::Iq2) => Bits::Three,
            Kind::Mxfp4 | Kind::Nvfp4 | Kind::Iq4 | Kind::Iq(IqTable::Iq3Xxs | IqTable::Iq3S) => Bits::Four,
        }
    }
}

/// How the AVX-512 kernels lay out blocks.
#[cfg(target_arch = "x86_64")]
impl IntegerCodes {
    /// Vectors of 64 codes in a block: for 1, 2 and 4 bits as many as come from one load, else two, from one load
    /// (3 bits) or two.
    pub(super) fn vectors(&self) -> usize {
        match self.bits() {
            Bits::One => 8,
            Bits::Two => 4,
            Bits::Three | Bits::Four | Bits::Five | Bits::Six | Bits::Eight => 2,
        }
    }

    /// Elements of a block. Each dword lane covers `4 * vectors` neighbours, a *unit*.
    pub(super) fn block(&self) -> usize {
        64 * self.vectors()
    }

    /// The lane that covers a unit: the lane of the same index; but for 8 bits, two loads are shuffled together, and each
    /// 128-bit part has two units of the first and two of the second.
    pub(super) fn lane_of_unit(&self, unit: usize) -> usize {
        match self.bits() {
            Bits::Eight => unit % 8 / 2 * 4 + unit / 8 * 2 + unit % 2,
            Bits::One | Bits::Two | Bits::Three | Bits::Four | Bits::Five | Bits::Six => unit,
        }
    }

    /// The element of a unit in a vector and a byte of the lane.
    pub(super) fn element_of_unit(&self, vector: usize, byte: usize) -> usize {
        match self.bits() {
            Bits::One | Bits::Two | Bits::Four => byte * self.vectors() + vector,
            Bits::Three | Bits::Five | Bits::Six | Bits::Eight => 4 * vector + byte,
        }
    }
}
