//! Keys and values of a block in f32.

use super::super::isa::Simd;
use super::operand::Numbers;
use crate::tensor::{KvLayout, KvPlane, KV_BLOCK};

/// Which of the two a plane is: groups of keys lie along columns, those of values along rows.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Kind {
    /// `[head_dim][64]`.
    Keys,
    /// `[64][padded head_dim]`.
    Values,
}

impl Kind {
    /// Rows and columns of a plane in f32.
    pub(super) fn shape(self, dim: usize) -> (usize, usize) {
        match self {
            Self::Keys => (dim, KV_BLOCK),
            Self::Values => (KV_BLOCK, KvLayout::padded(dim)),
        }
    }
}

/// Writes a plane in f32; it has numbers `N`.
///
/// # Safety
/// As [`Simd`].
#[inline(always)]
pub(super) unsafe fn widen<S: Simd, N: Numbers>(
    plane: &KvPlane,
    layout: &KvLayout,
    kind: Kind,
    dim: usize,
    out: &mut [f32],
) {
    let (rows, columns) = kind.shape(dim);
    let (scales, biases) = plane.groups(layout);
    let group = |element: usize| layout.format.group_size().map(|size| element / size);
    let rows_of_codes = plane.codes().chunks_exact(layout.row_bytes).take(rows);
    for (row, (codes, out)) in rows_of_codes.zip(out.chunks_exact_mut(columns)).enumerate() {
        for element in (0..columns).step_by(S::LANES) {
            // The group, and where its scale is: one for each key of a row of keys, one for all values of a row.
            let place = match kind {
                Kind::Keys => group(row).map(|group| group * KV_BLOCK + element),
                Kind::Values => group(element).map(|group| group * KV_BLOCK + row),
            };
            // SAFETY: a row has `columns` codes, which are whole vectors, and so many keys have scales; the caller vouches
            // for the features.
            unsafe {
                let mut numbers = N::load::<S>(codes.as_ptr(), element);
                if let Some(place) = place {
                    let (scale, bias) = match kind {
                        Kind::Keys => {
                            let (scales, biases) =
                                (&scales[place..][..S::LANES], &biases[place..][..S::LANES]);
                            (S::load_f16(scales.as_ptr().cast()), S::load_f16(biases.as_ptr().cast()))
                        }
                        Kind::Values => {
                            let number = |groups: &[half::f16]| S::splat(groups[place].to_f32_const());
                            (number(scales), number(biases))
                        }
                    };
                    numbers = S::mul_add(numbers, scale, bias);
                }
                S::store(out.as_mut_ptr().add(element), numbers);
            }
        }
    }
}
