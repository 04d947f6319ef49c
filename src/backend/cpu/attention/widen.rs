//! Keys and values of a block in f32.

use super::super::isa::Simd;
use super::operand::{Bf16, Numbers, F16, F32};
use crate::tensor::{KvFormat, KvLayout, KvPlane, KV_BLOCK};

/// Writes the keys of a block, `[head_dim][64]`.
///
/// # Safety
/// As [`Simd`].
#[inline(always)]
pub(super) unsafe fn widen_keys<S: Simd>(plane: &KvPlane, layout: &KvLayout, dim: usize, out: &mut [f32]) {
    // SAFETY: the caller vouches for the features.
    unsafe { widen::<S>(plane, layout, (dim, KV_BLOCK), out) }
}

/// Writes the values of a block, `[64][padded head_dim]`.
///
/// # Safety
/// As [`Simd`].
#[inline(always)]
pub(super) unsafe fn widen_values<S: Simd>(plane: &KvPlane, layout: &KvLayout, dim: usize, out: &mut [f32]) {
    // SAFETY: the caller vouches for the features.
    unsafe { widen::<S>(plane, layout, (KV_BLOCK, KvLayout::padded(dim)), out) }
}

#[inline(always)]
unsafe fn widen<S: Simd>(plane: &KvPlane, layout: &KvLayout, shape: (usize, usize), out: &mut [f32]) {
    // SAFETY: the caller vouches for the features.
    unsafe {
        match layout.format {
            KvFormat::F16 => widen_floats::<S, F16>(plane, layout, shape, out),
            KvFormat::Bf16 => widen_floats::<S, Bf16>(plane, layout, shape, out),
            KvFormat::F32 | KvFormat::Affine8 | KvFormat::Affine4 => {
                widen_floats::<S, F32>(plane, layout, shape, out)
            }
        }
    }
}

/// Widens rows of floats.
///
/// # Safety
/// As [`Simd`].
#[inline(always)]
unsafe fn widen_floats<S: Simd, N: Numbers>(
    plane: &KvPlane,
    layout: &KvLayout,
    (rows, columns): (usize, usize),
    out: &mut [f32],
) {
    let rows_of_codes = plane.codes().chunks_exact(layout.row_bytes).take(rows);
    for (codes, out) in rows_of_codes.zip(out.chunks_exact_mut(columns)) {
        for element in (0..columns).step_by(S::LANES) {
            // SAFETY: a row has `columns` numbers, which are whole vectors; the caller vouches for the features.
            unsafe { S::store(out.as_mut_ptr().add(element), N::load::<S>(codes.as_ptr(), element)) };
        }
    }
}
