//! Plain Rust on arrays: for CPUs without a file of their own, and as a check on those with one.

#![allow(clippy::undocumented_unsafe_blocks)] // Each block wraps instructions under the conditions of `Simd`.

use super::{Simd, Table16};
use crate::format::Element;
use half::f16;

/// Needs no proof: every CPU runs it.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend::cpu) struct Portable;

const LANES: usize = 8;

/// The four codes of each lane, through `value`.
#[inline(always)]
fn codes_to_values<const BITS: usize>(codes: [u32; LANES], value: impl Fn(u32) -> f32) -> [[f32; LANES]; 4] {
    std::array::from_fn(|i| codes.map(|lane| value((lane >> (BITS * i)) & ((1 << BITS) - 1))))
}

// SAFETY (all `unsafe` below): functions read and write what `Simd` says, for which its callers' pointers are valid.
impl Simd for Portable {
    type F = [f32; LANES];
    type U = [u32; LANES];
    const LANES: usize = LANES;

    const MAX_M_OF_PAIRS: usize = 0;
    const TILE: (usize, usize) = (2, 2);

    #[inline(always)]
    unsafe fn zero() -> Self::F {
        [0.0; LANES]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::F {
        unsafe { from.cast::<Self::F>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Self::F) {
        unsafe { to.cast::<Self::F>().write_unaligned(value) }
    }
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::F {
        [value; LANES]
    }
    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        std::array::from_fn(|l| a[l] + b[l])
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        std::array::from_fn(|l| a[l] * b[l])
    }
    #[inline(always)]
    unsafe fn mul_add(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        std::array::from_fn(|l| a[l] * b[l] + c[l])
    }
    #[inline(always)]
    unsafe fn sum(value: Self::F) -> f32 {
        let [a, b, c, d, e, f, g, h] = value;
        ((a + e) + (c + g)) + ((b + f) + (d + h))
    }
    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        std::array::from_fn(|l| if a[l] > b[l] { a[l] } else { b[l] })
    }
    #[inline(always)]
    unsafe fn largest(value: Self::F) -> f32 {
        value.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        std::array::from_fn(|l| a[l] - b[l])
    }
    #[inline(always)]
    unsafe fn low_bits_as_power(value: Self::F) -> Self::F {
        value.map(|value| f32::from_bits(value.to_bits() << 23))
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self::F {
        let bits: [u16; LANES] = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        bits.map(|bits| f16::from_bits(bits).to_f32_const())
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self::F {
        let bits: [u16; LANES] = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        bits.map(|bits| f32::from_bits(u32::from(bits) << 16))
    }
    #[inline(always)]
    unsafe fn load_bytes(from: *const u8) -> Self::F {
        let bytes: [u8; LANES] = unsafe { from.cast::<[u8; LANES]>().read() };
        bytes.map(f32::from)
    }
    #[inline(always)]
    unsafe fn load_nibbles(from: *const u8, shift: u32) -> Self::F {
        let bytes: [u8; LANES] = unsafe { from.cast::<[u8; LANES]>().read() };
        bytes.map(|byte| f32::from(byte >> shift & 15))
    }
    #[inline(always)]
    unsafe fn prefetch(_address: *const u8) {}

    #[inline(always)]
    unsafe fn load_codes<const BITS: usize>(from: *const u8) -> Self::U {
        let mut bytes = [0u8; LANES * 4 + 8];
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), BITS * LANES / 2) };
        std::array::from_fn(|l| {
            let bit = 4 * BITS * l;
            let window = std::array::from_fn(|i| bytes[bit / 8 + i]);
            (u64::from_le_bytes(window) >> (bit % 8)) as u32
        })
    }
    #[inline(always)]
    unsafe fn broadcast<const LANES_PER_GROUP: usize>(from: *const f32) -> Self::F {
        std::array::from_fn(|l| unsafe { *from.add(l / LANES_PER_GROUP) })
    }

    #[inline(always)]
    unsafe fn affine<const BITS: usize, const LANES_PER_GROUP: usize>(
        codes: Self::U,
        scale: Self::F,
        bias: Self::F,
    ) -> [Self::F; 4] {
        let values = codes_to_values::<BITS>(codes, |code| code as f32);
        values.map(|value| std::array::from_fn(|l| value[l] * scale[l] + bias[l]))
    }
    #[inline(always)]
    unsafe fn lookup16<T: Table16>(codes: Self::U) -> [Self::F; 4] {
        let value = |code| T::VALUES[code as usize & 15];
        match T::BITS {
            1 => codes_to_values::<1>(codes, value),
            2 => codes_to_values::<2>(codes, value),
            3 => codes_to_values::<3>(codes, value),
            _ => codes_to_values::<4>(codes, value),
        }
    }
    #[inline(always)]
    unsafe fn e4m3(codes: Self::U) -> [Self::F; 4] {
        codes_to_values::<8>(codes, |code| Element::E4m3.value(code as u8))
    }
    #[inline(always)]
    unsafe fn int8(codes: Self::U) -> [Self::F; 4] {
        codes_to_values::<8>(codes, |code| f32::from(code as i8))
    }
}
