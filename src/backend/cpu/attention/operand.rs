//! The right operand of a product: a matrix of numbers in one of the floats of a cache.

use super::super::isa::Simd;
use crate::tensor::KvFormat;

/// Numbers as f32 vectors.
pub(super) trait Numbers {
    /// Reads `LANES` numbers from element `element` of a row on.
    ///
    /// # Safety
    /// As [`Simd`]; the row has so many elements.
    unsafe fn load<S: Simd>(row: *const u8, element: usize) -> S::F;
}

pub(super) struct F32;
pub(super) struct F16;
pub(super) struct Bf16;

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

/// The floats that a product reads as they are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Float {
    F32,
    F16,
    Bf16,
}

impl Float {
    pub(super) fn of(format: KvFormat) -> Option<Self> {
        match format {
            KvFormat::F32 => Some(Self::F32),
            KvFormat::F16 => Some(Self::F16),
            KvFormat::Bf16 => Some(Self::Bf16),
            KvFormat::Affine8 | KvFormat::Affine4 => None,
        }
    }
}

/// Rows of floats, `row_bytes` apart.
#[derive(Clone, Copy)]
pub(super) struct Operand {
    pub(super) float: Float,
    pub(super) start: *const u8,
    pub(super) row_bytes: usize,
}
