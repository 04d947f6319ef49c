//! How a block of codes becomes weights, for each format; resolved at compile time.
//!
//! A codec is an element type (how four codes become numbers), the lanes that share a group's scale, and whether groups
//! have biases. [`with_codec`] lists them, a line for each element type. A format that is not in the list has no codec
//! and goes through the scalar reference (`f32/reference.rs`): it is slow, never wrong.

#![allow(clippy::undocumented_unsafe_blocks)] // Each block forwards to `Simd` under the conditions of the trait here.

use super::isa::{each, Simd, Table16};
use crate::format::{self, Bits, Element as FormatElement, IqTable, ZeroPoint};
use crate::QuantFormat;

/// The dequantization of one format.
///
/// # Safety
/// Functions may be called as those of [`Simd`].
pub(super) trait Codec {
    /// Bits of a code.
    const BITS: usize;
    /// Whether groups have biases.
    const HAS_BIASES: bool;
    /// Whether a vector is dequantized while the one before it is multiplied, where [`Simd::DEQUANTIZES_AHEAD`], too.
    const AHEAD: bool;

    /// Loads the codes of a block.
    unsafe fn load_codes<S: Simd>(from: *const u8) -> S::U;
    /// Broadcasts scales or biases of a block's groups to their lanes.
    unsafe fn broadcast<S: Simd>(from: *const f32) -> S::F;
    /// Dequantizes a block, in the order of [`super::isa`].
    unsafe fn dequantize<S: Simd>(codes: S::U, scale: S::F, bias: S::F) -> [S::F; 4];
}

/// Unsigned integers of `BITS` bits, with biases. `LANES_PER_GROUP` lanes of four elements share a scale; 16, all lanes
/// of the widest vector, stands for every group of 64 or more (a power of two).
struct Uint<const BITS: usize, const LANES_PER_GROUP: usize>;

impl<const BITS: usize, const LANES_PER_GROUP: usize> Codec for Uint<BITS, LANES_PER_GROUP> {
    const BITS: usize = BITS;
    const HAS_BIASES: bool = true;
    const AHEAD: bool = true;

    #[inline(always)]
    unsafe fn load_codes<S: Simd>(from: *const u8) -> S::U {
        unsafe { S::load_codes::<BITS>(from) }
    }
    #[inline(always)]
    unsafe fn broadcast<S: Simd>(from: *const f32) -> S::F {
        unsafe { S::broadcast::<LANES_PER_GROUP>(from) }
    }
    #[inline(always)]
    unsafe fn dequantize<S: Simd>(codes: S::U, scale: S::F, bias: S::F) -> [S::F; 4] {
        unsafe { S::affine::<BITS, LANES_PER_GROUP>(codes, scale, bias) }
    }
}

/// The numbers that codes stand for, before scaling.
trait Element {
    /// See [`Codec::AHEAD`].
    const AHEAD: bool = true;
    /// The numbers of the four codes in each lane.
    unsafe fn numbers<S: Simd>(codes: S::U) -> [S::F; 4];
}

/// Elements of `BITS` bits times a scale, without biases. `LANES_PER_GROUP` as in [`Uint`].
struct Scaled<E, const BITS: usize, const LANES_PER_GROUP: usize>(E);

impl<E: Element, const BITS: usize, const LANES_PER_GROUP: usize> Codec for Scaled<E, BITS, LANES_PER_GROUP> {
    const BITS: usize = BITS;
    const HAS_BIASES: bool = false;
    const AHEAD: bool = E::AHEAD;

    #[inline(always)]
    unsafe fn load_codes<S: Simd>(from: *const u8) -> S::U {
        unsafe { S::load_codes::<BITS>(from) }
    }
    #[inline(always)]
    unsafe fn broadcast<S: Simd>(from: *const f32) -> S::F {
        unsafe { S::broadcast::<LANES_PER_GROUP>(from) }
    }
    #[inline(always)]
    unsafe fn dequantize<S: Simd>(codes: S::U, scale: S::F, _bias: S::F) -> [S::F; 4] {
        unsafe { each!(E::numbers::<S>(codes), |number| S::mul(number, scale)) }
    }
}

/// Codes that select from a table.
impl<T: Table16> Element for T {
    #[inline(always)]
    unsafe fn numbers<S: Simd>(codes: S::U) -> [S::F; 4] {
        unsafe { S::lookup16::<T>(codes) }
    }
}

struct E2m1;

impl Table16 for E2m1 {
    const VALUES: [f32; 16] = format::E2M1;
}

struct Nf4;

impl Table16 for Nf4 {
    const VALUES: [f32; 16] = format::NF4;
}

struct Iq4Nl;

impl Table16 for Iq4Nl {
    const VALUES: [f32; 16] = format::IQ4_NL;
}

/// The tables of the other IQ types: types of their own, so that what they allow is known at compile time.
macro_rules! iq_tables {
    ($($table:ident),+) => {$(
        struct $table;

        impl Table16 for $table {
            const BITS: usize = IqTable::$table.bits();
            const VALUES: [f32; 16] = *IqTable::$table.values();
        }
    )+};
}
iq_tables!(Iq1S, Iq1M, Iq2, Iq3Xxs, Iq3S);

struct Fp4;

impl Table16 for Fp4 {
    const VALUES: [f32; 16] = format::FP4;
}

struct E4m3;

impl Element for E4m3 {
    // Vectors of rare codes make a branch, around which more has to be kept than there are registers.
    const AHEAD: bool = false;
    #[inline(always)]
    unsafe fn numbers<S: Simd>(codes: S::U) -> [S::F; 4] {
        unsafe { S::e4m3(codes) }
    }
}

struct Int8;

impl Element for Int8 {
    #[inline(always)]
    unsafe fn numbers<S: Simd>(codes: S::U) -> [S::F; 4] {
        unsafe {
            let unit = S::splat(1. / 64.);
            each!(S::int8(codes), |integer| S::mul(integer, unit))
        }
    }
}

/// A call that waits for its codec.
pub(super) trait WithCodec {
    /// Runs with `C`.
    fn run<C: Codec>(self);
}

/// Runs `call` with the codec of a format.
///
/// # Errors
/// With `call`, if the format has no codec.
pub(super) fn with_codec<T: WithCodec>(format: QuantFormat, call: T) -> Result<(), T> {
    /// Runs with the codec of the format's group size.
    macro_rules! run {
        ($codec:ident, $parameters:tt, [$($group_sizes:pat => $lanes:literal),+]) => {
            match format.group_size() {
                $($group_sizes => call.run::<codec!($codec, $parameters, $lanes)>(),)+
                _ => return Err(call),
            }
        };
    }
    macro_rules! codec {
        ($codec:ident, [$($parameter:tt),+], $lanes:literal) => { $codec<$($parameter),+, $lanes> };
    }
    let offset = match format.zero_point() {
        ZeroPoint::Bias | ZeroPoint::Midpoint => true,
        ZeroPoint::None => false,
    };
    match format.element() {
        FormatElement::Uint(bits) if offset => match bits {
            Bits::One => run!(Uint, [1], [32 => 8, 64 | 128 => 16]),
            Bits::Two => run!(Uint, [2], [16 => 4, 32 => 8, 64 | 128 => 16]),
            Bits::Three => run!(Uint, [3], [16 => 4, 32 => 8, 64 | 128 => 16]),
            Bits::Four => run!(Uint, [4], [32 => 8, 64 | 128 => 16]),
            Bits::Five => run!(Uint, [5], [32 => 8, 64 | 128 => 16]),
            Bits::Six => run!(Uint, [6], [16 => 4, 32 => 8, 64 | 128 => 16]),
            Bits::Eight => run!(Uint, [8], [32 => 8, 64 | 128 => 16]),
        },
        FormatElement::E2m1 if !offset => run!(Scaled, [E2m1, 4], [16 => 4, 32 => 8]),
        FormatElement::E4m3 if !offset => run!(Scaled, [E4m3, 8], [32 => 8, 64 | 128 => 16]),
        FormatElement::Int8 if !offset => run!(Scaled, [Int8, 8], [32 => 8]),
        FormatElement::Nf4 if !offset => run!(Scaled, [Nf4, 4], [64 => 16]),
        FormatElement::Iq4Nl if !offset => run!(Scaled, [Iq4Nl, 4], [32 => 8]),
        FormatElement::Fp4 if !offset => run!(Scaled, [Fp4, 4], [64 => 16]),
        FormatElement::Iq(table) if !offset => match table {
            IqTable::Iq1S => run!(Scaled, [Iq1S, 2], [32 => 8]),
            IqTable::Iq1M => run!(Scaled, [Iq1M, 3], [16 => 4]),
            IqTable::Iq2 => run!(Scaled, [Iq2, 3], [16 => 4, 32 => 8]),
            IqTable::Iq3Xxs => run!(Scaled, [Iq3Xxs, 4], [32 => 8]),
            IqTable::Iq3S => run!(Scaled, [Iq3S, 4], [32 => 8]),
        },
        FormatElement::Uint(_)
        | FormatElement::E2m1
        | FormatElement::E4m3
        | FormatElement::Int8
        | FormatElement::Nf4
        | FormatElement::Fp4
        | FormatElement::Iq4Nl
        | FormatElement::Iq(_) => return Err(call),
    }
    Ok(())
}
