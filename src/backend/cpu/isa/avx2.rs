//! AVX2 with FMA: 8 lanes, blocks of 32 elements.

#![allow(clippy::undocumented_unsafe_blocks)] // Each block wraps instructions under the conditions of `Simd`.

use super::{each, Simd, Table16};
use std::arch::x86_64::*;

/// Proves that the CPU has AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend::cpu) struct Avx2(());

impl Avx2 {
    pub(super) fn new() -> Option<Self> {
        let detected = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        detected.then_some(Self(()))
    }
}

/// Byte indices, within a 16-byte half, that gather for each of its four lanes the bytes from bit
/// `4 * bits * lane` on. The upper half was loaded so that it ends with the block: `skip` bytes of it
/// come before its first lane.
const fn gather_bytes(bits: usize) -> [u8; 32] {
    let mut index = [0; 32];
    let mut byte = 0;
    while byte < 32 {
        let skip = if byte < 16 { 0 } else { 2 * bits - (4 * bits - 16) };
        let from = skip + (byte % 16 / 4) * 4 * bits / 8 + byte % 4;
        index[byte] = if from < 16 { from as u8 } else { 0x80 };
        byte += 1;
    }
    index
}

// SAFETY (all `unsafe` below): functions read and write what `Simd` says, for which its callers' pointers are valid; and
// they are called from functions that enable the features of the intrinsics.
#[inline(always)]
unsafe fn shifted<const BITS: usize>(codes: __m256i) -> [__m256i; 4] {
    unsafe { shifted_by(codes, BITS) }
}

#[inline(always)]
unsafe fn shifted_by(codes: __m256i, bits: usize) -> [__m256i; 4] {
    let bits = bits as i32;
    unsafe {
        [
            codes,
            _mm256_srlv_epi32(codes, _mm256_set1_epi32(bits)),
            _mm256_srlv_epi32(codes, _mm256_set1_epi32(2 * bits)),
            _mm256_srlv_epi32(codes, _mm256_set1_epi32(3 * bits)),
        ]
    }
}

impl Simd for Avx2 {
    type F = __m256;
    type U = __m256i;
    const LANES: usize = 8;

    // Sixteen registers: sums, four dequantized vectors for each row, one of activations.
    const MAX_M_OF_PAIRS: usize = 2;
    const TILE: (usize, usize) = (6, 2);

    #[inline(always)]
    unsafe fn zero() -> Self::F {
        unsafe { _mm256_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::F {
        unsafe { _mm256_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Self::F) {
        unsafe { _mm256_storeu_ps(to, value) }
    }
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::F {
        unsafe { _mm256_set1_ps(value) }
    }
    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul_add(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn sum(value: Self::F) -> f32 {
        unsafe {
            let four = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps::<1>(value));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }
    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm256_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn largest(value: Self::F) -> f32 {
        unsafe {
            let four = _mm_max_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps::<1>(value));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }
    }
    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn low_bits_as_power(value: Self::F) -> Self::F {
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_castps_si256(value))) }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self::F {
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self::F {
        unsafe {
            let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))
        }
    }
    #[inline(always)]
    unsafe fn load_bytes(from: *const u8) -> Self::F {
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_nibbles(from: *const u8, shift: u32) -> Self::F {
        unsafe {
            let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast()));
            let codes = _mm256_srlv_epi32(bytes, _mm256_set1_epi32(shift.cast_signed()));
            _mm256_cvtepi32_ps(_mm256_and_si256(codes, _mm256_set1_epi32(15)))
        }
    }
    #[inline(always)]
    unsafe fn prefetch(address: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }

    #[inline(always)]
    unsafe fn load_codes<const BITS: usize>(from: *const u8) -> Self::U {
        unsafe {
            match BITS {
                1 => {
                    let all = _mm256_set1_epi32(from.cast::<i32>().read_unaligned());
                    _mm256_srlv_epi32(all, _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28))
                }
                2 => _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast())),
                4 => _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast())),
                8 => _mm256_loadu_si256(from.cast()),
                3 => {
                    // 12 bytes; all of them in both halves, lanes 4 to 7 start at byte 6.
                    let low = _mm_loadl_epi64(from.cast());
                    let last = from.add(8).cast::<i32>().read_unaligned();
                    let packed = _mm256_broadcastsi128_si256(_mm_insert_epi32::<2>(low, last));
                    let index = _mm256_setr_epi8(
                        0, 1, -1, -1, 1, 2, -1, -1, 3, 4, -1, -1, 4, 5, -1, -1, //
                        6, 7, -1, -1, 7, 8, -1, -1, 9, 10, -1, -1, 10, 11, -1, -1,
                    );
                    let odd_lanes_later = _mm256_set1_epi64x(4 << 32);
                    _mm256_srlv_epi32(_mm256_shuffle_epi8(packed, index), odd_lanes_later)
                }
                // 5 and 6: 20 and 24 bytes, of which the halves load the first and the last 16.
                _ => {
                    let first = _mm_loadu_si128(from.cast());
                    let last = _mm_loadu_si128(from.add(4 * BITS - 16).cast());
                    let index = const { gather_bytes(if BITS < 5 { 5 } else { BITS }) };
                    let index = _mm256_loadu_si256(index.as_ptr().cast());
                    let lanes = _mm256_shuffle_epi8(_mm256_set_m128i(last, first), index);
                    match BITS {
                        6 => lanes,
                        _ => _mm256_srlv_epi32(lanes, _mm256_set1_epi64x(4 << 32)),
                    }
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn broadcast<const LANES_PER_GROUP: usize>(from: *const f32) -> Self::F {
        unsafe {
            match LANES_PER_GROUP {
                4 => _mm256_set_m128(_mm_set1_ps(*from.add(1)), _mm_set1_ps(*from)),
                _ => _mm256_set1_ps(*from),
            }
        }
    }

    #[inline(always)]
    unsafe fn affine<const BITS: usize, const LANES_PER_GROUP: usize>(
        codes: Self::U,
        scale: Self::F,
        bias: Self::F,
    ) -> [Self::F; 4] {
        unsafe {
            let mask = _mm256_set1_epi32((1 << BITS) - 1);
            each!(shifted::<BITS>(codes), |code| {
                _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_and_si256(code, mask)), scale, bias)
            })
        }
    }
    #[inline(always)]
    unsafe fn lookup16<T: Table16>(codes: Self::U) -> [Self::F; 4] {
        unsafe {
            // Eight entries are selected by the three lowest bits of a lane.
            let lower = _mm256_loadu_ps(const { &T::VALUES }.as_ptr());
            if const { T::BITS < 4 } {
                return each!(shifted_by(codes, T::BITS), |code| _mm256_permutevar8x32_ps(lower, code));
            }
            // The fourth bit becomes a lane's highest.
            if const { T::HAS_SIGN_BIT } {
                let sign = _mm256_set1_epi32(i32::MIN);
                each!(shifted::<4>(codes), |code| {
                    let negative = _mm256_and_si256(_mm256_slli_epi32::<28>(code), sign);
                    _mm256_or_ps(_mm256_permutevar8x32_ps(lower, code), _mm256_castsi256_ps(negative))
                })
            } else {
                let upper = _mm256_loadu_ps(const { &T::VALUES }.as_ptr().add(8));
                each!(shifted::<4>(codes), |code| {
                    let is_upper = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(code));
                    let values =
                        (_mm256_permutevar8x32_ps(lower, code), _mm256_permutevar8x32_ps(upper, code));
                    _mm256_blendv_ps(values.0, values.1, is_upper)
                })
            }
        }
    }
    #[inline(always)]
    unsafe fn e4m3(codes: Self::U) -> [Self::F; 4] {
        unsafe {
            // As `e4m3_to_f32`, on vectors.
            each!(shifted::<8>(codes), |code| {
                let magnitude = _mm256_and_si256(code, _mm256_set1_epi32(0x7F));
                let bits = _mm256_slli_epi32::<20>(magnitude);
                let normal = _mm256_add_epi32(bits, _mm256_set1_epi32(120 << 23));
                let one_up = _mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_set1_epi32(121 << 23)));
                let subnormal = _mm256_sub_ps(one_up, _mm256_set1_ps(0.015625));
                let is_normal = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(7));
                let is_nan = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7F));
                let value =
                    _mm256_blendv_ps(subnormal, _mm256_castsi256_ps(normal), _mm256_castsi256_ps(is_normal));
                let sign = _mm256_and_si256(_mm256_slli_epi32::<24>(code), _mm256_set1_epi32(i32::MIN));
                let bits = _mm256_or_si256(_mm256_castps_si256(value), sign);
                _mm256_castsi256_ps(_mm256_or_si256(bits, is_nan))
            })
        }
    }
    #[inline(always)]
    unsafe fn int8(codes: Self::U) -> [Self::F; 4] {
        unsafe {
            // Each code at the top of its lane, from where it comes down with its sign.
            let at_top = [
                _mm256_slli_epi32::<24>(codes),
                _mm256_slli_epi32::<16>(codes),
                _mm256_slli_epi32::<8>(codes),
                codes,
            ];
            each!(at_top, |code| _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(code)))
        }
    }
}
