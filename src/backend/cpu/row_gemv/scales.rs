//! A row's scales and biases as f32, prepared for the kernels of one row of x.

use super::super::isa::avx512::Avx512;
use super::super::matrix::{GroupValues, PackedMatrix};
pub(in super::super) use super::stored::Stored;
use super::stored::{Counted, E4m3, E8m0, Nothing, E4M3_FACTOR};
use super::LANES;
use crate::format::{Scale, ZeroPoint, SUPER_BLOCK};
use half::f16;
use std::arch::x86_64::*;

/// What sixteen groups of activations contribute.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(in super::super) struct GroupActivations {
    /// Multipliers of scales, unless these are E8M0; 0 where there is no group.
    pub(in super::super) units: [f32; LANES],
    /// Sums of the activations, which biases are multiplied by.
    pub(in super::super) sums: [f32; LANES],
}

/// What scales and biases are multiplied by.
pub(in super::super) struct Scaling<'a> {
    /// Numbers that a row fills: [`LANES`] partial sums of the bias term, one scale for each group, and zeros. Kernels
    /// may read up to sixteen of the zeros.
    pub(in super::super) stride: usize,
    /// Empty where scales stay as they are.
    groups: &'a [GroupActivations],
    /// The zero point that biases absorb.
    center: f32,
}

impl<'a> Scaling<'a> {
    /// Multiplies scales, unless they are E8M0, by units; and biases, to which `center *` their scales are added, by
    /// sums.
    pub(in super::super) fn by_groups(groups: &'a [GroupActivations], center: f32) -> Self {
        Self { stride: LANES * (1 + groups.len()), groups, center }
    }

    /// Leaves scales as they are, with room for so many groups and zeros behind them to a multiple of sixteen.
    pub(in super::super) fn none(groups_per_row: usize) -> Self {
        Self { stride: LANES + groups_per_row.next_multiple_of(LANES), groups: &[], center: 0. }
    }
}

/// Prepares scales and biases of the rows from `first_row` on, as many as `scaled` has room for. Zeros behind the last
/// sixteen groups are left as they are. `units` is for what those of super-blocks count.
pub(super) fn scale_rows(
    _isa: Avx512,
    of: (&PackedMatrix, usize),
    scaling: &Scaling,
    scaled: &mut [f32],
    units: &mut [f32],
) {
    // SAFETY: `_isa` proves that the CPU has the features of the function.
    unsafe { scale_rows_avx512(of, scaling, scaled, units) }
}

/// See [`scale_rows`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn scale_rows_avx512(
    (matrix, first_row): (&PackedMatrix, usize),
    scaling: &Scaling,
    scaled: &mut [f32],
    units: &mut [f32],
) {
    let rows = scaled.len() / scaling.stride;
    with_stored(matrix, (first_row, rows), units, Prepare { matrix, scaling, scaled });
}

/// What [`scale_rows`] makes of stored scales and biases.
struct Prepare<'a> {
    matrix: &'a PackedMatrix<'a>,
    scaling: &'a Scaling<'a>,
    scaled: &'a mut [f32],
}

impl WithStored for Prepare<'_> {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn call<S: Stored, B: Stored>(self, scales: S, biases: B) {
        let Self { matrix, scaling, scaled } = self;
        let groups = matrix.groups_per_row();
        if scaling.groups.is_empty() {
            return widen_all((scales, groups), scaling, scaled);
        }
        let midpoint = match matrix.format.zero_point() {
            ZeroPoint::Midpoint => matrix.format.midpoint(),
            ZeroPoint::Bias | ZeroPoint::None => 0.,
        };
        scale_all((scales, groups), (biases, scaling.center - midpoint), scaling, scaled);
    }
}

/// What is done with scales and biases as they are stored.
pub(in super::super) trait WithStored {
    /// Biases are as many as scales, or [`Nothing`].
    ///
    /// # Safety
    /// The CPU has AVX-512 (F, BW, DQ, VL), and the caller enables it. What else an implementation uses, `self` proves.
    unsafe fn call<S: Stored, B: Stored>(self, scales: S, biases: B);
}

/// Calls `what` with scales and biases of so many rows from the first on. `units` is for what those of super-blocks count, one
/// for each of the rows' super-blocks, twice.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(in super::super) fn with_stored<'a>(
    matrix: &PackedMatrix<'a>,
    (first_row, rows): (usize, usize),
    units: &mut [f32],
    what: impl WithStored,
) {
    let groups = matrix.groups_per_row();
    let part = |values: GroupValues<'a>| values.slice(first_row * groups, rows * groups);
    let (scales, biases) = (part(matrix.scales), matrix.biases.map(part));
    // SAFETY: the features are enabled.
    unsafe {
        match scales {
            GroupValues::Byte(scales) => match (matrix.format.scale(), matrix.super_blocks) {
                (Scale::E8m0, _) => what.call(E8m0(scales), Nothing),
                (Scale::SuperBlock, Some(of)) => {
                    let (group_size, blocks) = (matrix.format.group_size(), matrix.k / SUPER_BLOCK);
                    let (of_scales, of_biases) = units.split_at_mut(units.len() / 2);
                    let of_rows =
                        |of: &'a [f16]| of.get(first_row * blocks..).and_then(|of| of.get(..rows * blocks));
                    let units = widened(of_rows(of.scales).unwrap_or_default(), of_scales);
                    let scales = Counted::new(scales, units, group_size);
                    match biases {
                        Some(GroupValues::Byte(biases)) => {
                            let units = widened(of_rows(of.biases).unwrap_or_default(), of_biases);
                            what.call(scales, Counted::new(biases, units, group_size));
                        }
                        _ => what.call(scales, Nothing),
                    }
                }
                // Float scales are no bytes.
                (Scale::E4m3 | Scale::Float | Scale::SuperBlock, _) => what.call(E4m3(scales), Nothing),
            },
            GroupValues::F16(scales) => with_biases(scales, biases, what),
            GroupValues::Bf16(scales) => with_biases(scales, biases, what),
            GroupValues::F32(scales) => with_biases(scales, biases, what),
        }
    }
}

/// See [`with_stored`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn with_biases<S: Stored>(scales: S, biases: Option<GroupValues>, what: impl WithStored) {
    // SAFETY: the features are enabled.
    unsafe {
        match biases {
            Some(GroupValues::F16(biases)) => what.call(scales, biases),
            Some(GroupValues::Bf16(biases)) => what.call(scales, biases),
            Some(GroupValues::F32(biases)) => what.call(scales, biases),
            // There are no biases of bytes beside float scales.
            Some(GroupValues::Byte(_)) | None => what.call(scales, Nothing),
        }
    }
}

/// Numbers as f32, in `to`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn widened<'a>(numbers: &[f16], to: &'a mut [f32]) -> &'a [f32] {
    let to = &mut to[..numbers.len()];
    for first in (0..numbers.len()).step_by(LANES) {
        let mask = u16::MAX >> (LANES - (numbers.len() - first).min(LANES));
        // SAFETY: both have the numbers in the mask.
        unsafe { _mm512_mask_storeu_ps(to.as_mut_ptr().add(first), mask, numbers.load(mask, first)) };
    }
    to
}

/// The multiplier that all outputs have left. Sums have to be finite before it.
pub(in super::super) fn output_multiplier(matrix: &PackedMatrix) -> f32 {
    match matrix.format.scale() {
        Scale::E4m3 => E4M3_FACTOR * matrix.global_scale,
        Scale::E8m0 | Scale::Float | Scale::SuperBlock => matrix.global_scale,
    }
}

/// See [`scale_rows`]: `scales` are those of all rows, with so many groups in each. Biases are as many or [`Nothing`];
/// `center *` their scales are added to them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn scale_all<S: Stored, B: Stored>(
    (scales, groups): (S, usize),
    (biases, center): (B, f32),
    scaling: &Scaling,
    scaled: &mut [f32],
) {
    let stride = scaling.stride;
    let rows = scaled.len() / stride;
    assert!(scales.count() == rows * groups && (!B::ANY || biases.count() == rows * groups));
    assert!(LANES + groups.next_multiple_of(LANES) <= stride);
    assert!(scaling.groups.len() * LANES >= groups);
    let center = _mm512_set1_ps(center);
    let whole = groups / LANES * LANES;
    for row in 0..rows {
        // SAFETY: the assertions: each row has `groups` scales and biases, or no biases; its part of `scaled` has room for
        // whole vectors of them behind the first; and `scaling` has all groups.
        unsafe {
            let at = row * groups;
            let to = scaled.as_mut_ptr().add(row * stride);
            let group = |first| scaling.groups.as_ptr().wrapping_add(first / LANES);
            let mut total = _mm512_setzero_ps();
            for first in (0..whole).step_by(LANES) {
                scale_sixteen((scales, biases, at), first, !0, (center, group(first)), to, &mut total);
            }
            if whole < groups {
                let mask = (1 << (groups - whole)) - 1;
                scale_sixteen((scales, biases, at), whole, mask, (center, group(whole)), to, &mut total);
            }
            _mm512_storeu_ps(to, total);
        }
    }
}

/// See [`scale_rows`]: scales stay as they are, E8M0 bytes or floats.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn widen_all<S: Stored>((scales, groups): (S, usize), scaling: &Scaling, scaled: &mut [f32]) {
    let rows = scaled.len() / scaling.stride;
    assert!(scales.count() == rows * groups && LANES + groups.next_multiple_of(LANES) <= scaling.stride);
    for (row, scaled) in scaled.chunks_exact_mut(scaling.stride).enumerate() {
        for first in (0..groups).step_by(LANES) {
            let mask = u16::MAX >> (LANES - (groups - first).min(LANES));
            // SAFETY: the assertion: the row has the scales in the mask, and room for whole vectors behind the first.
            unsafe {
                let sixteen = scales.load(mask, row * groups + first);
                _mm512_storeu_ps(scaled.as_mut_ptr().add(LANES + first), sixteen);
            }
        }
    }
}

/// Sixteen groups from `first` on of the row whose groups begin `at`, of which the mask selects those that exist.
///
/// # Safety
/// Scales and, unless they are [`Nothing`], biases are valid for the groups in the mask; `to` has room behind the first
/// [`LANES`] for sixteen from `first` on; `groups` is valid unless scales are E8M0.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn scale_sixteen<S: Stored, B: Stored>(
    (scales, biases, at): (S, B, usize),
    first: usize,
    mask: u16,
    (center, groups): (__m512, *const GroupActivations),
    to: *mut f32,
    total: &mut __m512,
) {
    // SAFETY: the mask keeps reads to what is valid; the caller vouches for `to` and `groups`.
    unsafe {
        let scale = scales.load(mask, at + first);
        let mut scaled = scale;
        if !S::IS_EXPONENT {
            scaled = _mm512_mul_ps(scale, _mm512_loadu_ps((*groups).units.as_ptr()));
        }
        _mm512_storeu_ps(to.add(LANES + first), scaled);
        if S::HAS_BIASES {
            let bias = biases.load(mask, at + first);
            let bias = _mm512_fmadd_ps(center, scale, bias);
            *total = _mm512_fmadd_ps(bias, _mm512_loadu_ps((*groups).sums.as_ptr()), *total);
        }
    }
}
