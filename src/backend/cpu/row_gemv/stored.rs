//! Scales and biases as they are stored, read sixteen at a time as f32.

use crate::format::SUPER_BLOCK;
use half::{bf16, f16};
use std::arch::x86_64::*;

/// Scales or biases as they are stored.
pub(in super::super) trait Stored: Copy {
    /// False for [`Nothing`] alone.
    const ANY: bool = true;
    /// Whether formats with such scales have biases.
    const HAS_BIASES: bool = true;
    /// Whether such scales have any exponent that f32 has: they are not multiplied by units, lest they leave f32.
    const IS_EXPONENT: bool = false;

    /// How many there are.
    fn count(self) -> usize;

    /// Sixteen numbers from `at` on as f32, exactly; zeros where the mask has none.
    ///
    /// # Safety
    /// Those in the mask exist; the CPU has AVX-512 (F, BW, DQ, VL), and the caller enables it.
    unsafe fn load(self, mask: u16, at: usize) -> __m512;
}

/// No biases.
#[derive(Clone, Copy)]
pub(super) struct Nothing;

impl Stored for Nothing {
    const ANY: bool = false;
    fn count(self) -> usize {
        0
    }
    #[inline(always)]
    unsafe fn load(self, _mask: u16, _at: usize) -> __m512 {
        // SAFETY: the caller enables the features.
        unsafe { _mm512_setzero_ps() }
    }
}

/// What slices of numbers have in common.
macro_rules! values {
    ($field:tt) => {
        #[inline(always)]
        fn count(self) -> usize {
            self.$field.len()
        }
    };
    () => {
        #[inline(always)]
        fn count(self) -> usize {
            self.len()
        }
    };
}

impl Stored for &[f16] {
    values!();
    #[inline(always)]
    unsafe fn load(self, mask: u16, at: usize) -> __m512 {
        // SAFETY: only the numbers in the mask are read, for which the caller vouches; it enables the features, too.
        unsafe { _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, self.as_ptr().wrapping_add(at).cast())) }
    }
}

impl Stored for &[bf16] {
    values!();
    #[inline(always)]
    unsafe fn load(self, mask: u16, at: usize) -> __m512 {
        // SAFETY: only the numbers in the mask are read, for which the caller vouches; it enables the features, too.
        unsafe {
            let halves = _mm256_maskz_loadu_epi16(mask, self.as_ptr().wrapping_add(at).cast());
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
        }
    }
}

impl Stored for &[f32] {
    values!();
    #[inline(always)]
    unsafe fn load(self, mask: u16, at: usize) -> __m512 {
        // SAFETY: only the numbers in the mask are read, for which the caller vouches; it enables the features, too.
        unsafe { _mm512_maskz_loadu_ps(mask, self.as_ptr().wrapping_add(at)) }
    }
}

/// E8M0 bytes: exponents.
#[derive(Clone, Copy)]
pub(super) struct E8m0<'a>(pub(super) &'a [u8]);

impl Stored for E8m0<'_> {
    const HAS_BIASES: bool = false;
    const IS_EXPONENT: bool = true;
    values!(0);
    #[inline(always)]
    unsafe fn load(self, mask: u16, at: usize) -> __m512 {
        // SAFETY: only the bytes in the mask are read, for which the caller vouches; it enables the features, too.
        // The mask is applied again, since a byte of zero is not the number zero.
        unsafe {
            let bytes = _mm_maskz_loadu_epi8(mask, self.0.as_ptr().wrapping_add(at).cast());
            _mm512_maskz_mov_ps(mask, e8m0(bytes))
        }
    }
}

/// E4M3 bytes, divided by [`E4M3_FACTOR`].
#[derive(Clone, Copy)]
pub(super) struct E4m3<'a>(pub(super) &'a [u8]);

impl Stored for E4m3<'_> {
    const HAS_BIASES: bool = false;
    values!(0);
    #[inline(always)]
    unsafe fn load(self, mask: u16, at: usize) -> __m512 {
        // SAFETY: only the bytes in the mask are read, for which the caller vouches; it enables the features, too.
        // A byte of zero is the number zero.
        unsafe { e4m3(_mm_maskz_loadu_epi8(mask, self.0.as_ptr().wrapping_add(at).cast())) }
    }
}

/// Bytes that count the numbers of super-blocks.
#[derive(Clone, Copy)]
pub(super) struct Counted<'a> {
    bytes: &'a [u8],
    of: &'a [f32],
    /// `2^shift` bytes share a number: 8 or 16.
    shift: u32,
}

impl<'a> Counted<'a> {
    /// # Panics
    /// If there is not a number for every so many groups, or less than eight share one.
    pub(super) fn new(bytes: &'a [u8], of: &'a [f32], group_size: usize) -> Self {
        let groups = SUPER_BLOCK / group_size;
        assert!(
            matches!(groups, 8 | 16) && bytes.len() == of.len() * groups,
            "a number for each super-block"
        );
        Self { bytes, of, shift: groups.trailing_zeros() }
    }
}

impl Stored for Counted<'_> {
    #[inline(always)]
    fn count(self) -> usize {
        self.bytes.len()
    }
    #[inline(always)]
    unsafe fn load(self, mask: u16, at: usize) -> __m512 {
        // Rows are whole super-blocks: `at` is a multiple of eight, and so of sixteen bytes eight share a number, or all.
        let second = self.shift == 3 && mask >> 8 != 0;
        // SAFETY: only the bytes in the mask are read, for which the caller vouches, and the one or two numbers that they
        // count, of which `new` has seen that there are as many; the caller enables the features, too.
        unsafe {
            let bytes = _mm_maskz_loadu_epi8(mask, self.bytes.as_ptr().wrapping_add(at).cast());
            let at = at >> self.shift;
            let mut of = _mm512_set1_ps(*self.of.get_unchecked(at));
            if second {
                of = _mm512_insertf32x8::<1>(of, _mm256_set1_ps(*self.of.get_unchecked(at + 1)));
            }
            _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), of)
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

/// The divisor of [`e4m3`].
pub(super) const E4M3_FACTOR: f32 = 256.;

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
    use super::super::super::isa::avx512::Avx512;
    use super::super::LANES;
    use super::*;
    use crate::format::Scale;

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
