//! Kinds of codes that are looked up, and the integers that they become.

use crate::format::{self, IqTable};

/// What codes and scales are: the parameter `KIND` of kernels and of what unpacks codes for them.
pub(super) const AFFINE: u8 = 0;
pub(super) const NVFP4: u8 = 1;
pub(super) const MXFP4: u8 = 2;
pub(super) const IQ4: u8 = 3;
pub(super) const IQ3_XXS: u8 = 4;
pub(super) const IQ3_S: u8 = 5;
pub(super) const IQ2: u8 = 6;
pub(super) const IQ1_M: u8 = 7;
pub(super) const IQ1_S: u8 = 8;

/// The elements of codes that are looked up, what their integers are relative to, and how many integers one is.
const fn elements(kind: u8) -> (&'static [f32; 16], i32, f32) {
    match kind {
        IQ4 => (&format::IQ4_NL, 127, 1.),
        IQ3_XXS => (IqTable::Iq3Xxs.values(), 31, 2.),
        IQ3_S => (IqTable::Iq3S.values(), 15, 1.),
        IQ2 => (IqTable::Iq2.values(), 62, 8.),
        IQ1_M => (IqTable::Iq1M.values(), 17, 8.),
        IQ1_S => (IqTable::Iq1S.values(), 7, 8.),
        _ => (&format::E2M1, 12, 2.),
    }
}

/// The integers of codes that are looked up: `element / unit + center`, as [`IntegerCodes`] has these.
///
/// [`IntegerCodes`]: super::codes::IntegerCodes
#[cfg(target_arch = "x86_64")]
pub(super) const fn table(kind: u8) -> [u8; 16] {
    let (values, center, per_one) = elements(kind);
    let (mut table, mut index) = ([0; 16], 0);
    while index < 16 {
        table[index] = ((values[index] * per_one) as i32 + center) as u8;
        index += 1;
    }
    table
}

/// The same without the center.
#[cfg(target_arch = "aarch64")]
pub(super) const fn signed_table(kind: u8) -> [i8; 16] {
    let (values, _, per_one) = elements(kind);
    let (mut table, mut index) = ([0; 16], 0);
    while index < 16 {
        table[index] = (values[index] * per_one) as i8;
        index += 1;
    }
    table
}
