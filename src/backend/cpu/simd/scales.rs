//! A row's scales and biases for the kernel of `vnni.rs`.

use super::super::kernels::ROWS_PER_PASS;
use super::super::matrix::{GroupValues, PackedMatrix};
use super::digits::{Codes, Digits, LANES};
use crate::format::decode::symmetric_zero;
use crate::format::ScaleKind;
use std::arch::x86_64::*;

/// Writes scales times [`Groups::units`](super::digits::Groups::units), for each group of a row and zeros behind them.
/// Returns what the row has besides products with them: what [`Digits::centred`] leaves, as a multiple of
/// [`Digits::unit`], and biases.
///
/// # Safety
/// The features are there.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn scale_row(
    matrix: &PackedMatrix,
    row: usize,
    codes: &Codes,
    digits: &Digits,
    out: &mut [f32],
) -> (f32, f32) {
    let groups = matrix.groups_per_row();
    let kind = matrix.format.scale_kind();
    let scales = matrix.scales.slice(row * groups, groups);
    let biases = matrix.biases.map(|biases| biases.slice(row * groups, groups));
    let global = _mm512_set1_ps(matrix.global_scale);
    let centre = _mm512_set1_ps(codes.centre as f32 * codes.unit);
    let zero = _mm512_set1_ps(-symmetric_zero(matrix.format.bits()));
    let [mut rest, mut sum] = [_mm512_setzero_ps(); 2];
    for (index, (out, groups)) in out.chunks_exact_mut(LANES).zip(&digits.groups).enumerate() {
        // SAFETY: sixteen numbers each.
        unsafe {
            let scale = _mm512_mul_ps(sixteen(scales, kind, index * LANES), global);
            let scaled = _mm512_mul_ps(scale, _mm512_loadu_ps(groups.units.as_ptr()));
            _mm512_storeu_ps(out.as_mut_ptr(), scaled);
            rest = _mm512_fmadd_ps(scaled, _mm512_loadu_ps(groups.rests.as_ptr()), rest);
            if matrix.format.has_biases() {
                let bias = match biases {
                    Some(biases) => sixteen(biases, kind, index * LANES),
                    None => _mm512_mul_ps(scale, zero),
                };
                let bias = _mm512_fmadd_ps(centre, scale, bias);
                sum = _mm512_fmadd_ps(bias, _mm512_loadu_ps(groups.sums.as_ptr()), sum);
            }
        }
    }
    (_mm512_reduce_add_ps(rest), _mm512_reduce_add_ps(sum))
}

/// Sixteen numbers from `first` on as f32, exactly; zeros where there are none.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn sixteen(values: GroupValues, kind: ScaleKind, first: usize) -> __m512 {
    fn mask<T>(values: &[T], first: usize) -> (u16, *const T) {
        let count = values.len().saturating_sub(first).min(LANES) as u32;
        let from = values.as_ptr().wrapping_add(first);
        // Those of the rows that come next.
        // SAFETY: any address may be asked for.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(ROWS_PER_PASS * values.len()).cast()) };
        (((1u32 << count) - 1) as u16, from)
    }
    // SAFETY: what the masks let pass is there.
    unsafe {
        match values {
            GroupValues::F16(values) => {
                let (mask, from) = mask(values, first);
                _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, from.cast()))
            }
            GroupValues::Bf16(values) => {
                let (mask, from) = mask(values, first);
                let bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
            }
            GroupValues::F32(values) => {
                let (mask, from) = mask(values, first);
                _mm512_maskz_loadu_ps(mask, from)
            }
            GroupValues::Byte(values) => {
                let (mask, from) = mask(values, first);
                let bytes = _mm_maskz_loadu_epi8(mask, from.cast());
                _mm512_maskz_mov_ps(mask, if kind == ScaleKind::E8m0 { e8m0(bytes) } else { e4m3(bytes) })
            }
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

/// E4M3 numbers; 0x7F is NaN.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn e4m3(bytes: __m128i) -> __m512 {
    // Exponent and mantissa land on those of f16, whose bias is larger by eight.
    let halves = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(bytes));
    let halves = _mm256_and_si256(halves, _mm256_set1_epi16(0xBFFF_u16 as i16));
    let numbers = _mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(256.));
    let nan = _mm_cmpeq_epi8_mask(_mm_or_si128(bytes, _mm_set1_epi8(-128)), _mm_set1_epi8(-1));
    _mm512_mask_mov_ps(numbers, nan, _mm512_set1_ps(f32::NAN))
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
        let bytes: Vec<u8> = (0..=u8::MAX).collect();
        for kind in [ScaleKind::E8m0, ScaleKind::E4m3] {
            // The last ones have zeros behind them.
            for first in (0..bytes.len()).step_by(10) {
                let mut numbers = [0f32; LANES];
                // SAFETY: the features were detected.
                unsafe {
                    let vector = sixteen(GroupValues::Byte(&bytes), kind, first);
                    _mm512_storeu_ps(numbers.as_mut_ptr(), vector);
                }
                for (place, number) in numbers.into_iter().enumerate() {
                    let expected =
                        bytes.get(first + place).map_or(0., |byte| scale_from_byte(kind, *byte, 1.));
                    let equal =
                        number.to_bits() == expected.to_bits() || number.is_nan() && expected.is_nan();
                    assert!(equal, "{kind:?} {}: {number} is not {expected}", first + place);
                }
            }
        }
    }
}
