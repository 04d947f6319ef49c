//! A row's scales and biases as f32, prepared for the kernels of one row of x.

use super::super::group_params::ROWS_PER_PASS;
use super::super::isa::avx512::Avx512;
use super::super::matrix::{GroupValues, PackedMatrix};
use super::LANES;
use crate::format::{Scale, ZeroPoint};
use half::{bf16, f16};
use std::arch::x86_64::*;

/// How many passes ahead scales and biases are fetched: a pass has few bytes of them.
const PASSES_AHEAD: usize = 4;

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
    /// Empty, or not used, where scales stay as they are.
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
/// sixteen groups are left as they are.
pub(super) fn scale_rows(
    _isa: Avx512,
    matrix: &PackedMatrix,
    first_row: usize,
    scaling: &Scaling,
    scaled: &mut [f32],
) {
    // SAFETY: `_isa` proves that the CPU has the features of the function.
    unsafe { scale_rows_avx512(matrix, first_row, scaling, scaled) }
}

/// See [`scale_rows`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn scale_rows_avx512<'a>(matrix: &PackedMatrix<'a>, first_row: usize, scaling: &Scaling, scaled: &mut [f32]) {
    let groups = matrix.groups_per_row();
    let rows = scaled.len() / scaling.stride;
    let part = |values: GroupValues<'a>| values.slice(first_row * groups, rows * groups);
    let (scales, biases) = (part(matrix.scales), matrix.biases.map(part));
    match scales {
        GroupValues::Byte(scales) => match matrix.format.scale() {
            Scale::E8m0 => scale_all::<E8m0, Nothing>((scales, groups), (&[], 0.), scaling, scaled),
            // Float scales are no bytes.
            Scale::E4m3 | Scale::Float => {
                scale_all::<E4m3, Nothing>((scales, groups), (&[], 0.), scaling, scaled)
            }
        },
        GroupValues::F16(scales) => with_biases::<f16>(matrix, (scales, groups), biases, scaling, scaled),
        GroupValues::Bf16(scales) => with_biases::<bf16>(matrix, (scales, groups), biases, scaling, scaled),
        GroupValues::F32(scales) => with_biases::<f32>(matrix, (scales, groups), biases, scaling, scaled),
    }
}

/// The multiplier that all outputs have left. Sums have to be finite before it.
pub(in super::super) fn output_multiplier(matrix: &PackedMatrix) -> f32 {
    match matrix.format.scale() {
        Scale::E4m3 => E4M3_FACTOR * matrix.global_scale,
        Scale::E8m0 | Scale::Float => matrix.global_scale,
    }
}

/// See [`scale_rows`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn with_biases<S: Stored>(
    matrix: &PackedMatrix,
    scales: (&[S::Value], usize),
    biases: Option<GroupValues>,
    scaling: &Scaling,
    scaled: &mut [f32],
) {
    let center = scaling.center;
    match biases {
        Some(GroupValues::F16(biases)) => scale_all::<S, f16>(scales, (biases, center), scaling, scaled),
        Some(GroupValues::Bf16(biases)) => scale_all::<S, bf16>(scales, (biases, center), scaling, scaled),
        Some(GroupValues::F32(biases)) => scale_all::<S, f32>(scales, (biases, center), scaling, scaled),
        // There are no biases of bytes.
        Some(GroupValues::Byte(_)) | None => {
            let midpoint = match matrix.format.zero_point() {
                ZeroPoint::Midpoint => matrix.format.midpoint(),
                ZeroPoint::Bias | ZeroPoint::None => 0.,
            };
            scale_all::<S, Nothing>(scales, (&[], center - midpoint), scaling, scaled)
        }
    }
}

/// See [`scale_rows`]: `scales` are those of all rows, with so many groups in each. Biases are as many or [`Nothing`];
/// `center *` their scales are added to them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn scale_all<S: Stored, B: Stored>(
    (scales, groups): (&[S::Value], usize),
    (biases, center): (&[B::Value], f32),
    scaling: &Scaling,
    scaled: &mut [f32],
) {
    let stride = scaling.stride;
    let rows = scaled.len() / stride;
    assert!(scales.len() == rows * groups && biases.len() == if B::ANY { scales.len() } else { 0 });
    assert!(LANES + groups.next_multiple_of(LANES) <= stride);
    assert!(S::IS_EXPONENT && !S::HAS_BIASES || scaling.groups.len() * LANES >= groups);
    let center = _mm512_set1_ps(center);
    let whole = groups / LANES * LANES;
    for row in 0..rows {
        // SAFETY: the assertions: each row has `groups` scales and biases, or no biases; its part of `scaled` has room for
        // whole vectors of them behind the first; and unless scales are E8M0, `scaling` has all groups.
        unsafe {
            let from = (scales.as_ptr().add(row * groups), biases.as_ptr().wrapping_add(row * groups));
            let to = scaled.as_mut_ptr().add(row * stride);
            let group = |first| scaling.groups.as_ptr().wrapping_add(first / LANES);
            let mut total = _mm512_setzero_ps();
            prefetch_row(from.0.wrapping_add(PASSES_AHEAD * ROWS_PER_PASS * groups), groups);
            prefetch_row(from.1.wrapping_add(PASSES_AHEAD * ROWS_PER_PASS * groups), groups);
            for first in (0..whole).step_by(LANES) {
                scale_sixteen::<S, B>(from, first, !0, (center, group(first)), to, &mut total);
            }
            if whole < groups {
                let mask = (1 << (groups - whole)) - 1;
                scale_sixteen::<S, B>(from, whole, mask, (center, group(whole)), to, &mut total);
            }
            _mm512_storeu_ps(to, total);
        }
    }
}

/// Sixteen groups of a row from `first` on, of which the mask selects those that exist.
///
/// # Safety
/// Scales and, unless they are [`Nothing`], biases are valid for the groups in the mask; `to` has room behind the first
/// [`LANES`] for sixteen from `first` on; `groups` is valid unless scales are E8M0.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn scale_sixteen<S: Stored, B: Stored>(
    (scales, biases): (*const S::Value, *const B::Value),
    first: usize,
    mask: u16,
    (center, groups): (__m512, *const GroupActivations),
    to: *mut f32,
    total: &mut __m512,
) {
    // SAFETY: the mask keeps reads to what is valid; the caller vouches for `to` and `groups`.
    unsafe {
        let scale = S::load(mask, scales.wrapping_add(first));
        let mut scaled = scale;
        if !S::IS_EXPONENT {
            scaled = _mm512_mul_ps(scale, _mm512_loadu_ps((*groups).units.as_ptr()));
        }
        _mm512_storeu_ps(to.add(LANES + first), scaled);
        if S::HAS_BIASES {
            let bias = B::load(mask, biases.wrapping_add(first));
            let bias = _mm512_fmadd_ps(center, scale, bias);
            *total = _mm512_fmadd_ps(bias, _mm512_loadu_ps((*groups).sums.as_ptr()), *total);
        }
    }
}

/// Prefetches the `count` values of a row.
#[inline(always)]
fn prefetch_row<T>(values: *const T, count: usize) {
    for byte in (0..count * size_of::<T>()).step_by(64) {
        // SAFETY: a prefetch of any address is harmless: it neither faults nor changes what a program sees.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(values.cast::<i8>().wrapping_add(byte)) };
    }
}

/// A type in which scales or biases are stored.
trait Stored {
    type Value: Copy;
    /// False for [`Nothing`] alone.
    const ANY: bool = true;
    /// Whether formats with such scales have biases.
    const HAS_BIASES: bool = true;
    /// Whether such scales have any exponent that f32 has: they are not multiplied by units, lest they leave f32.
    const IS_EXPONENT: bool = false;

    /// Sixteen numbers as f32, exactly; zeros where the mask has none.
    ///
    /// # Safety
    /// `from` is valid for the numbers in the mask; the CPU has AVX-512 (F, BW, DQ, VL), and the caller enables it.
    unsafe fn load(mask: u16, from: *const Self::Value) -> __m512;
}

/// No biases.
struct Nothing;

impl Stored for Nothing {
    type Value = ();
    const ANY: bool = false;
    #[inline(always)]
    unsafe fn load(_mask: u16, _from: *const ()) -> __m512 {
        // SAFETY: only the numbers in the mask are read, for which the caller vouches; it enables the features, too.
        unsafe { _mm512_setzero_ps() }
    }
}

impl Stored for f16 {
    type Value = Self;
    #[inline(always)]
    unsafe fn load(mask: u16, from: *const Self) -> __m512 {
        // SAFETY: only the numbers in the mask are read, for which the caller vouches; it enables the features, too.
        unsafe { _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, from.cast())) }
    }
}

impl Stored for bf16 {
    type Value = Self;
    #[inline(always)]
    unsafe fn load(mask: u16, from: *const Self) -> __m512 {
        // SAFETY: only the numbers in the mask are read, for which the caller vouches; it enables the features, too.
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }
}

impl Stored for f32 {
    type Value = Self;
    #[inline(always)]
    unsafe fn load(mask: u16, from: *const Self) -> __m512 {
        // SAFETY: only the numbers in the mask are read, for which the caller vouches; it enables the features, too.
        unsafe { _mm512_maskz_loadu_ps(mask, from) }
    }
}

/// E8M0 bytes: exponents.
struct E8m0;

impl Stored for E8m0 {
    type Value = u8;
    const HAS_BIASES: bool = false;
    const IS_EXPONENT: bool = true;
    #[inline(always)]
    unsafe fn load(mask: u16, from: *const u8) -> __m512 {
        // SAFETY: only the bytes in the mask are read, for which the caller vouches; it enables the features, too.
        // The mask is applied again, since a byte of zero is not the number zero.
        unsafe { _mm512_maskz_mov_ps(mask, e8m0(_mm_maskz_loadu_epi8(mask, from.cast()))) }
    }
}

/// E4M3 bytes, divided by [`E4M3_FACTOR`].
struct E4m3;

impl Stored for E4m3 {
    type Value = u8;
    const HAS_BIASES: bool = false;
    #[inline(always)]
    unsafe fn load(mask: u16, from: *const u8) -> __m512 {
        // SAFETY: only the bytes in the mask are read, for which the caller vouches; it enables the features, too.
        // A byte of zero is the number zero.
        unsafe { e4m3(_mm_maskz_loadu_epi8(mask, from.cast())) }
    }
}

/// `2^(byte - 127)`; 255 is NaN.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn e8m0(bytes: __m128i) -> __m512 {
    let exponents = _mm512_slli_epi32::<23>(_mm512_cvtepu8_epi32(bytes));
    // 2^-127 is a subnormal number.
    let subnormal = _mm512_set1_epi32(1 << 22);
    let nan = _mm512_cmpeq_epi32_mask(exponents, _mm512_set1_epi32(f32::INFINITY.to_bits() as i32));
    let bits = _mm512_max_epu32(exponents, subnormal);
    _mm512_castsi512_ps(_mm512_mask_or_epi32(bits, nan, bits, subnormal))
}

/// The divisor of [`e4m3`].
const E4M3_FACTOR: f32 = 256.;

/// E4M3 numbers, divided by [`E4M3_FACTOR`]; 0x7F is NaN.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn e4m3(bytes: __m128i) -> __m512 {
    // Exponent and mantissa land on those of f16, whose bias is larger by eight.
    let halves = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(bytes));
    let halves = _mm256_and_si256(halves, _mm256_set1_epi16(0xBFFF_u16 as i16));
    // NaN, too: exponent and mantissa are as large as they can be.
    let nan = _mm256_cmpeq_epi16_mask(
        _mm256_and_si256(halves, _mm256_set1_epi16(0x7FFF)),
        _mm256_set1_epi16(0x7F << 7),
    );
    let halves = _mm256_mask_mov_epi16(halves, nan, _mm256_set1_epi16(0x7E00));
    _mm512_cvtph_ps(halves)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_its_number() {
        if Avx512::new().is_none() {
            return;
        }
        for first in (0..=u8::MAX).step_by(LANES) {
            let bytes: [u8; LANES] = std::array::from_fn(|lane| first + lane as u8);
            for kind in [Scale::E8m0, Scale::E4m3] {
                let mut numbers = [0f32; LANES];
                // SAFETY: the features were detected; both arrays have sixteen elements.
                unsafe {
                    let vector = _mm_loadu_si128(bytes.as_ptr().cast());
                    let vector = if kind == Scale::E8m0 { e8m0(vector) } else { e4m3(vector) };
                    _mm512_storeu_ps(numbers.as_mut_ptr(), vector);
                }
                for (byte, number) in bytes.into_iter().zip(numbers) {
                    let number = if kind == Scale::E4m3 { number * E4M3_FACTOR } else { number };
                    let expected = kind.value(byte);
                    let equal =
                        number.to_bits() == expected.to_bits() || number.is_nan() && expected.is_nan();
                    assert!(equal, "{kind:?} {byte}: {number} is not {expected}");
                }
            }
        }
    }
}
