//! The codes of a format as integers, for the VNNI kernel.

use crate::format::{Element, Scale, ZeroPoint};
use crate::QuantFormat;

/// How the codes of a format are integers.
#[derive(Clone, Copy)]
pub(super) struct IntegerCodes {
    pub(super) bits: usize,
    /// Whether codes are E2M1 elements, to be looked up.
    pub(super) e2m1: bool,
    /// The integer of a code less this is a multiple of `unit`, and around zero.
    pub(super) zero_point: i32,
    pub(super) unit: f32,
    /// Whether scales are E8M0, so that they have any exponent that f32 has, and only their products with activations
    /// are sure to be finite.
    pub(super) any_scale: bool,
}

/// Whether codes of this width are doubled, so that their zero point is an integer. Those of 6 and 8 bits
/// are not, for want of room in a sum and a byte; their zero point is off by a small part of their range.
pub(super) const fn doubled(bits: usize) -> bool {
    bits < 6
}

/// The bits of a format of unsigned integers with float scales and a zero point: affine and symmetric formats.
pub(super) fn integer_bits(format: QuantFormat) -> Option<usize> {
    let has_zero_point = match format.zero_point() {
        ZeroPoint::Bias | ZeroPoint::Midpoint => true,
        ZeroPoint::None => false,
    };
    let is_affine = format.scale() == Scale::Float
        && has_zero_point
        && QuantFormat::AFFINE_GROUP_SIZES.contains(&format.group_size());
    matches!(format.element(), Element::Uint(_) if is_affine).then_some(format.bits())
}

impl IntegerCodes {
    /// None if codes are no integers, or the kernel does not know their scales.
    pub(super) fn of(format: QuantFormat) -> Option<Self> {
        if let Some(bits) = integer_bits(format) {
            let (zero_point, unit) =
                if doubled(bits) { ((1 << bits) - 1, 0.5) } else { (1 << (bits - 1), 1.0) };
            return Some(Self { bits, e2m1: false, zero_point, unit, any_scale: false });
        }
        let e2m1 = |any_scale| Self { bits: 4, e2m1: true, zero_point: 12, unit: 0.5, any_scale };
        if format == QuantFormat::MXFP4 {
            return Some(e2m1(true));
        }
        (format == QuantFormat::NVFP4).then(|| e2m1(false))
    }

    /// Vectors of 64 codes in a block: for 1, 2 and 4 bits as many as come from one load, else two, from one load
    /// (3 bits) or two.
    pub(super) fn vectors(&self) -> usize {
        match self.bits {
            1 | 2 | 4 => 8 / self.bits,
            _ => 2,
        }
    }

    /// Elements of a block. Each dword lane covers `4 * vectors` neighbours, a *unit*.
    pub(super) fn block(&self) -> usize {
        64 * self.vectors()
    }

    /// The lane that covers a unit: the lane of the same index; but for 8 bits, two loads are shuffled together, and each
    /// 128-bit part has two units of the first and two of the second.
    pub(super) fn lane_of_unit(&self, unit: usize) -> usize {
        match self.bits {
            8 => unit % 8 / 2 * 4 + unit / 8 * 2 + unit % 2,
            _ => unit,
        }
    }

    /// The element of a unit in a vector and a byte of the lane.
    pub(super) fn element_of_unit(&self, vector: usize, byte: usize) -> usize {
        match self.bits {
            1 | 2 | 4 => byte * self.vectors() + vector,
            _ => 4 * vector + byte,
        }
    }
}
