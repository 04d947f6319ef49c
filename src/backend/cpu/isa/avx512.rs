//! AVX-512 with VBMI and GFNI (Ice Lake, Zen 4 and later): 16 lanes, blocks of 64 elements.
//!
//! Codes of up to four bits select from a table of sixteen numbers (`vpermps`, which ignores the bits
//! above them), those of five bits from two tables. Where one group covers the whole vector, the table
//! already holds `code * scale + bias`, so a group of 64 costs one multiplication.

#![allow(clippy::undocumented_unsafe_blocks)] // Each block wraps instructions under the conditions of `Simd`.

use super::{avx512_e4m3, each, Simd, Table16};
use std::arch::x86_64::*;

/// Proves that the CPU has AVX-512 (F, BW, DQ, VL, VBMI), GFNI, AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend::cpu) struct Avx512(());

impl Avx512 {
    pub(in crate::backend::cpu) fn new() -> Option<Self> {
        let detected = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vbmi")
            && is_x86_feature_detected!("gfni")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        detected.then_some(Self(()))
    }
}

/// Proves that the CPU has VNNI beside [`Avx512`].
#[derive(Clone, Copy, Debug)]
pub(in crate::backend::cpu) struct Avx512Vnni {
    pub(in crate::backend::cpu) avx512: Avx512,
    _private: (),
}

impl Avx512Vnni {
    pub(super) fn new() -> Option<Self> {
        let avx512 = Avx512::new()?;
        is_x86_feature_detected!("avx512vnni").then_some(Self { avx512, _private: () })
    }
}

/// Codes as numbers, from `first` on.
const fn integers(first: usize) -> [f32; 16] {
    let mut table = [0.0; 16];
    let mut lane = 0;
    while lane < 16 {
        table[lane] = (first + lane) as f32;
        lane += 1;
    }
    table
}

/// Codes of `BITS` bits as numbers, repeated: the bits above them do not matter.
const fn repeated_integers(bits: usize) -> [f32; 16] {
    let mut table = [0.0; 16];
    let mut lane = 0;
    while lane < 16 {
        table[lane] = (lane & ((1 << bits) - 1)) as f32;
        lane += 1;
    }
    table
}

/// The group that each lane belongs to.
const fn lane_groups(lanes_per_group: usize) -> [i32; 16] {
    let mut index = [0; 16];
    let mut lane = 0;
    while lane < 16 {
        index[lane] = (lane / lanes_per_group) as i32;
        lane += 1;
    }
    index
}

/// Byte indices that gather, for each dword lane, the bytes from bit `4 * bits * lane` on.
const fn gather_bytes(bits: usize) -> [u8; 64] {
    let mut index = [0; 64];
    let mut byte = 0;
    while byte < 64 {
        let from = (byte / 4) * 4 * bits / 8 + byte % 4;
        index[byte] = if from < 64 { from as u8 } else { 63 };
        byte += 1;
    }
    index
}

/// Each 16-byte part `[e0 .. e15]` as `[e0 e1 e4 e5 .. | e2 e3 e6 e7 ..]`: unpacking its halves then
/// leaves elements `4 l + i` in lane `l`.
const fn unpack_order() -> [u8; 64] {
    let mut order = [0; 64];
    let mut byte = 0;
    while byte < 64 {
        let (half, within) = (byte % 16 / 8, byte % 8);
        order[byte] = (4 * (within / 2) + 2 * half + within % 2) as u8;
        byte += 1;
    }
    order
}

// SAFETY (all `unsafe` below): functions read and write what `Simd` says, for which its callers' pointers are valid; and
// they are called from functions that enable the features of the intrinsics.
#[inline(always)]
unsafe fn numbers(table: [f32; 16]) -> __m512 {
    unsafe { _mm512_loadu_ps(table.as_ptr()) }
}

#[inline(always)]
pub(super) unsafe fn bytes(table: &[u8; 64]) -> __m512i {
    unsafe { _mm512_loadu_si512(table.as_ptr().cast()) }
}

/// The codes shifted so that code `i` of each lane is lowest, for `i` in 0..4.
#[inline(always)]
unsafe fn shifted<const BITS: usize>(codes: __m512i) -> [__m512i; 4] {
    unsafe { shifted_by(codes, BITS) }
}

#[inline(always)]
unsafe fn shifted_by(codes: __m512i, bits: usize) -> [__m512i; 4] {
    let bits = bits as i32;
    unsafe {
        [
            codes,
            _mm512_srlv_epi32(codes, _mm512_set1_epi32(bits)),
            _mm512_srlv_epi32(codes, _mm512_set1_epi32(2 * bits)),
            _mm512_srlv_epi32(codes, _mm512_set1_epi32(3 * bits)),
        ]
    }
}

impl Simd for Avx512 {
    type F = __m512;
    type U = __m512i;
    const LANES: usize = 16;

    const MAX_M_OF_PAIRS: usize = 8;
    const TILE: (usize, usize) = (6, 4);
    const DEQUANTIZES_AHEAD: bool = true;

    #[inline(always)]
    unsafe fn zero() -> Self::F {
        unsafe { _mm512_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::F {
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Self::F) {
        unsafe { _mm512_storeu_ps(to, value) }
    }
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::F {
        unsafe { _mm512_set1_ps(value) }
    }
    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul_add(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn sum(value: Self::F) -> f32 {
        unsafe { _mm512_reduce_add_ps(value) }
    }
    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn largest(value: Self::F) -> f32 {
        unsafe { _mm512_reduce_max_ps(value) }
    }
    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn low_bits_as_power(value: Self::F) -> Self::F {
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_castps_si512(value))) }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self::F {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self::F {
        unsafe {
            let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
        }
    }
    #[inline(always)]
    unsafe fn load_bytes(from: *const u8) -> Self::F {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_nibbles(from: *const u8, shift: u32) -> Self::F {
        unsafe {
            let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()));
            let index = _mm512_srlv_epi32(bytes, _mm512_set1_epi32(shift.cast_signed()));
            _mm512_permutexvar_ps(index, numbers(const { integers(0) }))
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
                    // Four bits for each lane, from bit 4 * lane of the one quadword.
                    const FROM_BIT: [i64; 8] = [
                        0x04_0000_0000,
                        0x0C_0000_0008,
                        0x14_0000_0010,
                        0x1C_0000_0018,
                        0x24_0000_0020,
                        0x2C_0000_0028,
                        0x34_0000_0030,
                        0x3C_0000_0038,
                    ];
                    let all = _mm512_set1_epi64(from.cast::<i64>().read_unaligned());
                    _mm512_multishift_epi64_epi8(_mm512_loadu_si512(FROM_BIT.as_ptr().cast()), all)
                }
                2 => _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast())),
                4 => _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast())),
                8 => _mm512_loadu_si512(from.cast()),
                // 3, 5, 6: lanes start at whole bytes, or (odd lanes of odd widths) four bits later.
                _ => {
                    let present = (1u64 << (8 * BITS)) - 1;
                    let packed = _mm512_maskz_loadu_epi8(present, from.cast());
                    let lanes = _mm512_permutexvar_epi8(bytes(&const { gather_bytes(BITS) }), packed);
                    match BITS {
                        6 => lanes,
                        _ => _mm512_srlv_epi32(lanes, _mm512_set1_epi64(4 << 32)),
                    }
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn broadcast<const LANES_PER_GROUP: usize>(from: *const f32) -> Self::F {
        unsafe {
            let index = &const { lane_groups(LANES_PER_GROUP) };
            let index = _mm512_loadu_si512(index.as_ptr().cast());
            match LANES_PER_GROUP {
                4 => _mm512_permutexvar_ps(index, _mm512_broadcast_f32x4(_mm_loadu_ps(from))),
                8 => {
                    let pair = _mm512_set1_epi64(from.cast::<i64>().read_unaligned());
                    _mm512_permutexvar_ps(index, _mm512_castsi512_ps(pair))
                }
                _ => _mm512_set1_ps(*from),
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
            let whole_vector = LANES_PER_GROUP >= 16;
            match BITS {
                1..=4 => {
                    let table = numbers(const { repeated_integers(BITS) });
                    if whole_vector {
                        let table = _mm512_fmadd_ps(table, scale, bias);
                        each!(shifted::<BITS>(codes), |index| _mm512_permutexvar_ps(index, table))
                    } else {
                        each!(shifted::<BITS>(codes), |index| {
                            _mm512_fmadd_ps(_mm512_permutexvar_ps(index, table), scale, bias)
                        })
                    }
                }
                5 => {
                    let (low, high) = (numbers(const { integers(0) }), numbers(const { integers(16) }));
                    if whole_vector {
                        let low = _mm512_fmadd_ps(low, scale, bias);
                        let high = _mm512_fmadd_ps(high, scale, bias);
                        each!(shifted::<BITS>(codes), |index| _mm512_permutex2var_ps(low, index, high))
                    } else {
                        each!(shifted::<BITS>(codes), |index| {
                            _mm512_fmadd_ps(_mm512_permutex2var_ps(low, index, high), scale, bias)
                        })
                    }
                }
                _ => {
                    let mask = _mm512_set1_epi32((1 << BITS) - 1);
                    each!(shifted::<BITS>(codes), |code| {
                        _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_and_si512(code, mask)), scale, bias)
                    })
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn lookup16<T: Table16>(codes: Self::U) -> [Self::F; 4] {
        unsafe {
            let table = numbers(T::VALUES);
            each!(shifted_by(codes, T::BITS), |index| _mm512_permutexvar_ps(index, table))
        }
    }
    #[inline(always)]
    unsafe fn e4m3(codes: Self::U) -> [Self::F; 4] {
        unsafe {
            let codes = _mm512_shuffle_epi8(codes, bytes(&const { unpack_order() }));
            // Few vectors have one of those.
            let any_rare = avx512_e4m3::any_rare(avx512_e4m3::rank(codes));
            avx512_e4m3::numbers(if any_rare {
                avx512_e4m3::by_tables(codes)
            } else {
                avx512_e4m3::by_bits(codes)
            })
        }
    }
    #[inline(always)]
    unsafe fn int8(codes: Self::U) -> [Self::F; 4] {
        unsafe {
            // Each code at the top of its lane, from where it comes down with its sign.
            let at_top = [
                _mm512_slli_epi32::<24>(codes),
                _mm512_slli_epi32::<16>(codes),
                _mm512_slli_epi32::<8>(codes),
                codes,
            ];
            each!(at_top, |code| _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(code)))
        }
    }
}
