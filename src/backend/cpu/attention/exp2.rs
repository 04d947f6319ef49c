//! Powers of two, for softmax in base two.

use super::super::isa::Simd;

/// `2^r` for `r` in -0.5..=0.5: a polynomial through the Chebyshev nodes, 0.4 units of the last place off at most.
const POWERS: [f32; 7] = [
    1.0,
    std::f32::consts::LN_2,
    0.240_226_5,
    0.055_503_27,
    0.009_618_057,
    0.001_340_042_8,
    0.000_154_614_45,
];

/// `2^x` for x up to 127, within two units of the last place; zero below -126.5, NaN for NaN.
///
/// # Safety
/// As [`Simd`].
#[inline(always)]
pub(super) unsafe fn exp2<S: Simd>(x: S::F) -> S::F {
    // Adding it leaves no bits of a fraction, and in the lowest bits the rounded sum of x and the bias of exponents.
    const SHIFTER: f32 = 1.5 * 8_388_608.0 + 127.0;
    // SAFETY: the caller vouches for the features; nothing is read or written.
    unsafe {
        let x = S::max(S::splat(-127.0), x);
        let shifted = S::add(x, S::splat(SHIFTER));
        let rest = S::sub(x, S::sub(shifted, S::splat(SHIFTER)));
        let mut power = S::splat(POWERS[6]);
        for coefficient in [POWERS[5], POWERS[4], POWERS[3], POWERS[2], POWERS[1], POWERS[0]] {
            power = S::mul_add(power, rest, S::splat(coefficient));
        }
        S::mul(power, S::low_bits_as_power(shifted))
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::isa::portable::Portable;
    use super::super::super::isa::{available, InstructionSet};
    use super::*;

    /// Powers of whole vectors of every instruction set.
    fn powers(isa: &InstructionSet, x: &[f32]) -> Vec<f32> {
        #[inline(always)]
        unsafe fn all<S: Simd>(x: &[f32]) -> Vec<f32> {
            let mut out = vec![0.; x.len()];
            for (x, out) in x.chunks_exact(S::LANES).zip(out.chunks_exact_mut(S::LANES)) {
                // SAFETY: whole vectors; the caller vouches for the features.
                unsafe { S::store(out.as_mut_ptr(), exp2::<S>(S::load(x.as_ptr()))) };
            }
            out
        }
        macro_rules! entry {
            ($isa:path, $features:literal) => {{
                #[target_feature(enable = $features)]
                unsafe fn entry(x: &[f32]) -> Vec<f32> {
                    // SAFETY: `entry` enables the features.
                    unsafe { all::<$isa>(x) }
                }
                // SAFETY: the instruction set is one of those available.
                unsafe { entry(x) }
            }};
        }
        match isa {
            // SAFETY: no features are needed.
            InstructionSet::Portable(_) => unsafe { all::<Portable>(x) },
            #[cfg(target_arch = "aarch64")]
            InstructionSet::Neon(_) | InstructionSet::NeonDotprod(_) | InstructionSet::NeonI8mm(_) => {
                entry!(super::super::super::isa::neon::Neon, "neon")
            }
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2(_) => entry!(super::super::super::isa::avx2::Avx2, "avx2,fma,f16c"),
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512(_) | InstructionSet::Avx512Vnni(_) | InstructionSet::Avx512Amx(_) => {
                entry!(
                    super::super::super::isa::avx512::Avx512,
                    "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c"
                )
            }
        }
    }

    #[test]
    fn powers_are_within_two_units_of_the_last_place() {
        let x: Vec<f32> = (0..1 << 20).map(|i| -126.4 + 253. * i as f32 / (1 << 20) as f32).collect();
        for isa in available() {
            let mut worst = 0f64;
            for (x, got) in x.iter().zip(powers(isa, &x)) {
                let want = f64::from(*x).exp2();
                let unit = f64::from(f32::EPSILON) * want.log2().floor().exp2();
                worst = worst.max((f64::from(got) - want).abs() / unit);
            }
            assert!(worst <= 2., "{}: {worst} units", isa.name());
        }
    }

    #[test]
    fn the_ends_are_exact() {
        let mut x = [0f32; 16];
        x[..8].copy_from_slice(&[0., -0., -1., 10., -200., f32::NEG_INFINITY, f32::MIN, f32::NAN]);
        for isa in available() {
            let got = powers(isa, &x);
            assert_eq!(got[..7], [1., 1., 0.5, 1024., 0., 0., 0.], "{}", isa.name());
            assert!(got[7].is_nan(), "{}", isa.name());
        }
    }
}
