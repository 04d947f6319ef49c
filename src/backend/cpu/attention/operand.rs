//! The right operand of a product: a matrix of numbers or codes, as a cache holds them.

use super::super::isa::Simd;
use crate::tensor::KvFormat;

/// Numbers or codes as f32 vectors.
pub(in super::super) trait Numbers {
    /// Reads `LANES` numbers from element `element` of a row on, which is a multiple of `LANES`.
    ///
    /// # Safety
    /// As [`Simd`]; the row has so many elements.
    unsafe fn load<S: Simd>(row: *const u8, element: usize) -> S::F;
}

pub(in super::super) struct F32;
pub(in super::super) struct F16;
pub(in super::super) struct Bf16;
/// Bytes.
pub(super) struct Codes8;
/// Each 16 bytes hold 32 codes: the low halves the first 16 of them, the high halves the others.
pub(super) struct Codes4;

impl Numbers for F32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(row: *const u8, element: usize) -> S::F {
        // SAFETY: the caller vouches for the elements and the features.
        unsafe { S::load(row.cast::<f32>().add(element)) }
    }
}

impl Numbers for F16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(row: *const u8, element: usize) -> S::F {
        // SAFETY: the caller vouches for the elements and the features.
        unsafe { S::load_f16(row.cast::<u16>().add(element)) }
    }
}

impl Numbers for Bf16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(row: *const u8, element: usize) -> S::F {
        // SAFETY: the caller vouches for the elements and the features.
        unsafe { S::load_bf16(row.cast::<u16>().add(element)) }
    }
}

impl Numbers for Codes8 {
    #[inline(always)]
    unsafe fn load<S: Simd>(row: *const u8, element: usize) -> S::F {
        // SAFETY: the caller vouches for the elements and the features.
        unsafe { S::load_bytes(row.add(element)) }
    }
}

impl Numbers for Codes4 {
    #[inline(always)]
    unsafe fn load<S: Simd>(row: *const u8, element: usize) -> S::F {
        let (half, within) = (element / 16 % 2, element % 16);
        // SAFETY: the caller vouches for the elements and the features. No vector crosses 16 codes: lanes divide 16.
        unsafe { S::load_nibbles(row.add(element / 32 * 16 + within), 4 * half as u32) }
    }
}

/// Rows of numbers or codes, `row_bytes` apart.
#[derive(Clone, Copy)]
pub(super) struct Operand {
    pub(super) format: KvFormat,
    pub(super) start: *const u8,
    pub(super) row_bytes: usize,
}
