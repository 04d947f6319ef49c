//! Packed codes as unsigned bytes, 32 to a vector.

#![allow(clippy::needless_range_loop)] // Loops of constant length over arrays that have to stay in registers.

use super::super::super::isa::{avx2::Avx2, Simd};
use super::super::codes::doubled;
use super::super::tables::{table, AFFINE};
use std::arch::x86_64::*;

/// The largest integer of a code.
const fn largest(bits: usize, kind: u8) -> usize {
    if kind == AFFINE {
        return ((1 << bits) - 1) << doubled(bits) as usize;
    }
    let (table, mut largest, mut code) = (table(kind), 0, 0);
    while code < 1 << bits {
        if table[code] as usize > largest {
            largest = table[code] as usize;
        }
        code += 1;
    }
    largest
}

/// How many sums of two products with bytes have room in 16 bits with a sign.
pub(in super::super) const fn sums_in_16_bits(bits: usize, kind: u8) -> usize {
    i16::MAX as usize / (2 * 128 * largest(bits, kind))
}

/// A block of codes, doubled or looked up as [`IntegerCodes`] says, of which `VECTORS` vectors become: of 1, 2 and 4 bits, byte j of vector v is code `j * VECTORS + v`, else code
/// `32 * v + j`.
///
/// [`IntegerCodes`]: super::super::codes::IntegerCodes
///
/// # Safety
/// The block has `4 * VECTORS * BITS` bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(in super::super) unsafe fn load_block<const BITS: usize, const VECTORS: usize, const KIND: u8>(
    from: *const u8,
) -> [__m256i; VECTORS] {
    let mut codes = [_mm256_setzero_si256(); VECTORS];
    let double = const { doubled(BITS) && KIND == AFFINE };
    let mask = _mm256_set1_epi8((((1u32 << BITS) - 1) << u32::from(double)) as u8 as i8);
    for vector in 0..VECTORS {
        // SAFETY: the caller vouches for the bytes of the block, of which each vector of the second kind has its own part.
        unsafe {
            codes[vector] = match BITS {
                1 | 2 | 4 => {
                    let all = _mm256_loadu_si256(from.cast());
                    let shifted = match (vector, double) {
                        (0, false) => all,
                        (0, true) => _mm256_add_epi8(all, all),
                        _ => {
                            let shift = vector * BITS - usize::from(double);
                            _mm256_srl_epi16(all, _mm_cvtsi32_si128(shift as i32))
                        }
                    };
                    _mm256_and_si256(shifted, mask)
                }
                8 => _mm256_loadu_si256(from.add(32 * vector).cast()),
                _ => spread::<BITS>(Avx2::load_codes::<BITS>(from.add(4 * BITS * vector)), double),
            };
            if KIND != AFFINE {
                let table = &const { table(KIND) };
                let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
                codes[vector] = _mm256_shuffle_epi8(table, codes[vector]);
            }
        }
    }
    codes
}

/// The four codes in the low bits of each lane as its four bytes, or twice the codes.
#[inline]
#[target_feature(enable = "avx2")]
fn spread<const BITS: usize>(lanes: __m256i, double: bool) -> __m256i {
    let lanes = if double { _mm256_add_epi32(lanes, lanes) } else { lanes };
    let pair = ((1u32 << (2 * BITS)) - 1) << u32::from(double);
    let one = ((1u32 << BITS) - 1) << u32::from(double);
    // Two codes in each half of a lane, then one in each quarter.
    let lower = _mm256_and_si256(lanes, _mm256_set1_epi32(pair as i32));
    let upper = _mm256_sll_epi32(lanes, _mm_cvtsi32_si128(16 - 2 * BITS as i32));
    let pairs =
        _mm256_or_si256(lower, _mm256_and_si256(upper, _mm256_set1_epi32((pair << 16).cast_signed())));
    let lower = _mm256_and_si256(pairs, _mm256_set1_epi32((one | one << 16) as i32));
    let upper = _mm256_sll_epi32(pairs, _mm_cvtsi32_si128(8 - BITS as i32));
    let mask = (one | one << 16) << 8;
    _mm256_or_si256(lower, _mm256_and_si256(upper, _mm256_set1_epi32(mask.cast_signed())))
}

#[cfg(test)]
mod tests {
    use super::super::super::tables::IQ2;
    use super::*;
    use crate::backend::cpu::isa::tested;
    use crate::backend::cpu::isa::InstructionSet;

    /// Every code in every place, beside neighbours that have all bits.
    #[test]
    fn codes_are_bytes_in_their_order() {
        if !tested().iter().any(|isa| matches!(isa, InstructionSet::Avx2(_))) {
            return;
        }
        fn check<const BITS: usize, const VECTORS: usize>() {
            let elements = 32 * VECTORS;
            for place in 0..elements {
                for code in 0..1usize << BITS {
                    let full = (1 << BITS) - 1;
                    let want: Vec<usize> =
                        (0..elements).map(|k| if k == place { code } else { full }).collect();
                    let mut bytes = [0u8; 64];
                    for (k, bit) in (0..elements).flat_map(|k| (0..BITS).map(move |bit| (k, bit))) {
                        bytes[(k * BITS + bit) / 8] |= ((want[k] >> bit & 1) as u8) << ((k * BITS + bit) % 8);
                    }
                    let mut got = [[0u8; 32]; VECTORS];
                    // SAFETY: the CPU has AVX2; a block has no more bytes, and arrays those of vectors.
                    unsafe {
                        for (to, vector) in
                            got.iter_mut().zip(load_block::<BITS, VECTORS, AFFINE>(bytes.as_ptr()))
                        {
                            _mm256_storeu_si256(to.as_mut_ptr().cast(), vector);
                        }
                    }
                    for (k, want) in want.iter().enumerate() {
                        let (vector, byte) = match BITS {
                            1 | 2 | 4 => (k % VECTORS, k / VECTORS),
                            _ => (k / 32, k % 32),
                        };
                        assert_eq!(
                            usize::from(got[vector][byte]),
                            want << usize::from(doubled(BITS)),
                            "{BITS} bits, {place}, {k}"
                        );
                    }
                }
            }
        }
        check::<1, 8>();
        check::<2, 4>();
        check::<3, 1>();
        check::<3, 2>();
        check::<4, 2>();
        check::<5, 2>();
        check::<6, 2>();
        check::<8, 2>();
    }

    #[test]
    fn sums_fit_into_16_bits() {
        for (bits, kind, many) in
            [(1, AFFINE, 63), (4, AFFINE, 4), (5, AFFINE, 2), (6, AFFINE, 2), (3, IQ2, 1)]
        {
            assert_eq!(sums_in_16_bits(bits, kind), many, "{bits} bits");
        }
    }
}
