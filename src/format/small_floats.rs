//! The small floating-point types: E2M1 and E4M3 elements, E8M0 scales (OCP Microscaling 1.0), to f32 and back.

use super::numeric::{rounded, Real};

/// Values of the sixteen E2M1 codes.
pub const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Largest finite E2M1 value.
pub const E2M1_MAX: f32 = 6.0;

/// Largest finite E4M3 value.
pub const E4M3_MAX: f32 = 448.0;

/// Code of [`E4M3_MAX`].
const E4M3_MAX_CODE: u8 = 0x7E;

/// Value of an E4M3 code: bias 7, subnormal step 2^-9, no infinity, `0x7F` and `0xFF` are NaN.
///
/// Free of branches, so that loops over it vectorize.
#[inline(always)]
pub fn e4m3_to_f32(code: u8) -> f32 {
    let magnitude = u32::from(code & 0x7F);
    // The 4 + 3 bits land on f32's exponent and mantissa; 120 is the difference of the biases.
    let normal = f32::from_bits((magnitude << 20) + (120 << 23));
    // One binade up, the leading one that a subnormal does not have is 2^-6.
    let subnormal = f32::from_bits((magnitude << 20) + (121 << 23)) - 0.015625;
    let value = if magnitude < 8 { subnormal } else { normal };
    let value = if magnitude == 0x7F { f32::NAN } else { value };
    f32::from_bits(value.to_bits() | (u32::from(code & 0x80) << 24))
}

/// Nearest E4M3 code, ties to even; saturates at ±448, also for infinities; NaN becomes `0x7E`.
pub fn f32_to_e4m3(value: f32) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    let magnitude = value.abs();
    let code = if magnitude < 0.015625 {
        // Subnormals count steps of 2^-9; eight of them is the smallest normal number, code 8.
        (magnitude * 512.0).round_ties_even() as u8
    } else if magnitude < 464.0 {
        let bits = magnitude.to_bits();
        let rounded = bits + 0x7_FFFF + ((bits >> 20) & 1);
        ((rounded >> 20) - (120 << 3)) as u8
    } else {
        E4M3_MAX_CODE
    };
    sign | code.min(E4M3_MAX_CODE)
}

/// Value of an E8M0 code: `2^(code - 127)`; 0 is 2^-127 (an f32 subnormal), 255 is NaN.
#[inline(always)]
pub fn e8m0_to_f32(code: u8) -> f32 {
    let bits = u32::from(code) << 23;
    let bits = if code == 0 { 0x0040_0000 } else { bits };
    let bits = if code == 255 { 0x7FC0_0000 } else { bits };
    f32::from_bits(bits)
}

/// The first code whose distance from `value`, rounded to `T`, is smallest: ties go toward zero and
/// code 8 (negative zero) never wins. Distances that are not numbers lose, which leaves code 0.
#[inline(always)]
pub(super) fn nearest_e2m1<T: Real>(value: f32) -> u8 {
    /// Half way between neighbours.
    const TIES: [f32; 7] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.];
    // Of a negative number, no positive element is nearer than zero; else all is symmetric.
    let magnitude = value.abs();
    let nearest = if magnitude <= E2M1_MAX {
        // The distances from both neighbours are exact in every T that `value` is of.
        TIES.iter().map(|tie| u8::from(magnitude > *tie)).sum()
    } else {
        nearest_beyond::<T>(magnitude)
    };
    if nearest > 0 && value < 0.0 {
        nearest | 8
    } else {
        nearest
    }
}

/// [`nearest_e2m1`] of a magnitude above all elements, or NaN: there distances round to equal ones.
#[cold]
fn nearest_beyond<T: Real>(magnitude: f32) -> u8 {
    let mut nearest = 0;
    let mut smallest = rounded::<T>(magnitude);
    for (code, element) in E2M1.iter().enumerate().take(8).skip(1) {
        let distance = rounded::<T>(magnitude - element).abs();
        if distance < smallest {
            (nearest, smallest) = (code as u8, distance);
        }
    }
    nearest
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    /// The definition of the OCP specification, in f64.
    fn e4m3_by_definition(code: u8) -> f64 {
        let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
        let exponent = i32::from((code >> 3) & 15);
        let mantissa = f64::from(code & 7);
        match (exponent, code & 7) {
            (15, 7) => f64::NAN,
            (0, _) => sign * mantissa / 8.0 * 2f64.powi(-6),
            _ => sign * (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
        }
    }

    #[test]
    fn e4m3_decodes_by_definition() {
        for code in 0..=255 {
            let (got, want) = (f64::from(e4m3_to_f32(code)), e4m3_by_definition(code));
            assert!(
                (got.is_nan() && want.is_nan()) || got.to_bits() == want.to_bits(),
                "{code:#x}: {got} {want}"
            );
        }
    }

    #[test]
    fn e4m3_encodes_to_the_nearest_ties_to_even() {
        let finite: Vec<u8> = (0..0x7F).collect();
        for &code in &finite {
            let value = e4m3_to_f32(code);
            assert_eq!(f32_to_e4m3(value), code);
            assert_eq!(f32_to_e4m3(-value), code | 0x80);
        }
        for pair in finite.windows(2) {
            let (low, high) = (e4m3_to_f32(pair[0]), e4m3_to_f32(pair[1]));
            let middle = (low + high) / 2.0; // exact: one more bit than either
            let even = if pair[0] % 2 == 0 { pair[0] } else { pair[1] };
            assert_eq!(f32_to_e4m3(middle), even, "{middle}");
            assert_eq!(f32_to_e4m3(f32::from_bits(middle.to_bits() - 1)), pair[0]);
            assert_eq!(f32_to_e4m3(f32::from_bits(middle.to_bits() + 1)), pair[1]);
        }
    }

    #[test]
    fn e4m3_saturates() {
        for value in [464.0, 480.0, 1e30, f32::INFINITY] {
            assert_eq!(f32_to_e4m3(value), 0x7E);
            assert_eq!(f32_to_e4m3(-value), 0xFE);
        }
        assert_eq!(f32_to_e4m3(f32::NAN) & 0x7F, 0x7E);
    }

    #[test]
    fn e8m0_is_a_power_of_two_with_a_subnormal_and_a_nan_end() {
        for code in 0..=254 {
            assert_eq!(f64::from(e8m0_to_f32(code)), 2f64.powi(i32::from(code) - 127));
        }
        assert!(e8m0_to_f32(255).is_nan());
    }

    /// Every number of a 16-bit dtype, against all distances.
    #[test]
    fn the_nearest_element_is_that_of_the_smallest_distance() {
        fn check<T: Real>(value: T) {
            let value = value.to_f32();
            let nearest = nearest_beyond::<T>(value.abs());
            let expected = if nearest > 0 && value < 0. { nearest | 8 } else { nearest };
            assert_eq!(nearest_e2m1::<T>(value), expected, "{value}");
        }
        for bits in 0..=u16::MAX {
            check(f16::from_bits(bits));
            check(bf16::from_bits(bits));
            // Among f32, the ties and their neighbours are the hard ones.
            check(bf16::from_bits(bits).to_f32());
            check(f32::from_bits((u32::from(bits) << 16).saturating_sub(1)));
            check(f32::from_bits(u32::from(bits) << 16 | 1));
        }
    }
}
