//! The small floating-point types: E2M1 and E4M3 elements, E8M0 scales (OCP Microscaling 1.0).

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

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

/// A floating-point type that weights, scales and activations come in.
///
/// `from_f32` rounds to nearest, ties to even; `to_f32` is exact.
pub trait Real: Copy + Send + Sync + candle_core::WithDType {
    /// Rounds to this type.
    fn from_f32(value: f32) -> Self;
    /// The exact value.
    fn to_f32(self) -> f32;
    /// [`Real::to_f32`] of each number; the slices are of one length.
    fn widen(from: &[Self], to: &mut [f32]);
    /// [`Real::from_f32`] of each number; the slices are of one length.
    fn round(from: &[f32], to: &mut [Self]);
    /// [`Real::from_f32`] of each number.
    fn round_all(from: Vec<f32>) -> Vec<Self> {
        let mut to = vec![Self::from_f32(0.0); from.len()];
        Self::round(&from, &mut to);
        to
    }
}

impl Real for f32 {
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    fn widen(from: &[Self], to: &mut [f32]) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
    }
    fn round(from: &[f32], to: &mut [Self]) {
        Self::widen(from, to);
    }
    fn round_all(from: Vec<f32>) -> Vec<Self> {
        from
    }
}

impl Real for f16 {
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        f16::from_f32(value)
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
    fn widen(from: &[Self], to: &mut [f32]) {
        let len = to.len().min(from.len());
        from[..len].convert_to_f32_slice(&mut to[..len]);
    }
    fn round(from: &[f32], to: &mut [Self]) {
        let len = to.len().min(from.len());
        to[..len].convert_from_f32_slice(&from[..len]);
    }
}

impl Real for bf16 {
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        bf16::from_f32(value)
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
    fn widen(from: &[Self], to: &mut [f32]) {
        // Widening is a shift; written out, the loop vectorizes.
        for (to, from) in to.iter_mut().zip(from) {
            *to = f32::from_bits(u32::from(from.to_bits()) << 16);
        }
    }
    fn round(from: &[f32], to: &mut [Self]) {
        let len = to.len().min(from.len());
        to[..len].convert_from_f32_slice(&from[..len]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
