//! A row's scales and biases for the kernels of `vnni.rs` and `mxfp8.rs`.

use super::super::kernels::ROWS_PER_PASS;
use super::super::matrix::{GroupValues, PackedMatrix};
use super::digits::{Codes, Digits, Groups, LANES};
use crate::format::Scale;
use half::{bf16, f16};
use std::arch::x86_64::*;

/// What scales and biases are multiplied by.
pub(super) struct Scaling<'a> {
    /// Numbers of a row: sixteen whose sum is that of biases times [`Groups::sums`], one for each group, and zeros. Of
    /// those the kernel of `vnni.rs` reads up to sixteen.
    pub(super) stride: usize,
    /// None where scales are of any size.
    groups: &'a [Groups],
    /// What is added to biases, as a multiple of their scales.
    centre: f32,
}

impl<'a> Scaling<'a> {
    pub(super) fn new(codes: &Codes, digits: &'a Digits) -> Self {
        let groups = if codes.any_scale { &[] } else { digits.groups.as_slice() };
        let stride = LANES * (1 + digits.groups.len());
        Self { stride, groups, centre: codes.centre as f32 * codes.unit }
    }

    /// Scales are left as they are, with zeros behind them to a multiple of sixteen.
    pub(super) fn none(groups_per_row: usize) -> Self {
        Self { stride: LANES + groups_per_row.next_multiple_of(LANES), groups: &[], centre: 0. }
    }
}

/// For rows from `first_row` on, as many as `scaled` has place for: writes what biases give, and scales, times
/// [`Groups::units`] unless they are of any size. Zeros behind the last sixteen groups are left as they are.
///
/// # Safety
/// The features are there.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn scale_rows<'a>(
    matrix: &PackedMatrix<'a>,
    first_row: usize,
    scaling: &Scaling,
    scaled: &mut [f32],
) {
    let groups = matrix.groups_per_row();
    let rows = scaled.len() / scaling.stride;
    let part = |values: GroupValues<'a>| values.slice(first_row * groups, rows * groups);
    let (scales, biases) = (part(matrix.scales), matrix.biases.map(part));
    let zero = matrix.format.midpoint();
    // SAFETY: the features are those of this function.
    unsafe {
        match (scales, matrix.format.scale()) {
            (GroupValues::Byte(scales), Scale::E8m0) => {
                scale_all::<E8m0, Nothing>((scales, groups), (&[], 0.), scaling, scaled)
            }
            (GroupValues::Byte(scales), _) => {
                scale_all::<E4m3, Nothing>((scales, groups), (&[], 0.), scaling, scaled)
            }
            (GroupValues::F16(scales), _) => {
                of_scales::<f16>((scales, groups), (biases, zero), scaling, scaled)
            }
            (GroupValues::Bf16(scales), _) => {
                of_scales::<bf16>((scales, groups), (biases, zero), scaling, scaled)
            }
            (GroupValues::F32(scales), _) => {
                of_scales::<f32>((scales, groups), (biases, zero), scaling, scaled)
            }
        }
    }
}

/// What is left for products to be multiplied by, of all rows. They have to be numbers before that.
pub(super) fn factor_of_scales(matrix: &PackedMatrix) -> f32 {
    match matrix.format.scale() {
        Scale::E4m3 => E4M3_FACTOR * matrix.global_scale,
        _ => matrix.global_scale,
    }
}

/// See [`scale_rows`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn of_scales<S: Stored>(
    scales: (&[S::Value], usize),
    (biases, zero): (Option<GroupValues>, f32),
    scaling: &Scaling,
    scaled: &mut [f32],
) {
    let centre = scaling.centre;
    // SAFETY: the features are those of this function.
    unsafe {
        match biases {
            Some(GroupValues::F16(biases)) => scale_all::<S, f16>(scales, (biases, centre), scaling, scaled),
            Some(GroupValues::Bf16(biases)) => {
                scale_all::<S, bf16>(scales, (biases, centre), scaling, scaled)
            }
            Some(GroupValues::F32(biases)) => scale_all::<S, f32>(scales, (biases, centre), scaling, scaled),
            // Of symmetric codes. There are no biases of bytes.
            _ => scale_all::<S, Nothing>(scales, (&[], centre - zero), scaling, scaled),
        }
    }
}

/// See [`scale_rows`]: scales are those of all rows, each with so many `groups`, and biases, to which `centre *` their
/// scales are added, are as many or [`Nothing`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn scale_all<S: Stored, B: Stored>(
    (scales, groups): (&[S::Value], usize),
    (biases, centre): (&[B::Value], f32),
    scaling: &Scaling,
    scaled: &mut [f32],
) {
    let stride = scaling.stride;
    let rows = scaled.len() / stride;
    assert!(scales.len() == rows * groups && biases.len() == if B::ANY { scales.len() } else { 0 });
    assert!(LANES + groups.next_multiple_of(LANES) <= stride);
    assert!(S::OF_ANY_SIZE && !S::HAS_BIASES || scaling.groups.len() * LANES >= groups);
    let centre = _mm512_set1_ps(centre);
    let whole = groups / LANES * LANES;
    for row in 0..rows {
        // SAFETY: the assertions.
        unsafe {
            let from = (scales.as_ptr().add(row * groups), biases.as_ptr().wrapping_add(row * groups));
            let to = scaled.as_mut_ptr().add(row * stride);
            let group = |first| scaling.groups.as_ptr().wrapping_add(first / LANES);
            let mut total = _mm512_setzero_ps();
            prefetch_row(from.0.wrapping_add(ROWS_PER_PASS * groups), groups);
            prefetch_row(from.1.wrapping_add(ROWS_PER_PASS * groups), groups);
            for first in (0..whole).step_by(LANES) {
                scale_sixteen::<S, B>(from, first, !0, (centre, group(first)), to, &mut total);
            }
            if whole < groups {
                let mask = (1 << (groups - whole)) - 1;
                scale_sixteen::<S, B>(from, whole, mask, (centre, group(whole)), to, &mut total);
            }
            _mm512_storeu_ps(to, total);
        }
    }
}

/// Sixteen groups of a row from `first` on, of which those in the mask are there.
///
/// # Safety
/// There are scales and, unless they are [`Nothing`], biases for the mask, and places for the sixteen; and `groups`
/// unless scales are of any size.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn scale_sixteen<S: Stored, B: Stored>(
    (scales, biases): (*const S::Value, *const B::Value),
    first: usize,
    mask: u16,
    (centre, groups): (__m512, *const Groups),
    to: *mut f32,
    total: &mut __m512,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let scale = S::load(mask, scales.wrapping_add(first));
        let mut scaled = scale;
        if !S::OF_ANY_SIZE {
            scaled = _mm512_mul_ps(scale, _mm512_loadu_ps((*groups).units.as_ptr()));
        }
        _mm512_storeu_ps(to.add(LANES + first), scaled);
        if S::HAS_BIASES {
            let bias = B::load(mask, biases.wrapping_add(first));
            let bias = _mm512_fmadd_ps(centre, scale, bias);
            *total = _mm512_fmadd_ps(bias, _mm512_loadu_ps((*groups).sums.as_ptr()), *total);
        }
    }
}

/// Asks for the `count` values of a row.
#[inline(always)]
fn prefetch_row<T>(values: *const T, count: usize) {
    for byte in (0..count * size_of::<T>()).step_by(64) {
        // SAFETY: any address may be asked for.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(values.cast::<i8>().wrapping_add(byte)) };
    }
}

/// What scales and biases are stored as.
trait Stored {
    type Value: Copy;
    /// Whether there are any.
    const ANY: bool = true;
    /// Whether formats with such scales have biases.
    const HAS_BIASES: bool = true;
    /// Whether such scales are of any size that an f32 number has, and not multiplied by units.
    const OF_ANY_SIZE: bool = false;

    /// Sixteen numbers, or those that the mask lets pass and zeros, as f32, exactly.
    ///
    /// # Safety
    /// They are there; AVX-512 (F, BW, DQ, VL) is, and enabled in the caller.
    unsafe fn load(mask: u16, from: *const Self::Value) -> __m512;
}

/// No biases.
struct Nothing;

impl Stored for Nothing {
    type Value = ();
    const ANY: bool = false;
    #[inline(always)]
    unsafe fn load(_mask: u16, _from: *const ()) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_setzero_ps() }
    }
}

impl Stored for f16 {
    type Value = Self;
    #[inline(always)]
    unsafe fn load(mask: u16, from: *const Self) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, from.cast())) }
    }
}

impl Stored for bf16 {
    type Value = Self;
    #[inline(always)]
    unsafe fn load(mask: u16, from: *const Self) -> __m512 {
        // SAFETY: the caller's promise.
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
        // SAFETY: the caller's promise.
        unsafe { _mm512_maskz_loadu_ps(mask, from) }
    }
}

/// Bytes that are exponents.
struct E8m0;

impl Stored for E8m0 {
    type Value = u8;
    const HAS_BIASES: bool = false;
    const OF_ANY_SIZE: bool = true;
    #[inline(always)]
    unsafe fn load(mask: u16, from: *const u8) -> __m512 {
        // SAFETY: the caller's promise. A byte of zero is not zero.
        unsafe { _mm512_maskz_mov_ps(mask, e8m0(_mm_maskz_loadu_epi8(mask, from.cast()))) }
    }
}

/// Bytes that are E4M3 numbers, of which [`E4M3_FACTOR`] is left out.
struct E4m3;

impl Stored for E4m3 {
    type Value = u8;
    const HAS_BIASES: bool = false;
    #[inline(always)]
    unsafe fn load(mask: u16, from: *const u8) -> __m512 {
        // SAFETY: the caller's promise. A byte of zero is zero.
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

/// What [`e4m3`] leaves out.
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
        if !super::super::avx512::detected() {
            return;
        }
        for first in (0..=u8::MAX).step_by(LANES) {
            let bytes: [u8; LANES] = std::array::from_fn(|place| first + place as u8);
            for kind in [Scale::E8m0, Scale::E4m3] {
                let mut numbers = [0f32; LANES];
                // SAFETY: the features were detected; sixteen bytes and numbers.
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
