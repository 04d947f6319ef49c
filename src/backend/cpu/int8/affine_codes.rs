//! Packed affine codes as the signed bytes that tiles multiply.

use super::super::isa::amx_tile::Line;
use std::arch::x86_64::*;

/// Codes of a row that are unpacked at a time, a *step*.
pub(super) const STEP: usize = 64;

/// Affine codes of so many bits, relative to the center of their range, so that sums stay small even where
/// all activations have one sign. The middle lies between two codes, so they are doubled; eight bits do not have the room,
/// and their center is half a step off.
///
/// A code is `byte * UNIT + CENTER`.
pub(super) struct AffineCodes<const BITS: usize>;

/// Byte indices that gather the `bits` bytes with the eight codes of each quadword.
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
const DOUBLED_NIBBLES: [i8; 16] = [-15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15];

/// Sixty-four nibbles as bytes.
///
/// # Safety
/// `from` is valid for 32 bytes; AVX-512 (F, BW) is there, and the caller enables it.
#[inline(always)]
pub(super) unsafe fn nibbles(from: *const u8) -> __m512i {
    // SAFETY: 32 bytes are read, for which the caller vouches.
    unsafe {
        let words = _mm512_cvtepu8_epi16(_mm256_loadu_si256(from.cast()));
        // (words | words << 4) & 15
        _mm512_ternarylogic_epi32::<0xA8>(words, _mm512_slli_epi16::<4>(words), _mm512_set1_epi8(15))
    }
}

impl<const BITS: usize> AffineCodes<BITS> {
    /// The unit of a byte.
    pub(super) const UNIT: f32 = if BITS == 8 { 1.0 } else { 0.5 };
    pub(super) const CENTER: f32 = if BITS == 8 { 128.0 } else { ((1 << BITS) - 1) as f32 * 0.5 };

    /// Unpacks the step at `from` into a row of a tile.
    ///
    /// # Safety
    /// `from` is valid for `8 * BITS` bytes, `to` for a line; AVX-512 with VBMI and GFNI is there, and the caller enables it.
    #[inline(always)]
    pub(super) unsafe fn unpack(from: *const u8, to: *mut Line) {
        // SAFETY: `8 * BITS` bytes are read, for which the caller vouches; a line is an aligned vector, and tables have the
        // bytes of one.
        unsafe {
            let bytes = match BITS {
                8 => _mm512_xor_si512(_mm512_loadu_si512(from.cast()), _mm512_set1_epi8(-128)),
                4 => {
                    let table = _mm_loadu_si128(DOUBLED_NIBBLES.as_ptr().cast());
                    _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), nibbles(from))
                }
                _ => {
                    let (index, offsets) = (&const { gather_bytes(BITS) }, &const { doubled_offsets(BITS) });
                    let index = _mm512_loadu_si512(index.as_ptr().cast());
                    let offsets = _mm512_loadu_si512(offsets.as_ptr().cast());
                    let packed = _mm512_maskz_loadu_epi8((1u64 << (8 * BITS)) - 1, from.cast());
                    let together = _mm512_permutexvar_epi8(index, packed);
                    let doubled = _mm512_multishift_epi64_epi8(offsets, together);
                    let doubled = _mm512_and_si512(doubled, _mm512_set1_epi8(((2 << BITS) - 2) as i8));
                    _mm512_sub_epi8(doubled, _mm512_set1_epi8(((1 << BITS) - 1) as i8))
                }
            };
            _mm512_store_si512(to.cast(), bytes);
        }
    }
}
