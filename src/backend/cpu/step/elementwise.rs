//! What a step does between matmuls, on rows of f32. Loops are written so that the compiler makes vectors of them.

/// Sums of independent lanes, which vectorize and lose less to rounding than one running sum.
const LANES: usize = 16;

/// `x / rms(x) * weight`, where `rms(x) = sqrt(mean(x^2) + eps)`; a row of x, as many weights and numbers of `out`.
pub(super) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let mut sums = [0f32; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest: f32 = chunks.remainder().iter().map(|x| x * x).sum();
    for x in chunks {
        sums.iter_mut().zip(x).for_each(|(sum, x)| *sum += x * x);
    }
    let total = sums.iter().map(|sum| f64::from(*sum)).sum::<f64>() + f64::from(rest);
    let inverse = 1. / (total / x.len() as f64 + f64::from(eps)).sqrt();
    let inverse = inverse as f32;
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = x * inverse * weight;
    }
}

/// [`rms_norm`] of a row in place.
pub(super) fn rms_norm_in_place(x: &mut [f32], weight: &[f32], eps: f32) {
    let copy = x.to_vec();
    rms_norm(&copy, weight, eps, x);
}

/// `silu(gate) * up` in place of `gate`, where `silu(x) = x / (1 + exp(-x))`.
pub(super) fn silu_mul(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = *gate / (1. + exp(-*gate)) * up;
    }
}

/// Rotates a head: element i pairs with element i + len / 2; `cos` and `sin` have a number for each pair.
pub(super) fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (first, second) = head.split_at_mut(head.len() / 2);
    for (((first, second), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        (*first, *second) = (*first * cos - *second * sin, *first * sin + *second * cos);
    }
}

/// e^x within 2 units in the last place; as of 88 or -87 where x is beyond, so that it is finite and not subnormal.
#[inline(always)]
fn exp(x: f32) -> f32 {
    /// log2(e), and ln(2) as a number of few bits and the rest.
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    /// Adding it rounds to an integer, which then are the lowest bits.
    const ROUND: f32 = 12_582_912.;
    let x = x.clamp(-87., 88.);
    let shifted = x * LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * LN_2_HIGH - n * LN_2_LOW;
    // The Taylor polynomial: |r| <= ln(2) / 2.
    let mut p = 1. / 5040.;
    for coefficient in [1. / 720., 1. / 120., 1. / 24., 1. / 6., 0.5, 1., 1.] {
        p = p * r + coefficient;
    }
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(1f32.to_bits()));
    p * power
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_that_of_f64() {
        let mut worst = 0f64;
        for step in -87_000..88_000 {
            let x = step as f32 / 1000.;
            let exact = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) / exact - 1.).abs());
        }
        assert!(worst < 2.5e-7, "{worst:e}");
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(1000.).is_finite() && exp(-1000.) > 0.);
    }

    #[test]
    fn norms_gates_and_rotations_are_those_of_f64() {
        for len in [2, 16, 30, 128, 1000] {
            let number = |index: usize, seed: f64| ((index as f64 + seed) * 12.9898).sin() * 5.;
            let x: Vec<f32> = (0..len).map(|index| number(index, 0.) as f32).collect();
            let weight: Vec<f32> = (0..len).map(|index| number(index, 0.3) as f32).collect();
            let wide: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
            let close = |found: f32, expected: f64| {
                assert!(
                    (f64::from(found) - expected).abs() <= 5e-7 * expected.abs().max(1e-3),
                    "{found} {expected}"
                )
            };

            let rms = (wide.iter().map(|x| x * x).sum::<f64>() / len as f64 + 1e-6).sqrt();
            let mut normed = x.clone();
            rms_norm_in_place(&mut normed, &weight, 1e-6);
            for ((found, x), weight) in normed.iter().zip(&wide).zip(&weight) {
                close(*found, x / rms * f64::from(*weight));
            }

            let mut gated = x.clone();
            silu_mul(&mut gated, &weight);
            for ((found, x), up) in gated.iter().zip(&wide).zip(&weight) {
                close(*found, x / (1. + (-x).exp()) * f64::from(*up));
            }

            let angles: Vec<f64> = (0..len / 2).map(|pair| number(pair, 0.7)).collect();
            let (cos, sin): (Vec<f32>, Vec<f32>) =
                angles.iter().map(|angle| (angle.cos() as f32, angle.sin() as f32)).unzip();
            let mut rotated = x.clone();
            rotate(&mut rotated, &cos, &sin);
            for (pair, angle) in angles.iter().enumerate() {
                let (a, b) = (wide[pair], wide[pair + len / 2]);
                let size = (a * a + b * b).sqrt();
                assert!(
                    (f64::from(rotated[pair]) - (a * angle.cos() - b * angle.sin())).abs() <= 3e-7 * size
                );
                assert!(
                    (f64::from(rotated[pair + len / 2]) - (a * angle.sin() + b * angle.cos())).abs()
                        <= 3e-7 * size
                );
            }
        }
    }
}
