//! Packed codes as signed bytes, relative to their center.

#![allow(clippy::needless_range_loop)] // Loops of constant length over arrays that have to stay in registers.

use super::super::super::isa::{neon::Neon, Simd};
use super::super::codes::{center, doubled};
use super::super::tables::{signed_table, AFFINE};
use std::arch::aarch64::*;

/// A block of codes as the integers that [`IntegerCodes`] says, less their center, of which `VECTORS` vectors become: of 1, 2
/// and 4 bits, byte j of vector v is code `j * VECTORS + v`, else code `16 * v + j`.
///
/// [`IntegerCodes`]: super::super::codes::IntegerCodes
///
/// # Safety
/// The block has `2 * VECTORS * BITS` bytes.
#[inline]
#[target_feature(enable = "neon")]
pub(in super::super) unsafe fn load_block<const BITS: usize, const VECTORS: usize, const KIND: u8>(
    from: *const u8,
) -> [int8x16_t; VECTORS] {
    let mut integers = [vdupq_n_s8(0); VECTORS];
    let mask = vdupq_n_u8(((1u32 << BITS) - 1) as u8);
    for vector in 0..VECTORS {
        // SAFETY: the caller vouches for the bytes of the block, of which each vector of the second kind has its own part; a table
        // has the bytes of a vector.
        unsafe {
            let codes = match BITS {
                1 | 2 | 4 => {
                    let right = vdupq_n_s8(-((vector * BITS) as i8));
                    vandq_u8(vshlq_u8(vld1q_u8(from), right), mask)
                }
                8 => vld1q_u8(from.add(16 * vector)),
                _ => spread::<BITS>(Neon::load_codes::<BITS>(from.add(2 * BITS * vector))),
            };
            integers[vector] = match KIND {
                AFFINE => {
                    let codes = if doubled(BITS) { vaddq_u8(codes, codes) } else { codes };
                    // Below zero, it is the byte of the signed number.
                    vreinterpretq_s8_u8(vsubq_u8(codes, vdupq_n_u8(const { center(BITS) as u8 })))
                }
                _ => vqtbl1q_s8(vld1q_s8(const { signed_table(KIND) }.as_ptr()), codes),
            };
        }
    }
    integers
}

/// The four codes in the low bits of each lane as its four bytes.
#[inline]
#[target_feature(enable = "neon")]
fn spread<const BITS: usize>(lanes: uint32x4_t) -> uint8x16_t {
    let (pair, one) = ((1u32 << (2 * BITS)) - 1, (1u32 << BITS) - 1);
    let left = |lanes, bits: usize| vshlq_u32(lanes, vdupq_n_s32(bits as i32));
    // Two codes in each half of a lane, then one in each quarter.
    let upper = vandq_u32(left(lanes, 16 - 2 * BITS), vdupq_n_u32(pair << 16));
    let pairs = vorrq_u32(vandq_u32(lanes, vdupq_n_u32(pair)), upper);
    let one = one | one << 16;
    let upper = vandq_u32(left(pairs, 8 - BITS), vdupq_n_u32(one << 8));
    vreinterpretq_u8_u32(vorrq_u32(vandq_u32(pairs, vdupq_n_u32(one)), upper))
}
