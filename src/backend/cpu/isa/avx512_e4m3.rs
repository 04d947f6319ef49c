//! E4M3 codes to numbers, with AVX-512, VBMI and GFNI.
//!
//! Most codes become f32 or bf16 by moving their bits. *Rare* ones do not: zero, subnormal numbers and NaN take tables.
//!
//! # Safety
//! Each function may be called only where the CPU has these features, from a function that enables them.

#![allow(clippy::undocumented_unsafe_blocks)] // Each block wraps instructions under the conditions above.

use super::avx512::bytes;
use std::arch::x86_64::*;

/// A byte of the upper half of the f32 that each positive E4M3 code stands for.
///
/// E4M3 has three mantissa bits, so the lower half is zero.
const fn value_bytes(first: usize, shift: u32) -> [u8; 64] {
    let mut table = [0; 64];
    let mut index = 0;
    while index < 64 {
        let code = (first + index) as u32;
        let bits = if code == 0x7F {
            0x7FC0_0000
        } else if code >= 8 {
            (code << 20) + (120 << 23)
        } else if code == 0 {
            0
        } else {
            // Subnormal: code * 2^-9, normalized.
            let log = 31 - code.leading_zeros();
            ((127 - 9 + log) << 23) | ((code << (23 - log)) & 0x7F_FFFF)
        };
        table[index] = (bits >> shift) as u8;
        index += 1;
    }
    table
}

/// The bit matrix, as GF2P8AFFINEQB wants it, that selects for output bit `7 - i` the input bits `rows[i]`.
const fn bit_matrix(rows: [u8; 8]) -> i64 {
    i64::from_le_bytes(rows)
}

/// Ranks by which [`any_rare`] knows the rare codes. Of several codes the least rank shows whether one of them is rare.
#[inline(always)]
pub(in crate::backend::cpu) unsafe fn rank(codes: __m512i) -> __m512i {
    // Four bits that are 0 for exponent 0 and 1 for exponent 15, and three that are the mantissa, or its complement
    // where the exponent is odd: at most 7 for exponent 0, and 8 for NaN.
    const RANK: i64 = bit_matrix([0, 0x60, 0x30, 0x18, 0x08, 0x0C, 0x0A, 0x09]);
    unsafe { _mm512_gf2p8affine_epi64_epi8::<0>(codes, _mm512_set1_epi64(RANK)) }
}

/// Whether one of these ranks is that of a rare code.
#[inline(always)]
pub(in crate::backend::cpu) unsafe fn any_rare(ranks: __m512i) -> bool {
    unsafe { _mm512_cmple_epu8_mask(ranks, _mm512_set1_epi8(8)) != 0 }
}

/// The second and the top byte of the f32 of each E4M3 code, none of which is rare; both others are zero.
#[inline(always)]
pub(in crate::backend::cpu) unsafe fn by_bits(codes: __m512i) -> (__m512i, __m512i) {
    /// Bits 3 to 0 moved up: the lowest bit of the exponent, and the mantissa.
    const SECOND: i64 = bit_matrix([0x08, 0x04, 0x02, 0x01, 0, 0, 0, 0]);
    /// The sign, and half the exponent, 60 + bits 6 to 4: its carry is bit 6, which flips the ones of 60.
    const TOP: i64 = bit_matrix([0x80, 0x40, 0x40, 0x40, 0x40, 0x40, 0x20, 0x10]);
    unsafe {
        let second = _mm512_gf2p8affine_epi64_epi8::<0>(codes, _mm512_set1_epi64(SECOND));
        (second, _mm512_gf2p8affine_epi64_epi8::<0x3C>(codes, _mm512_set1_epi64(TOP)))
    }
}

/// As [`by_bits`], for all codes.
#[inline(always)]
pub(in crate::backend::cpu) unsafe fn by_tables(codes: __m512i) -> (__m512i, __m512i) {
    unsafe {
        let (low, high) = (&const { value_bytes(0, 16) }, &const { value_bytes(64, 16) });
        let second = _mm512_permutex2var_epi8(bytes(low), codes, bytes(high));
        let (low, high) = (&const { value_bytes(0, 24) }, &const { value_bytes(64, 24) });
        let top = _mm512_permutex2var_epi8(bytes(low), codes, bytes(high));
        // The sign: top | (codes & 0x80).
        (second, _mm512_ternarylogic_epi32::<0xF8>(top, codes, _mm512_set1_epi8(-128)))
    }
}

/// The f32 numbers of which these are the second and the top bytes. Of each sixteen, the first vector has the even
/// ones of the first eight in four neighbouring lanes, the second the odd ones, the others those of the last eight.
#[inline(always)]
pub(in crate::backend::cpu) unsafe fn numbers((second, top): (__m512i, __m512i)) -> [__m512; 4] {
    unsafe {
        let (first, last) = (_mm512_unpacklo_epi8(second, top), _mm512_unpackhi_epi8(second, top));
        let upper_half = _mm512_set1_epi32(0xFFFF_0000_u32 as i32);
        [
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(first)),
            _mm512_castsi512_ps(_mm512_and_si512(first, upper_half)),
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(last)),
            _mm512_castsi512_ps(_mm512_and_si512(last, upper_half)),
        ]
    }
}
