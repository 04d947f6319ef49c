//! Kinds of codes that are looked up, and the integers that they become.

use super::codes::Kind;
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

/// That of codes.
pub(super) const fn kind_of(kind: Kind) -> u8 {
    match kind {
        Kind::Uint(_) => AFFINE,
        Kind::Mxfp4 => MXFP4,
        Kind::Nvfp4 => NVFP4,
        Kind::Iq4 => IQ4,
        Kind::Iq(IqTable::Iq1S) => IQ1_S,
        Kind::Iq(IqTable::Iq1M) => IQ1_M,
        Kind::Iq(IqTable::Iq2) => IQ2,
        Kind::Iq(IqTable::Iq3Xxs) => IQ3_XXS,
        Kind::Iq(IqTable::Iq3S) => IQ3_S,
    }
}

/// What `$call!` makes of the width of codes, the vectors of a block and the kind, as constants: for kernels that read 1, 2 and 4 bits by
/// shifts, of one load, and all others in their order, one or two vectors at a time. `$more` arms come first.
macro_rules! with_layout {
    ($of:expr, $call:ident $(, $more:pat => $result:expr)?) => {{
        use $crate::backend::cpu::int8::tables::{
            AFFINE, IQ1_M, IQ1_S, IQ2, IQ3_S, IQ3_XXS, MXFP4, NVFP4,
        };
        match $of {
            $($more => $result,)?
            (1, _, _) => $call!(1, 8, AFFINE),
            (2, _, IQ1_S) => $call!(2, 4, IQ1_S),
            (2, _, _) => $call!(2, 4, AFFINE),
            (3, 1, IQ1_M) => $call!(3, 1, IQ1_M),
            (3, _, IQ1_M) => $call!(3, 2, IQ1_M),
            (3, 1, IQ2) => $call!(3, 1, IQ2),
            (3, _, IQ2) => $call!(3, 2, IQ2),
            (3, 1, _) => $call!(3, 1, AFFINE),
            (3, _, _) => $call!(3, 2, AFFINE),
            (4, _, MXFP4) => $call!(4, 2, MXFP4),
            (4, _, NVFP4) => $call!(4, 2, NVFP4),
            (4, _, IQ3_XXS) => $call!(4, 2, IQ3_XXS),
            (4, _, IQ3_S) => $call!(4, 2, IQ3_S),
            (4, _, _) => $call!(4, 2, AFFINE),
            (5, 1, _) => $call!(5, 1, AFFINE),
            (5, _, _) => $call!(5, 2, AFFINE),
            (6, 1, _) => $call!(6, 1, AFFINE),
            (6, _, _) => $call!(6, 2, AFFINE),
            (_, 1, _) => $call!(8, 1, AFFINE),
            _ => $call!(8, 2, AFFINE),
        }
    }};
}
pub(super) use with_layout;

/// The function with the width and the kind of these codes.
macro_rules! with_codes {
    ($kind:expr, $function:ident($($argument:expr),*)) => {{
        use super::codes::Kind;
        use super::tables::{AFFINE, IQ1_M, IQ1_S, IQ2, IQ3_S, IQ3_XXS, IQ4, MXFP4};
        use $crate::format::{Bits, IqTable};
        match $kind {
            Kind::Uint(Bits::One) => $function::<1, AFFINE>($($argument),*),
            Kind::Uint(Bits::Two) => $function::<2, AFFINE>($($argument),*),
            Kind::Uint(Bits::Three) => $function::<3, AFFINE>($($argument),*),
            Kind::Uint(Bits::Four) => $function::<4, AFFINE>($($argument),*),
            Kind::Uint(Bits::Five) => $function::<5, AFFINE>($($argument),*),
            Kind::Uint(Bits::Six) => $function::<6, AFFINE>($($argument),*),
            Kind::Uint(Bits::Eight) => $function::<8, AFFINE>($($argument),*),
            Kind::Mxfp4 | Kind::Nvfp4 => $function::<4, MXFP4>($($argument),*),
            Kind::Iq4 => $function::<4, IQ4>($($argument),*),
            Kind::Iq(IqTable::Iq1S) => $function::<2, IQ1_S>($($argument),*),
            Kind::Iq(IqTable::Iq1M) => $function::<3, IQ1_M>($($argument),*),
            Kind::Iq(IqTable::Iq2) => $function::<3, IQ2>($($argument),*),
            Kind::Iq(IqTable::Iq3Xxs) => $function::<4, IQ3_XXS>($($argument),*),
            Kind::Iq(IqTable::Iq3S) => $function::<4, IQ3_S>($($argument),*),
        }
    }};
}
pub(super) use with_codes;

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
