//! Packed codes as unsigned bytes.

#![allow(clippy::needless_range_loop)] // Loops of constant length over arrays that have to stay in registers.

use super::codes::doubled;
use super::tables::{table, AFFINE, IQ1_S, IQ2, IQ4};
use std::arch::x86_64::*;

/// Whether the sum of a lane can exceed 32 bits with all three limbs, so that the lowest limb's is added in f32. Eight
/// codes of 6 bits, at most 32 off their zero point, just fit: 8 * 32 * 0x7F7F7F < 2^31.
pub(super) const fn splits_sum(bits: usize, kind: u8) -> bool {
    bits == 8 || matches!(kind, IQ4 | IQ2 | IQ1_S)
}

/// The first bit of four codes among those of a lane, eight of 3, 5 or 6 bits: the first four, or the last.
const fn first_bit(bits: usize, vector: usize) -> usize {
    vector * 4 * bits
}

/// The first byte of a lane that is gathered for them: that with this bit, or of 3 bits the first, since all eight codes are in
/// one lane then.
const fn first_byte(bits: usize, vector: usize) -> usize {
    match bits {
        3 => 0,
        _ => first_bit(bits, vector) / 8,
    }
}

/// Byte indices, from 64 on into the second load, that gather, in each lane, the bytes with the first (`vector` 0) or the
/// last four of its eight codes of 3, 5 or 6 bits. No code has bits in the fourth byte of a lane, which may lie behind the
/// block.
const fn gather_bytes(bits: usize, vector: usize) -> [u8; 64] {
    let mut index = [0; 64];
    let mut byte = 0;
    while byte < 64 {
        index[byte] = (byte / 4 * bits + first_byte(bits, vector) + byte % 4) as u8;
        byte += 1;
    }
    index
}

/// Bit offsets of these codes in a quadword of two lanes; one less, modulo 64, for doubled ones.
const fn code_offsets(bits: usize, vector: usize, double: bool) -> [u8; 64] {
    let mut offsets = [0; 64];
    let mut byte = 0;
    while byte < 64 {
        let first = byte % 8 / 4 * 32 + first_bit(bits, vector) - 8 * first_byte(bits, vector);
        offsets[byte] = ((first + byte % 4 * bits + 64 - double as usize) % 64) as u8;
        byte += 1;
    }
    offsets
}

/// The [`table`] for codes of three bits, whatever the three bits above them.
const fn table_of_three_bits(kind: u8) -> [u8; 64] {
    let (of_codes, mut all, mut index) = (table(kind), [0; 64], 0);
    while index < 64 {
        all[index] = of_codes[index % 8];
        index += 1;
    }
    all
}

/// The integers of a block's codes as bytes; `first` has up to 64 bytes of the block, `second` those behind them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
pub(super) fn unpack<const BITS: usize, const VECTORS: usize, const KIND: u8>(
    first: __m512i,
    second: __m512i,
) -> [__m512i; VECTORS] {
    let mut codes = [first; VECTORS];
    for vector in 0..VECTORS {
        codes[vector] = unpack_vector::<BITS, KIND>(vector, first, second);
    }
    codes
}

/// The same of one vector of the block.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
pub(super) fn unpack_vector<const BITS: usize, const KIND: u8>(
    vector: usize,
    first: __m512i,
    second: __m512i,
) -> __m512i {
    let double = const { doubled(BITS) && KIND == AFFINE };
    let mask = _mm512_set1_epi8((((1u32 << BITS) - 1) << u32::from(double)) as u8 as i8);
    // SAFETY: only arrays are loaded, which have the 64 (16) bytes of a vector.
    unsafe {
        match BITS {
            3 | 5 | 6 => {
                let index = &const { [gather_bytes(BITS, 0), gather_bytes(BITS, 1)] }[vector];
                let offsets = &const {
                    let double = doubled(BITS) && KIND == AFFINE;
                    [code_offsets(BITS, 0, double), code_offsets(BITS, 1, double)]
                }[vector];
                let index = _mm512_loadu_si512(index.as_ptr().cast());
                let offsets = _mm512_loadu_si512(offsets.as_ptr().cast());
                let together = match BITS {
                    3 => _mm512_permutexvar_epi8(index, first),
                    _ => _mm512_permutex2var_epi8(first, index, second),
                };
                let some = _mm512_multishift_epi64_epi8(offsets, together);
                if KIND == AFFINE {
                    return _mm512_and_si512(some, mask);
                }
                // The table has 64 entries, and of an index six bits count.
                let table = &const { table_of_three_bits(KIND) };
                _mm512_permutexvar_epi8(some, _mm512_loadu_si512(table.as_ptr().cast()))
            }
            8 => {
                // The lower four codes of every quadword, and the upper four.
                let [first, second] = [_mm512_castsi512_ps(first), _mm512_castsi512_ps(second)];
                _mm512_castps_si512(match vector {
                    0 => _mm512_shuffle_ps::<0x88>(first, second),
                    _ => _mm512_shuffle_ps::<0xDD>(first, second),
                })
            }
            _ => {
                // Shifts and masks are not carried out where products are.
                let shifted = match (vector, double) {
                    (0, false) => first,
                    (0, true) => _mm512_add_epi8(first, first),
                    _ => {
                        let shift = vector * BITS - usize::from(double);
                        _mm512_srlv_epi16(first, _mm512_set1_epi16(shift as i16))
                    }
                };
                let codes = _mm512_and_si512(shifted, mask);
                if KIND == AFFINE {
                    return codes;
                }
                let table = &const { table(KIND) };
                let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
                _mm512_shuffle_epi8(table, codes)
            }
        }
    }
}
