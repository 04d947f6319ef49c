//! How a block of codes becomes weights, for each format; resolved at compile time.

use super::simd::{each, Simd};
use crate::format::{Bits, Element};
use crate::QuantFormat;

/// The decode of one format.
pub(super) trait Recipe {
    /// Bits of a code.
    const BITS: usize;
    /// Whether groups have biases.
    const HAS_BIASES: bool;
    /// Whether a vector is decoded while the one before it is multiplied, where [`Simd::DECODES_AHEAD`], too.
    const DECODES_AHEAD: bool = true;

    /// The codes of a block.
    ///
    /// # Safety
    /// As [`Simd::load_codes`].
    unsafe fn load_codes<S: Simd>(from: *const u8) -> S::U;
    /// Scales or biases of a block's groups, one for each lane.
    ///
    /// # Safety
    /// As [`Simd::spread`].
    unsafe fn spread<S: Simd>(from: *const f32) -> S::F;
    /// Decodes a block, in the order of [`super::simd`].
    ///
    /// # Safety
    /// As [`Simd`].
    unsafe fn decode<S: Simd>(codes: S::U, scale: S::F, bias: S::F) -> [S::F; 4];
}

/// Affine codes of `BITS` bits. `LANES_PER_GROUP`, the lanes of four elements that share a scale, is 8
/// for groups of 32; 16, all lanes of the widest vector, stands for every larger group.
pub(super) struct Affine<const BITS: usize, const LANES_PER_GROUP: usize>;

impl<const BITS: usize, const LANES_PER_GROUP: usize> Recipe for Affine<BITS, LANES_PER_GROUP> {
    const BITS: usize = BITS;
    const HAS_BIASES: bool = true;

    #[inline(always)]
    unsafe fn load_codes<S: Simd>(from: *const u8) -> S::U {
        // SAFETY: the caller's promise.
        unsafe { S::load_codes::<BITS>(from) }
    }

    #[inline(always)]
    unsafe fn spread<S: Simd>(from: *const f32) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { S::spread::<LANES_PER_GROUP>(from) }
    }

    #[inline(always)]
    unsafe fn decode<S: Simd>(codes: S::U, scale: S::F, bias: S::F) -> [S::F; 4] {
        // SAFETY: the caller's promise.
        unsafe { S::affine::<BITS, LANES_PER_GROUP>(codes, scale, bias) }
    }
}

/// E2M1 codes: MXFP4 (8 lanes to a group) and NVFP4 (4).
pub(super) struct E2m1<const LANES_PER_GROUP: usize>;

impl<const LANES_PER_GROUP: usize> Recipe for E2m1<LANES_PER_GROUP> {
    const BITS: usize = 4;
    const HAS_BIASES: bool = false;

    #[inline(always)]
    unsafe fn load_codes<S: Simd>(from: *const u8) -> S::U {
        // SAFETY: the caller's promise.
        unsafe { S::load_codes::<4>(from) }
    }

    #[inline(always)]
    unsafe fn spread<S: Simd>(from: *const f32) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { S::spread::<LANES_PER_GROUP>(from) }
    }

    #[inline(always)]
    unsafe fn decode<S: Simd>(codes: S::U, scale: S::F, _bias: S::F) -> [S::F; 4] {
        // SAFETY: the caller's promise.
        unsafe { each!(S::e2m1(codes), |value| S::mul(value, scale)) }
    }
}

/// E4M3 codes: MXFP8.
pub(super) struct E4m3;

impl Recipe for E4m3 {
    const BITS: usize = 8;
    const HAS_BIASES: bool = false;
    // Vectors of rare codes make a branch, around which more has to be kept than there are registers.
    const DECODES_AHEAD: bool = false;

    #[inline(always)]
    unsafe fn load_codes<S: Simd>(from: *const u8) -> S::U {
        // SAFETY: the caller's promise.
        unsafe { S::load_codes::<8>(from) }
    }

    #[inline(always)]
    unsafe fn spread<S: Simd>(from: *const f32) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { S::spread::<8>(from) }
    }

    #[inline(always)]
    unsafe fn decode<S: Simd>(codes: S::U, scale: S::F, _bias: S::F) -> [S::F; 4] {
        // SAFETY: the caller's promise.
        unsafe { each!(S::e4m3(codes), |value| S::mul(value, scale)) }
    }
}

/// A call that waits for its recipe.
pub(super) trait WithRecipe {
    /// Runs with `R`.
    fn run<R: Recipe>(self);
}

/// Runs `call` with the recipe of a (validated) format.
pub(super) fn with_recipe(format: QuantFormat, call: impl WithRecipe) {
    match (format.element(), format.group_size()) {
        (Element::Uint(Bits::One), 32) => call.run::<Affine<1, 8>>(),
        (Element::Uint(Bits::Two), 32) => call.run::<Affine<2, 8>>(),
        (Element::Uint(Bits::Three), 32) => call.run::<Affine<3, 8>>(),
        (Element::Uint(Bits::Four), 32) => call.run::<Affine<4, 8>>(),
        (Element::Uint(Bits::Five), 32) => call.run::<Affine<5, 8>>(),
        (Element::Uint(Bits::Six), 32) => call.run::<Affine<6, 8>>(),
        (Element::Uint(Bits::Eight), 32) => call.run::<Affine<8, 8>>(),
        (Element::Uint(Bits::One), _) => call.run::<Affine<1, 16>>(),
        (Element::Uint(Bits::Two), _) => call.run::<Affine<2, 16>>(),
        (Element::Uint(Bits::Three), _) => call.run::<Affine<3, 16>>(),
        (Element::Uint(Bits::Four), _) => call.run::<Affine<4, 16>>(),
        (Element::Uint(Bits::Five), _) => call.run::<Affine<5, 16>>(),
        (Element::Uint(Bits::Six), _) => call.run::<Affine<6, 16>>(),
        (Element::Uint(Bits::Eight), _) => call.run::<Affine<8, 16>>(),
        (Element::E2m1, 16) => call.run::<E2m1<4>>(),
        (Element::E2m1, _) => call.run::<E2m1<8>>(),
        (Element::E4m3, _) => call.run::<E4m3>(),
    }
}
