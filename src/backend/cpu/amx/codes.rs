//! Packed codes as the factors that tiles multiply: signed bytes, or bf16 numbers for E4M3.

use super::super::simd::avx512::e4m3_halves;
use super::tile::{Line, ROWS};
use crate::QuantFormat;
use std::arch::x86_64::*;

/// Codes of a row that are unpacked at a time, a *step*.
pub(super) const STEP: usize = 64;

/// How the codes of a format become factors.
pub(super) trait Codes {
    const BITS: usize;
    /// Whether factors are bf16 numbers, of which a step fills two tiles, and not signed bytes.
    const FLOAT: bool = false;
    /// Tiles that a step fills.
    const TILES: usize = 1 + Self::FLOAT as usize;
    /// What a factor is a multiple of.
    const UNIT: f32;
    /// A code is `factor * UNIT + CENTRE`.
    const CENTRE: f32 = 0.0;
    /// Whether groups have biases.
    const BIASES: bool = false;

    /// Unpacks the step at `from` into a row of a tile, or two tiles that follow each other.
    ///
    /// # Safety
    /// `from` has `8 * BITS` bytes; AVX-512 with VBMI and GFNI is there, and enabled in the caller.
    unsafe fn unpack(from: *const u8, to: *mut Line);
}

/// A call that waits for its [`Codes`].
pub(super) trait WithCodes {
    /// What comes of it.
    type Output;
    /// Runs with `C`.
    fn run<C: Codes>(self) -> Self::Output;
}

/// Runs `call` with the codes of a (validated) format.
pub(super) fn with_codes<W: WithCodes>(format: QuantFormat, call: W) -> W::Output {
    match format {
        QuantFormat::Affine { bits: 1, .. } => call.run::<Affine<1>>(),
        QuantFormat::Affine { bits: 2, .. } => call.run::<Affine<2>>(),
        QuantFormat::Affine { bits: 3, .. } => call.run::<Affine<3>>(),
        QuantFormat::Affine { bits: 4, .. } => call.run::<Affine<4>>(),
        QuantFormat::Affine { bits: 5, .. } => call.run::<Affine<5>>(),
        QuantFormat::Affine { bits: 6, .. } => call.run::<Affine<6>>(),
        QuantFormat::Affine { .. } => call.run::<Affine<8>>(),
        QuantFormat::Mxfp4 | QuantFormat::Nvfp4 => call.run::<E2m1>(),
        QuantFormat::Mxfp8 => call.run::<E4m3>(),
    }
}

/// Affine codes, centred so that sums stay small even where all activations have one sign. Their centre
/// lies between two of them, so they are doubled; eight bits do not have the room, and are half a step off.
pub(super) struct Affine<const BITS: usize>;

/// E2M1 codes, doubled: integers from -12 to 12.
pub(super) struct E2m1;

/// E4M3 codes, as bf16 numbers.
pub(super) struct E4m3;

/// Byte indices that put the eight codes of each quadword, `bits` bytes, together.
const fn gather_bytes(bits: usize) -> [u8; 64] {
    let mut index = [0; 64];
    let mut byte = 0;
    while byte < 64 {
        let from = byte / 8 * bits + byte % 8;
        index[byte] = if from < 64 { from as u8 } else { 63 };
        byte += 1;
    }
    index
}

/// Bit offsets of the doubled codes of a quadword.
const fn doubled_offsets(bits: usize) -> [u8; 64] {
    let mut offsets = [0; 64];
    let mut byte = 0;
    while byte < 64 {
        offsets[byte] = ((byte % 8 * bits + 63) % 64) as u8;
        byte += 1;
    }
    offsets
}

/// `2 * code - 15`.
const CENTRED_NIBBLES: [i8; 16] = [-15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15];

/// `2 * e2m1`.
const DOUBLED_E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

// SAFETY (all `unsafe` below): reads and writes are those that the trait names; the intrinsics' features
// are enabled where the trait's caller is.

/// Sixty-four nibbles, looked up.
#[inline(always)]
unsafe fn look_up_nibbles(from: *const u8, table: &[i8; 16]) -> __m512i {
    unsafe {
        let words = _mm512_cvtepu8_epi16(_mm256_loadu_si256(from.cast()));
        let nibbles = _mm512_set1_epi8(0x0F);
        // (words | words << 4) & nibbles
        let codes = _mm512_ternarylogic_epi32::<0xA8>(words, _mm512_slli_epi16::<4>(words), nibbles);
        let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
        _mm512_shuffle_epi8(table, codes)
    }
}

impl<const BITS: usize> Codes for Affine<BITS> {
    const BITS: usize = BITS;
    const UNIT: f32 = if BITS == 8 { 1.0 } else { 0.5 };
    const CENTRE: f32 = if BITS == 8 { 128.0 } else { ((1 << BITS) - 1) as f32 * 0.5 };
    const BIASES: bool = true;

    #[inline(always)]
    unsafe fn unpack(from: *const u8, to: *mut Line) {
        unsafe {
            let factors = match BITS {
                8 => _mm512_xor_si512(_mm512_loadu_si512(from.cast()), _mm512_set1_epi8(-128)),
                4 => look_up_nibbles(from, &CENTRED_NIBBLES),
                _ => {
                    let (bytes, offsets) = (&const { gather_bytes(BITS) }, &const { doubled_offsets(BITS) });
                    let bytes = _mm512_loadu_si512(bytes.as_ptr().cast());
                    let offsets = _mm512_loadu_si512(offsets.as_ptr().cast());
                    let packed = _mm512_maskz_loadu_epi8((1u64 << (8 * BITS)) - 1, from.cast());
                    let together = _mm512_permutexvar_epi8(bytes, packed);
                    let doubled = _mm512_multishift_epi64_epi8(offsets, together);
                    let doubled = _mm512_and_si512(doubled, _mm512_set1_epi8(((2 << BITS) - 2) as i8));
                    _mm512_sub_epi8(doubled, _mm512_set1_epi8(((1 << BITS) - 1) as i8))
                }
            };
            _mm512_store_si512(to.cast(), factors);
        }
    }
}

impl Codes for E2m1 {
    const BITS: usize = 4;
    const UNIT: f32 = 0.5;

    #[inline(always)]
    unsafe fn unpack(from: *const u8, to: *mut Line) {
        unsafe { _mm512_store_si512(to.cast(), look_up_nibbles(from, &DOUBLED_E2M1)) }
    }
}

impl Codes for E4m3 {
    const BITS: usize = 8;
    const FLOAT: bool = true;
    const UNIT: f32 = 1.0;

    #[inline(always)]
    unsafe fn unpack(from: *const u8, to: *mut Line) {
        unsafe {
            // Unpacking interleaves the even quadwords of two vectors, then the odd ones.
            let order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
            let (low, high) = e4m3_halves(_mm512_permutexvar_epi64(order, _mm512_loadu_si512(from.cast())));
            _mm512_store_si512(to.cast(), _mm512_unpacklo_epi8(low, high));
            _mm512_store_si512(to.add(ROWS).cast(), _mm512_unpackhi_epi8(low, high));
        }
    }
}
