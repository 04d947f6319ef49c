//! NEON, which every aarch64 CPU has: 4 lanes, blocks of 16 elements.
//!
//! No group is smaller than a block, so a block has one scale. K is a multiple of 16 in every format, so
//! no row has an incomplete block.

#![allow(clippy::undocumented_unsafe_blocks)] // Each block wraps instructions under the conditions of `Simd`.

use super::{each, Simd, Table16};
use std::arch::aarch64::*;

/// Proves that the CPU has NEON.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend::cpu) struct Neon(());

impl Neon {
    pub(super) fn new() -> Option<Self> {
        std::arch::is_aarch64_feature_detected!("neon").then_some(Self(()))
    }
}

/// Proves that the CPU has dot products of bytes, too.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend::cpu) struct NeonDotprod {
    pub(in crate::backend::cpu) neon: Neon,
}

impl NeonDotprod {
    pub(super) fn new() -> Option<Self> {
        let neon = Neon::new()?;
        std::arch::is_aarch64_feature_detected!("dotprod").then_some(Self { neon })
    }
}

/// Proves that the CPU has products of matrices of bytes, too.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend::cpu) struct NeonI8mm {
    pub(in crate::backend::cpu) dotprod: NeonDotprod,
}

impl NeonI8mm {
    pub(super) fn new() -> Option<Self> {
        let dotprod = NeonDotprod::new()?;
        std::arch::is_aarch64_feature_detected!("i8mm").then_some(Self { dotprod })
    }
}

/// Adds the products of its four bytes to each lane.
#[inline]
#[target_feature(enable = "neon,dotprod")]
pub(in crate::backend::cpu) fn dot(mut sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // As an instruction, since the intrinsic is not stable.
    // SAFETY: it works on registers alone, and the function enables its feature.
    unsafe {
        std::arch::asm!(
            "sdot {sums:v}.4s, {a:v}.16b, {b:v}.16b",
            sums = inout(vreg) sums,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// Adds the products of two rows of eight bytes of `a` and of two of `b`: lane `2 * i + j` is of rows `i` and `j`.
#[inline]
#[target_feature(enable = "neon,i8mm")]
pub(in crate::backend::cpu) fn matrix_dot(mut sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: as in [`dot`].
    unsafe {
        std::arch::asm!(
            "smmla {sums:v}.4s, {a:v}.16b, {b:v}.16b",
            sums = inout(vreg) sums,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// The loads of codes that do not fill whole lanes: the first and the last `half_load` bytes of a block,
/// which overlap.
const fn half_load(bits: usize) -> usize {
    if bits < 4 {
        4
    } else {
        8
    }
}

/// Byte indices, into both [`half_load`]s, that gather for each lane the bytes from bit `4 * bits * lane`
/// on; zero behind the block.
const fn gather_bytes(bits: usize) -> [u8; 16] {
    let (block, half) = (2 * bits, half_load(bits));
    let mut index = [0xFF; 16];
    let mut byte = 0;
    while byte < 16 {
        let from = (byte / 4) * 4 * bits / 8 + byte % 4;
        if from < half {
            index[byte] = from as u8;
        } else if from < block {
            index[byte] = (from + 2 * half - block) as u8;
        }
        byte += 1;
    }
    index
}

/// The byte of each value that `shift` brings down.
const fn value_bytes(values: &[f32; 16], shift: u32) -> [u8; 16] {
    let mut table = [0; 16];
    let mut code = 0;
    while code < 16 {
        table[code] = (values[code].to_bits() >> shift) as u8;
        code += 1;
    }
    table
}

/// The four codes of `$bits` bits in each lane, as numbers. They stay where they are: a conversion from
/// fixed point divides by the power of two of a code's position, which is exact.
macro_rules! numbers {
    ($codes:ident, $bits:literal) => {{
        const MASK: u32 = (1 << $bits) - 1;
        [
            vcvtq_f32_u32(vandq_u32($codes, vdupq_n_u32(MASK))),
            vcvtq_n_f32_u32::<$bits>(vandq_u32($codes, vdupq_n_u32(MASK << $bits))),
            vcvtq_n_f32_u32::<{ 2 * $bits }>(vandq_u32($codes, vdupq_n_u32(MASK << (2 * $bits)))),
            vcvtq_n_f32_u32::<{ 3 * $bits }>(vandq_u32($codes, vdupq_n_u32(MASK << (3 * $bits)))),
        ]
    }};
}

// SAFETY (all `unsafe` below): functions read and write what `Simd` says, for which its callers' pointers are valid; and
// they are called from functions that enable the feature of the intrinsics.
#[inline(always)]
unsafe fn shifted_right(lanes: uint32x4_t, by: [i32; 4]) -> uint32x4_t {
    unsafe { vshlq_u32(lanes, vnegq_s32(vld1q_s32(by.as_ptr()))) }
}

impl Simd for Neon {
    type F = float32x4_t;
    type U = uint32x4_t;
    const LANES: usize = 4;

    // Thirty-two registers: sums, four dequantized vectors for each row, masks, scales, activations.
    const MAX_M_OF_PAIRS: usize = 4;
    const TILE: (usize, usize) = (6, 4);

    #[inline(always)]
    unsafe fn zero() -> Self::F {
        unsafe { vdupq_n_f32(0.0) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::F {
        unsafe { vld1q_f32(from) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Self::F) {
        unsafe { vst1q_f32(to, value) }
    }
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::F {
        unsafe { vdupq_n_f32(value) }
    }
    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        unsafe { vaddq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        unsafe { vmulq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn mul_add(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        unsafe { vfmaq_f32(c, a, b) }
    }
    #[inline(always)]
    unsafe fn sum(value: Self::F) -> f32 {
        unsafe { vaddvq_f32(value) }
    }
    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        unsafe { vmaxq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn largest(value: Self::F) -> f32 {
        unsafe { vmaxvq_f32(value) }
    }
    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        unsafe { vsubq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn low_bits_as_power(value: Self::F) -> Self::F {
        unsafe { vreinterpretq_f32_u32(vshlq_n_u32::<23>(vreinterpretq_u32_f32(value))) }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self::F {
        unsafe {
            // Exponent and mantissa land on f32's, 112 too low; the product is exact, and subnormals become normal.
            let bits = vmovl_u16(vld1_u16(from));
            let magnitude = vshlq_n_u32::<13>(vandq_u32(bits, vdupq_n_u32(0x7FFF)));
            let scaled =
                vmulq_f32(vreinterpretq_f32_u32(magnitude), vdupq_n_f32(f32::from_bits((127 + 112) << 23)));
            // What would be 65536 and more is infinite or NaN: all bits of the exponent are set, the mantissa is there.
            let special = vcgeq_f32(scaled, vdupq_n_f32(65536.0));
            let special = vandq_u32(special, vdupq_n_u32(0x7F80_0000));
            let sign = vshlq_n_u32::<16>(vandq_u32(bits, vdupq_n_u32(0x8000)));
            vreinterpretq_f32_u32(vorrq_u32(vorrq_u32(vreinterpretq_u32_f32(scaled), special), sign))
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self::F {
        unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from))) }
    }
    #[inline(always)]
    unsafe fn load_bytes(from: *const u8) -> Self::F {
        unsafe {
            let four = vreinterpret_u8_u32(vdup_n_u32(from.cast::<u32>().read_unaligned()));
            vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(four))))
        }
    }
    #[inline(always)]
    unsafe fn load_nibbles(from: *const u8, shift: u32) -> Self::F {
        unsafe {
            let four = from.cast::<u32>().read_unaligned() >> shift & 0x0F0F_0F0F;
            let codes = vreinterpret_u8_u32(vdup_n_u32(four));
            vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(codes))))
        }
    }
    /// Nothing: there is no stable intrinsic, and rows follow each other in memory, which the CPU
    /// prefetches by itself.
    #[inline(always)]
    unsafe fn prefetch(_address: *const u8) {}

    #[inline(always)]
    unsafe fn load_codes<const BITS: usize>(from: *const u8) -> Self::U {
        unsafe {
            match BITS {
                1 => {
                    let all = vdupq_n_u32(u32::from(from.cast::<u16>().read_unaligned()));
                    shifted_right(all, [0, 4, 8, 12])
                }
                2 => {
                    let bytes = vreinterpret_u8_u32(vdup_n_u32(from.cast::<u32>().read_unaligned()));
                    vmovl_u16(vget_low_u16(vmovl_u8(bytes)))
                }
                4 => vmovl_u16(vreinterpret_u16_u8(vld1_u8(from))),
                8 => vreinterpretq_u32_u8(vld1q_u8(from)),
                // 3, 5, 6: lanes start at whole bytes, or (odd lanes of odd widths) four bits later.
                _ => {
                    let packed = match BITS {
                        3 => {
                            let first = vdupq_n_u32(from.cast::<u32>().read_unaligned());
                            let last = from.add(2).cast::<u32>().read_unaligned();
                            vreinterpretq_u8_u32(vsetq_lane_u32::<1>(last, first))
                        }
                        _ => vcombine_u8(vld1_u8(from), vld1_u8(from.add(2 * BITS - 8))),
                    };
                    let index = const { gather_bytes(BITS) };
                    let lanes = vreinterpretq_u32_u8(vqtbl1q_u8(packed, vld1q_u8(index.as_ptr())));
                    match BITS {
                        6 => lanes,
                        _ => shifted_right(lanes, [0, 4, 0, 4]),
                    }
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn broadcast<const LANES_PER_GROUP: usize>(from: *const f32) -> Self::F {
        unsafe { vld1q_dup_f32(from) }
    }

    #[inline(always)]
    unsafe fn affine<const BITS: usize, const LANES_PER_GROUP: usize>(
        codes: Self::U,
        scale: Self::F,
        bias: Self::F,
    ) -> [Self::F; 4] {
        unsafe {
            let numbers = match BITS {
                1 => numbers!(codes, 1),
                2 => numbers!(codes, 2),
                3 => numbers!(codes, 3),
                4 => numbers!(codes, 4),
                5 => numbers!(codes, 5),
                6 => numbers!(codes, 6),
                _ => numbers!(codes, 8),
            };
            each!(numbers, |number| vfmaq_f32(bias, number, scale))
        }
    }
    #[inline(always)]
    unsafe fn lookup16<T: Table16>(codes: Self::U) -> [Self::F; 4] {
        unsafe {
            if const { T::BITS < 4 } {
                // Eight values are 32 bytes. The four of a value follow each other from four times its code on.
                let values = const { &T::VALUES }.as_ptr().cast::<u8>();
                let table = uint8x16x2_t(vld1q_u8(values), vld1q_u8(values.add(16)));
                let bits = T::BITS as i32;
                return each!([0, -bits, -2 * bits, -3 * bits], |left| {
                    let code = vandq_u32(vshlq_u32(codes, vdupq_n_s32(left)), vdupq_n_u32(7));
                    let first = vmulq_n_u32(code, 0x0404_0404);
                    let bytes = vreinterpretq_u8_u32(vaddq_u32(first, vdupq_n_u32(0x0302_0100)));
                    vreinterpretq_f32_u8(vqtbl2q_u8(table, bytes))
                });
            }
            let third = vld1q_u8(const { value_bytes(&T::VALUES, 16) }.as_ptr());
            let top = vld1q_u8(const { value_bytes(&T::VALUES, 24) }.as_ptr());
            // The codes in the upper half of a lane, where the upper bytes of their values belong. `even` holds codes
            // 0 and 2, `odd` 1 and 3.
            let upper = vreinterpretq_u8_u32(vshlq_n_u32::<16>(codes));
            if const { T::LOWER_HALVES_ARE_ZERO && T::VALUES[0].to_bits() == 0 } {
                // The lower half selects code 0, whose bytes are zero.
                let even = vandq_u8(upper, vdupq_n_u8(15));
                let odd = vshrq_n_u8::<4>(upper);
                let (even, even_top) = (vqtbl1q_u8(third, even), vqtbl1q_u8(top, even));
                let (odd, odd_top) = (vqtbl1q_u8(third, odd), vqtbl1q_u8(top, odd));
                [
                    vreinterpretq_f32_u8(vtrn1q_u8(even, even_top)),
                    vreinterpretq_f32_u8(vtrn1q_u8(odd, odd_top)),
                    vreinterpretq_f32_u8(vtrn2q_u8(even, even_top)),
                    vreinterpretq_f32_u8(vtrn2q_u8(odd, odd_top)),
                ]
            } else {
                let lowest = vld1q_u8(const { value_bytes(&T::VALUES, 0) }.as_ptr());
                let second = vld1q_u8(const { value_bytes(&T::VALUES, 8) }.as_ptr());
                // Both codes of a half are needed in both halves: the lower bytes of their values go into the lower.
                let both = vreinterpretq_u8_u32(vorrq_u32(
                    vreinterpretq_u32_u8(upper),
                    vandq_u32(codes, vdupq_n_u32(0xFFFF)),
                ));
                let upper_half = vreinterpretq_u8_u32(vdupq_n_u32(0xFFFF_0000));
                let (even, odd) = (vandq_u8(both, vdupq_n_u8(15)), vshrq_n_u8::<4>(both));
                let (even, even_high) = (
                    vbslq_u8(upper_half, vqtbl1q_u8(third, even), vqtbl1q_u8(lowest, even)),
                    vbslq_u8(upper_half, vqtbl1q_u8(top, even), vqtbl1q_u8(second, even)),
                );
                let (odd, odd_high) = (
                    vbslq_u8(upper_half, vqtbl1q_u8(third, odd), vqtbl1q_u8(lowest, odd)),
                    vbslq_u8(upper_half, vqtbl1q_u8(top, odd), vqtbl1q_u8(second, odd)),
                );
                [
                    vreinterpretq_f32_u8(vtrn1q_u8(even, even_high)),
                    vreinterpretq_f32_u8(vtrn1q_u8(odd, odd_high)),
                    vreinterpretq_f32_u8(vtrn2q_u8(even, even_high)),
                    vreinterpretq_f32_u8(vtrn2q_u8(odd, odd_high)),
                ]
            }
        }
    }
    #[inline(always)]
    unsafe fn e4m3(codes: Self::U) -> [Self::F; 4] {
        unsafe {
            // Each code at the top of its lane; the bits below it are masked later.
            let at_top = [vshlq_n_u32::<24>(codes), vshlq_n_u32::<16>(codes), vshlq_n_u32::<8>(codes), codes];
            each!(at_top, |code| {
                // The sign stays, exponent and mantissa land on f32's, of which four bits of exponent more
                // are zero: a number, possibly subnormal, that 2^120 (the difference of the biases) scales
                // exactly. What would be 480 is NaN.
                let placed = vreinterpretq_u32_s32(vshrq_n_s32::<4>(vreinterpretq_s32_u32(code)));
                let tiny = vreinterpretq_f32_u32(vandq_u32(placed, vdupq_n_u32(0x87F0_0000)));
                let value = vmulq_f32(tiny, vdupq_n_f32(f32::from_bits((127 + 120) << 23)));
                let is_nan = vcagtq_f32(value, vdupq_n_f32(448.0));
                vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(value), is_nan))
            })
        }
    }
    #[inline(always)]
    unsafe fn int8(codes: Self::U) -> [Self::F; 4] {
        unsafe {
            // Each code at the top of its lane, from where it comes down with its sign.
            let codes = vreinterpretq_s32_u32(codes);
            let at_top = [vshlq_n_s32::<24>(codes), vshlq_n_s32::<16>(codes), vshlq_n_s32::<8>(codes), codes];
            each!(at_top, |code| vcvtq_f32_s32(vshrq_n_s32::<24>(code)))
        }
    }
}
