//! A row's scales and biases for the kernel of `vnni.rs`.

use super::super::kernels::ROWS_PER_PASS;
use super::super::matrix::{GroupValues, PackedMatrix};
use super::digits::{Codes, Digits, Groups, LANES};
use crate::format::decode::symmetric_zero;
use crate::format::ScaleKind;
use half::{bf16, f16};
use std::arch::x86_64::*;

/// What a row has besides products with its scales, in lanes whose sum it is.
#[derive(Clone, Copy)]
pub(super) struct Besides {
    /// What [`Digits::centred`] leaves, as a multiple of [`Digits::unit`] and [`factor_of_scales`].
    pub(super) rests: __m512,
    pub(super) biases: __m512,
}

impl Besides {
    #[target_feature(enable = "avx512f")]
    pub(super) fn nothing() -> Self {
        Self { rests: _mm512_setzero_ps(), biases: _mm512_setzero_ps() }
    }
}

/// For rows from `first_row` on, as many as there are `besides`: writes scales times
/// [`Groups::units`](super::digits::Groups::units) for each group of a row, and leaves what is behind them.
///
/// # Safety
/// The features are there.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn scale_rows(
    matrix: &PackedMatrix,
    first_row: usize,
    codes: &Codes,
    digits: &Digits,
    (scaled, besides): (&mut [f32], &mut [Besides]),
) {
    let groups = matrix.groups_per_row();
    let zero = symmetric_zero(matrix.format.bits());
    let rows = scaled.chunks_exact_mut(digits.groups.len() * LANES);
    for (row, (scaled, besides)) in rows.zip(besides).enumerate() {
        let first = (first_row + row) * groups;
        let scales = matrix.scales.slice(first, groups);
        let biases = matrix.biases.map(|biases| biases.slice(first, groups));
        // SAFETY: the features are those of this function.
        *besides = unsafe {
            match (scales, matrix.format.scale_kind()) {
                (GroupValues::Byte(scales), ScaleKind::E8m0) => scale_bytes::<true>(scales, digits, scaled),
                (GroupValues::Byte(scales), _) => scale_bytes::<false>(scales, digits, scaled),
                (GroupValues::F16(scales), _) => of_scales(scales, biases, zero, codes, digits, scaled),
                (GroupValues::Bf16(scales), _) => of_scales(scales, biases, zero, codes, digits, scaled),
                (GroupValues::F32(scales), _) => of_scales(scales, biases, zero, codes, digits, scaled),
            }
        };
    }
}

/// What scales of bytes are to be multiplied by besides, for all rows.
pub(super) fn factor_of_scales(matrix: &PackedMatrix) -> f32 {
    match matrix.format.scale_kind() {
        ScaleKind::E4m3 => E4M3_FACTOR * matrix.global_scale,
        _ => matrix.global_scale,
    }
}

/// See [`scale_rows`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn scale_bytes<const E8M0: bool>(scales: &[u8], digits: &Digits, out: &mut [f32]) -> Besides {
    let mut besides = Besides::nothing();
    // SAFETY: sixteen bytes and numbers each.
    unsafe {
        for line in (0..scales.len()).step_by(64) {
            prefetch_next_rows(scales, line);
        }
        let sixteens = scales.chunks_exact(LANES);
        let mut last = [0; LANES];
        let mask = there(scales.len(), scales.len() / LANES * LANES);
        last.iter_mut().zip(sixteens.remainder()).for_each(|(to, from)| *to = *from);
        let mut places = out.chunks_exact_mut(LANES).zip(&digits.groups);
        for (bytes, (out, groups)) in sixteens.zip(&mut places) {
            scale_sixteen::<E8M0>((bytes, !0), groups, out, &mut besides.rests);
        }
        if let Some((out, groups)) = places.next() {
            scale_sixteen::<E8M0>((&last, mask), groups, out, &mut besides.rests);
        }
    }
    besides
}

/// E8M0 scales times `factor`, and zeros behind them to the end of `out`.
///
/// # Safety
/// The features are there.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn e8m0_scales(scales: &[u8], factor: f32, out: &mut [f32]) {
    for (first, out) in (0..).step_by(LANES).zip(out.chunks_exact_mut(LANES)) {
        let mask = there(scales.len(), first);
        // SAFETY: what the mask lets pass is there; sixteen places.
        unsafe {
            let bytes = _mm_maskz_loadu_epi8(mask, scales.as_ptr().wrapping_add(first).cast());
            let scaled = _mm512_maskz_mul_ps(mask, e8m0(bytes), _mm512_set1_ps(factor));
            _mm512_storeu_ps(out.as_mut_ptr(), scaled);
        }
    }
}

/// Scales for sixteen groups, of which those in the mask are there.
///
/// # Safety
/// There are sixteen bytes, and places.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn scale_sixteen<const E8M0: bool>(
    (bytes, mask): (&[u8], u16),
    groups: &Groups,
    out: &mut [f32],
    rest: &mut __m512,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let bytes = _mm_loadu_si128(bytes.as_ptr().cast());
        let scaled = if E8M0 {
            // Units are one. A byte of zero would be a subnormal number, which takes long.
            _mm512_maskz_mov_ps(mask, e8m0(bytes))
        } else {
            _mm512_mul_ps(e4m3(bytes), _mm512_loadu_ps(groups.units.as_ptr()))
        };
        _mm512_storeu_ps(out.as_mut_ptr(), scaled);
        *rest = _mm512_fmadd_ps(scaled, _mm512_loadu_ps(groups.rests.as_ptr()), *rest);
    }
}

/// See [`scale_rows`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn of_scales<S: Float>(
    scales: &[S],
    biases: Option<GroupValues>,
    zero: f32,
    codes: &Codes,
    digits: &Digits,
    out: &mut [f32],
) -> Besides {
    let centre = codes.centre as f32 * codes.unit;
    // SAFETY: the features are those of this function.
    unsafe {
        match biases {
            Some(GroupValues::F16(biases)) => scale_floats(scales, (biases, centre), digits, out),
            Some(GroupValues::Bf16(biases)) => scale_floats(scales, (biases, centre), digits, out),
            Some(GroupValues::F32(biases)) => scale_floats(scales, (biases, centre), digits, out),
            // Of symmetric codes. There are no biases of bytes.
            _ => scale_floats::<S, f32>(scales, (&[], centre - zero), digits, out),
        }
    }
}

/// See [`scale_rows`]: `centre *` its scale is added to each bias.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn scale_floats<S: Float, B: Float>(
    scales: &[S],
    (biases, centre): (&[B], f32),
    digits: &Digits,
    out: &mut [f32],
) -> Besides {
    let centre = _mm512_set1_ps(centre);
    let mut besides = Besides::nothing();
    let places = out.chunks_exact_mut(LANES).take(scales.len().div_ceil(LANES));
    for (index, (out, groups)) in places.zip(&digits.groups).enumerate() {
        // SAFETY: sixteen numbers each.
        unsafe {
            let scale = sixteen(scales, index * LANES);
            let scaled = _mm512_mul_ps(scale, _mm512_loadu_ps(groups.units.as_ptr()));
            _mm512_storeu_ps(out.as_mut_ptr(), scaled);
            besides.rests = _mm512_fmadd_ps(scaled, _mm512_loadu_ps(groups.rests.as_ptr()), besides.rests);
            // There are none, or as many as scales.
            let bias = if biases.is_empty() { _mm512_setzero_ps() } else { sixteen(biases, index * LANES) };
            let bias = _mm512_fmadd_ps(centre, scale, bias);
            besides.biases = _mm512_fmadd_ps(bias, _mm512_loadu_ps(groups.sums.as_ptr()), besides.biases);
        }
    }
    besides
}

/// Which of sixteen values from `first` on are there, of `count`.
#[inline(always)]
fn there(count: usize, first: usize) -> u16 {
    ((1u32 << count.saturating_sub(first).min(LANES)) - 1) as u16
}

/// Asks for a value of the row that many rows ahead, where the values of a row are `values`.
#[inline(always)]
fn prefetch_next_rows<T>(values: &[T], index: usize) {
    let ahead = values.as_ptr().wrapping_add(ROWS_PER_PASS * values.len() + index);
    // SAFETY: any address may be asked for.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(ahead.cast()) };
}

/// What scales and biases are stored as.
trait Float: Copy {
    /// Sixteen numbers, or those that the mask lets pass and zeros, as f32, exactly.
    ///
    /// # Safety
    /// They are there; AVX-512 (F, BW, DQ, VL) is, and enabled in the caller.
    unsafe fn load(mask: u16, from: *const Self) -> __m512;
}

impl Float for f16 {
    #[inline(always)]
    unsafe fn load(mask: u16, from: *const Self) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, from.cast())) }
    }
}

impl Float for bf16 {
    #[inline(always)]
    unsafe fn load(mask: u16, from: *const Self) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }
}

impl Float for f32 {
    #[inline(always)]
    unsafe fn load(mask: u16, from: *const Self) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_maskz_loadu_ps(mask, from) }
    }
}

/// Sixteen numbers from `first` on; zeros where there are none.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn sixteen<T: Float>(values: &[T], first: usize) -> __m512 {
    prefetch_next_rows(values, first);
    let from = values.as_ptr().wrapping_add(first);
    // SAFETY: the features are those of this function, and what the mask lets pass is there.
    unsafe {
        // A mask of all is no mask: the compiler knows.
        if first + LANES <= values.len() {
            T::load(!0, from)
        } else {
            T::load(there(values.len(), first), from)
        }
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
    use crate::format::decode::scale_from_byte;

    #[test]
    fn every_byte_is_its_number() {
        if !super::super::avx512::detected() {
            return;
        }
        for first in (0..=u8::MAX).step_by(LANES) {
            let bytes: [u8; LANES] = std::array::from_fn(|place| first + place as u8);
            for kind in [ScaleKind::E8m0, ScaleKind::E4m3] {
                let mut numbers = [0f32; LANES];
                // SAFETY: the features were detected; sixteen bytes and numbers.
                unsafe {
                    let vector = _mm_loadu_si128(bytes.as_ptr().cast());
                    let vector = if kind == ScaleKind::E8m0 { e8m0(vector) } else { e4m3(vector) };
                    _mm512_storeu_ps(numbers.as_mut_ptr(), vector);
                }
                for (byte, number) in bytes.into_iter().zip(numbers) {
                    let number = if kind == ScaleKind::E4m3 { number * E4M3_FACTOR } else { number };
                    let expected = scale_from_byte(kind, byte, 1.);
                    let equal =
                        number.to_bits() == expected.to_bits() || number.is_nan() && expected.is_nan();
                    assert!(equal, "{kind:?} {byte}: {number} is not {expected}");
                }
            }
        }
    }
}
