//! What a step does between matmuls, on rows of f32. Loops are written so that the compiler makes vectors of them.

use super::super::isa::vectorized;
use crate::backend::step::{Activation, ExpertGating, Norm, UNIT_EPS};
use std::f32::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

/// Sums of independent lanes, which vectorize and lose less to rounding than one running sum.
const LANES: usize = 16;

/// What a norm makes of the numbers that it is over.
#[derive(Clone, Copy)]
pub(super) struct Moments {
    mean: f32,
    /// One over the root of the mean square.
    inverse: f32,
}

impl Moments {
    pub(super) fn new(norm: &Norm, x: &[f32]) -> Self {
        vectorized!(moments(norm: &Norm, x: &[f32]) -> Moments)
    }

    /// Normalizes some of the numbers, whose weights and biases begin at `first`.
    pub(super) fn apply(self, norm: &Norm, first: usize, x: &[f32], out: &mut [f32]) {
        let of = self;
        vectorized!(apply(of: Moments, norm: &Norm, first: usize, x: &[f32], out: &mut [f32]));
    }
}

#[inline(always)]
fn moments(norm: &Norm, x: &[f32]) -> Moments {
    let len = x.len() as f64;
    let mean = if norm.subtracts_mean { (sum(x, |x| x) / len) as f32 } else { 0. };
    let square = sum(x, |x| (x - mean) * (x - mean)) / len;
    Moments { mean, inverse: (1. / (square + f64::from(norm.eps)).sqrt()) as f32 }
}

#[inline(always)]
fn apply(of: Moments, norm: &Norm, first: usize, x: &[f32], out: &mut [f32]) {
    let Moments { mean, inverse } = of;
    match from(&norm.weight, first) {
        None => {
            for (out, x) in out.iter_mut().zip(x) {
                *out = (x - mean) * inverse;
            }
        }
        Some(weight) => {
            for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
                *out = (x - mean) * inverse * weight;
            }
        }
    }
    if let Some(bias) = from(&norm.bias, first) {
        for (out, bias) in out.iter_mut().zip(bias) {
            *out += bias;
        }
    }
}

/// The numbers from `first` on, if there are any.
fn from(numbers: &Option<Vec<f32>>, first: usize) -> Option<&[f32]> {
    numbers.as_ref().and_then(|numbers| numbers.get(first..))
}

/// The sum of what `term` makes of numbers.
#[inline(always)]
fn sum(x: &[f32], term: impl Fn(f32) -> f32) -> f64 {
    let mut sums = [0f32; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest: f32 = chunks.remainder().iter().map(|x| term(*x)).sum();
    for x in chunks {
        for (sum, x) in sums.iter_mut().zip(x) {
            *sum += term(*x);
        }
    }
    sums.iter().map(|sum| f64::from(*sum)).sum::<f64>() + f64::from(rest)
}

/// Brings a head to a length, as far as it has one: to the square of what it has, a little is added.
pub(super) fn to_length(x: &mut [f32], length: f32) {
    let square = squares(x) + UNIT_EPS;
    let factor = (f64::from(length) / square.sqrt()) as f32;
    x.iter_mut().for_each(|x| *x *= factor);
}

fn squares(x: &[f32]) -> f64 {
    vectorized!(sum_of_squares(x: &[f32]) -> f64)
}

#[inline(always)]
fn sum_of_squares(x: &[f32]) -> f64 {
    sum(x, |x| x * x)
}

/// `ln(1 + exp(x))`.
pub(super) fn softplus(x: f32) -> f32 {
    x.max(0.) + (-x.abs()).exp().ln_1p()
}

/// `1 / (1 + exp(-x))`.
pub(super) fn sigmoid(x: f32) -> f32 {
    1. / (1. + exp(-x))
}

/// Multiplies `x` by the sigmoids of `gates`.
pub(super) fn let_through(x: &mut [f32], gates: &[f32]) {
    vectorized!(times_sigmoids(x: &mut [f32], gates: &[f32]));
}

#[inline(always)]
fn times_sigmoids(x: &mut [f32], gates: &[f32]) {
    for (x, gate) in x.iter_mut().zip(gates) {
        *x /= 1. + exp(-gate);
    }
}

/// The norm of a row of hidden states, or the row itself.
pub(super) fn normalize(norm: Option<&Norm>, x: &[f32], out: &mut [f32]) {
    match norm {
        Some(norm) => Moments::new(norm, x).apply(norm, 0, x, out),
        None => out.iter_mut().zip(x).for_each(|(out, x)| *out = *x),
    }
}

/// `activation(gate) * up` in place of `gate`; `activation(gate)` without `up`.
pub(super) fn activate(activation: Activation, gate: &mut [f32], up: Option<&[f32]>) {
    vectorized!(activate_all(activation: Activation, gate: &mut [f32], up: Option<&[f32]>));
}

#[inline(always)]
fn activate_all(activation: Activation, gate: &mut [f32], up: Option<&[f32]>) {
    match activation {
        Activation::Silu => activate_by(|x| x / (1. + exp(-x)), gate, up),
        Activation::Gelu => activate_by(|x| 0.5 * x * erfc(-x * FRAC_1_SQRT_2), gate, up),
        // (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y)).
        Activation::GeluTanh => activate_by(
            |x| x / (1. + exp(-2. * FRAC_2_SQRT_PI * FRAC_1_SQRT_2 * x * (1. + 0.044715 * x * x))),
            gate,
            up,
        ),
        Activation::Relu2 => activate_by(|x| x.max(0.) * x, gate, up),
    }
}

#[inline(always)]
fn activate_by(activation: impl Fn(f32) -> f32, gate: &mut [f32], up: Option<&[f32]>) {
    match up {
        Some(up) => {
            for (gate, up) in gate.iter_mut().zip(up) {
                *gate = activation(*gate) * up;
            }
        }
        None => {
            for gate in gate {
                *gate = activation(*gate);
            }
        }
    }
}

/// What joins an expert's projections, in place of `gate`.
pub(super) fn join(gating: ExpertGating, gate: &mut [f32], up: &[f32]) {
    match gating {
        ExpertGating::Activation(activation) => activate(activation, gate, Some(up)),
        ExpertGating::Clamped { alpha, limit } => {
            for (gate, up) in gate.iter_mut().zip(up) {
                // Comparisons leave NaN as it is.
                let g = if *gate > limit { limit } else { *gate };
                *gate = g / (1. + exp(-alpha * g)) * (up.clamp(-limit, limit) + 1.);
            }
        }
    }
}

/// Multiplies each row of `x` by the sigmoid of its logit.
pub(super) fn weigh(x: &mut [f32], width: usize, logits: &[f32]) {
    for (row, logit) in x.chunks_exact_mut(width.max(1)).zip(logits) {
        let share = sigmoid(*logit);
        row.iter_mut().for_each(|x| *x *= share);
    }
}

/// `scale * x`, ended by `softcap * tanh(x / softcap)` if there is one.
pub(super) fn scale_and_cap(x: &mut [f32], scale: f32, softcap: Option<f32>) {
    if scale != 1. {
        x.iter_mut().for_each(|x| *x *= scale);
    }
    if let Some(cap) = softcap {
        x.iter_mut().for_each(|x| *x = cap * tanh(*x / cap));
    }
}

/// Turns a head's first elements: element i pairs with element i + half; `cos` and `sin` have a number for each pair.
pub(super) fn turn(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (first, second) = head.split_at_mut(cos.len().min(head.len()));
    for (((first, second), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        (*first, *second) = (*first * cos - *second * sin, *first * sin + *second * cos);
    }
}

/// Puts the first of each pair of neighbours into the first half, and the others into the second.
pub(super) fn part_neighbours(x: &mut [f32]) {
    let copy = x.to_vec();
    let (first, second) = x.split_at_mut(copy.len() / 2);
    for (pair, (first, second)) in copy.chunks_exact(2).zip(first.iter_mut().zip(second)) {
        if let [a, b] = pair {
            (*first, *second) = (*a, *b);
        }
    }
}

/// tanh within a few units of the last place of 1.
#[inline(always)]
fn tanh(x: f32) -> f32 {
    let small = exp(-2. * x.abs());
    ((1. - small) / (1. + small)).copysign(x)
}

/// 1 minus the error function, to 6 digits of what it is: a polynomial of Numerical Recipes, 6.2.
#[inline(always)]
fn erfc(x: f32) -> f32 {
    const COEFFICIENTS: [f32; 10] = [
        0.170_872_77,
        -0.822_152_2,
        1.488_515_9,
        -1.135_204,
        0.278_868_07,
        -0.186_288_06,
        0.096_784_18,
        0.374_091_96,
        1.000_023_7,
        -1.265_512_2,
    ];
    let size = x.abs();
    let t = 1. / (1. + 0.5 * size);
    let power = COEFFICIENTS.into_iter().fold(0., |power, coefficient| power * t + coefficient);
    let above = t * exp(power - size * size);
    if x < 0. {
        2. - above
    } else {
        above
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
    fn norms_and_turns_are_those_of_f64() {
        for len in [2, 16, 30, 128, 1000] {
            let number = |index: usize, seed: f64| ((index as f64 + seed) * 12.9898).sin() * 5.;
            let x: Vec<f32> = (0..len).map(|index| number(index, 0.) as f32).collect();
            let weight: Vec<f32> = (0..len).map(|index| number(index, 0.3) as f32).collect();
            let wide: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();

            for (subtracts_mean, has_bias) in [(false, false), (true, false), (true, true)] {
                let bias = has_bias.then(|| x.clone());
                let norm = Norm { weight: Some(weight.clone()), bias, subtracts_mean, eps: 1e-6 };
                let mean = if subtracts_mean { wide.iter().sum::<f64>() / len as f64 } else { 0. };
                let square = wide.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / len as f64;
                let mut normed = vec![0.; len];
                normalize(Some(&norm), &x, &mut normed);
                for ((found, x), weight) in normed.iter().zip(&wide).zip(&weight) {
                    let bias = if has_bias { *x } else { 0. };
                    let unit = (x - mean) / (square + 1e-6).sqrt() * f64::from(*weight);
                    assert!((f64::from(*found) - unit - bias).abs() <= 1e-6 * (unit.abs() + bias.abs() + 1.));
                }
            }

            let angles: Vec<f64> = (0..len / 2).map(|pair| number(pair, 0.7)).collect();
            let (cos, sin): (Vec<f32>, Vec<f32>) =
                angles.iter().map(|angle| (angle.cos() as f32, angle.sin() as f32)).unzip();
            let mut rotated = x.clone();
            turn(&mut rotated, &cos, &sin);
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
    /// By candle, whose operations run the same models layer by layer.
    #[test]
    fn activations_are_those_of_candle() {
        use candle_core::{Device, Module, Tensor};
        let x: Vec<f32> = (-2000..2000).map(|step| step as f32 / 100.).collect();
        let up: Vec<f32> = x.iter().map(|x| 1. + x.cos()).collect();
        for (activation, expected) in [
            (Activation::Silu, candle_nn::Activation::Silu),
            (Activation::Gelu, candle_nn::Activation::Gelu),
            (Activation::GeluTanh, candle_nn::Activation::GeluPytorchTanh),
            (Activation::Relu2, candle_nn::Activation::Relu2),
        ] {
            let expected = expected.forward(&Tensor::new(x.as_slice(), &Device::Cpu).unwrap()).unwrap();
            let expected = expected.to_vec1::<f32>().unwrap();
            let (mut alone, mut gated) = (x.clone(), x.clone());
            activate(activation, &mut alone, None);
            activate(activation, &mut gated, Some(&up));
            for (((alone, gated), expected), (x, up)) in
                alone.iter().zip(&gated).zip(&expected).zip(x.iter().zip(&up))
            {
                let bound = 3e-7 * (x.abs() + expected.abs());
                assert!((alone - expected).abs() <= bound, "{activation:?} of {x}: {alone} {expected}");
                assert_eq!((alone * up).to_bits(), gated.to_bits());
            }
        }
    }

    #[test]
    fn logits_end_at_the_softcap() {
        let logits: Vec<f32> = (-3000..3000).map(|step| step as f32 / 20.).collect();
        let mut found = logits.clone();
        scale_and_cap(&mut found, 0.5, Some(30.));
        for (found, logit) in found.iter().zip(&logits) {
            let expected = 30. * (f64::from(*logit) * 0.5 / 30.).tanh();
            assert!((f64::from(*found) - expected).abs() < 6e-6, "{logit}: {found} {expected}");
        }
    }
}
