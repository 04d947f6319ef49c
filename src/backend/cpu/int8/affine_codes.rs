//! Packed affine codes as the factors that tiles multiply: signed bytes.

use super::tile::Line;
use std::arch::x86_64::*;

/// Codes of a row that are unpacked at a time, a *step*.
pub(super) const STEP: usize = 64;

/// Affine codes of so many bits, centred so that sums stay small even where all activations have one sign. Their
/// centre lies between two of them, so they are doubled; eight bits do not have the room, and are half a step off.
///
/// A code is `factor * UNIT + CENTRE`.
pub(super) struct Codes<const BITS: usize>;

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

/// Sixty-four nibbles as bytes.
///
/// # Safety
/// As [`Codes::unpack`].
#[inline(always)]
pub(super) unsafe fn nibbles(from: *const u8) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe {
        let words = _mm512_cvtepu8_epi16(_mm256_loadu_si256(from.cast()));
        // (words | words << 4) & 15
        _mm512_ternarylogic_epi32::<0xA8>(words, _mm512_slli_epi16::<4>(words), _mm512_set1_epi8(15))
    }
}

impl<const BITS: usize> Codes<BITS> {
    /// What a factor is a multiple of.
    pub(super) const UNIT: f32 = if BITS == 8 { 1.0 } else { 0.5 };
    pub(super) const CENTRE: f32 = if BITS == 8 { 128.0 } else { ((1 << BITS) - 1) as f32 * 0.5 };

    /// Unpacks the step at `from` into a row of a tile.
    ///
    /// # Safety
    /// `from` has `8 * BITS` bytes; AVX-512 with VBMI and GFNI is there, and enabled in the caller.
    #[inline(always)]
    pub(super) unsafe fn unpack(from: *const u8, to: *mut Line) {
        // SAFETY: the caller's promise; a line is a vector, and tables have one.
        unsafe {
            let factors = match BITS {
                8 => _mm512_xor_si512(_mm512_loadu_si512(from.cast()), _mm512_set1_epi8(-128)),
                4 => {
                    let table = _mm_loadu_si128(CENTRED_NIBBLES.as_ptr().cast());
                    _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), nibbles(from))
                }
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
