//! Unsigned integer codes with a scale and a bias for each group: `q * scale + bias`.

use super::bits::pack;
use super::clip_search::{groups, nearest, Group, Numbers, Row};
use super::numeric::{clamped, ends, small_integer, widened, Real};
use super::{Bits, QuantFormat};
use std::ops::RangeInclusive;

/// Smallest affine scale, as in MLX.
const SMALLEST_SCALE: f32 = 1e-7;

/// Quantizes a row of K finite weights as `mx.quantize` of mlx 0.32.4 does on a CPU, bit for bit.
///
/// `words` receives `K * bits / 32` words, `scales` and `biases` `K / group_size` numbers each. The end of a group with
/// the larger magnitude becomes code 0 (for 1 bit: the minimum does), which makes about half of all scales negative.
pub(super) fn quantize_mlx<T: Real>(
    (bits, group_size): (Bits, usize),
    weights: &[T],
    words: &mut [u32],
    scales: &mut [T],
    biases: &mut [T],
) {
    let (numbers, mut codes) = (widened(weights), vec![0u8; weights.len()]);
    let groups = numbers.chunks(group_size).zip(codes.chunks_mut(group_size));
    for ((group, codes), (scale_out, bias_out)) in groups.zip(scales.iter_mut().zip(biases)) {
        let (scale, bias) = quantize_group(bits, group, codes);
        *scale_out = T::from_f32(scale);
        *bias_out = T::from_f32(bias);
    }
    pack(&codes, bits.get(), words);
}

/// Quantizes one group as [`quantize_mlx`] does, one code in a byte; returns scale and bias, not yet rounded.
pub(crate) fn quantize_group(bits: Bits, group: &[f32], codes: &mut [u8]) -> (f32, f32) {
    let largest_code = f32::from(bits.largest_code());
    let (scale, bias) = scale_and_bias(group, bits, largest_code);
    for (code, weight) in codes.iter_mut().zip(group) {
        // Between whole numbers, the order of rounding and clamping does not matter.
        *code = small_integer(clamped((weight - bias) / scale, largest_code));
    }
    (scale, bias)
}

/// Quantizes a row of K finite weights as mistral.rs does on a CPU (AFQ): the minimum of a group becomes code 0, the
/// maximum the largest code. The arguments are those of [`quantize_mlx`].
pub(super) fn quantize_afq<T: Real>(
    (bits, group_size): (Bits, usize),
    weights: &[T],
    words: &mut [u32],
    scales: &mut [T],
    biases: &mut [T],
) {
    let largest_code = f32::from(bits.largest_code());
    let (numbers, mut codes) = (widened(weights), vec![0u8; weights.len()]);
    let groups = numbers.chunks(group_size).zip(codes.chunks_mut(group_size));
    for ((group, codes), (scale_out, bias_out)) in groups.zip(scales.iter_mut().zip(biases)) {
        let (low, high) = (
            group.iter().copied().fold(f32::INFINITY, f32::min),
            group.iter().copied().fold(f32::NEG_INFINITY, f32::max),
        );
        let scale = (high - low) / largest_code;
        for (code, weight) in codes.iter_mut().zip(group) {
            // A group of equal numbers has the scale zero and codes of 0 only.
            let steps = clamped((weight - low) / scale, largest_code);
            let even = small_integer(steps);
            // Ties away from zero: no code above the largest is half a step away.
            *code = even + u8::from(steps - f32::from(even) == 0.5);
        }
        *scale_out = T::from_f32(scale);
        *bias_out = T::from_f32(low);
    }
    pack(&codes, bits.get(), words);
}

/// Quantizes a row of K finite weights to codes of which the middle one is zero, with the scales of `calculate_qparams` of
/// compressed-tensors 0.20. Codes are those of the rounded scale. The arguments are those of [`quantize_mlx`].
pub(super) fn quantize_midpoint<T: Real>(
    (bits, group_size): (Bits, usize),
    weights: &[T],
    words: &mut [u32],
    scales: &mut [T],
    biases: &mut [T],
) {
    let (largest_code, midpoint) = (f32::from(bits.largest_code()), f32::from(bits.midpoint()));
    let (numbers, mut codes) = (widened(weights), vec![0u8; weights.len()]);
    let groups = numbers.chunks(group_size).zip(codes.chunks_mut(group_size));
    for ((group, codes), (scale_out, bias_out)) in groups.zip(scales.iter_mut().zip(biases)) {
        let largest = group.iter().fold(0f32, |largest, weight| largest.max(weight.abs()));
        *scale_out = T::from_f32(largest / (largest_code / 2.));
        let scale = scale_out.to_f32();
        for (code, weight) in codes.iter_mut().zip(group) {
            // Numbers too small for a scale are zero.
            let steps = if scale == 0. { 0. } else { weight / scale };
            *code = small_integer(clamped(steps + midpoint, largest_code));
        }
        *bias_out = T::from_f32(-(midpoint * scale));
    }
    pack(&codes, bits.get(), words);
}

/// Scale and bias of a group, not yet rounded to the dtype of the weights.
fn scale_and_bias(group: &[f32], bits: Bits, largest_code: f32) -> (f32, f32) {
    let (low, high) = ends(group);
    if bits == Bits::One {
        // The first of equal zeros, whose sign ends up in the bias.
        let first = group.iter().copied().find(|weight| *weight == low);
        return ((high - low).max(SMALLEST_SCALE), first.unwrap_or(low));
    }
    let low_is_larger = low.abs() > high.abs();
    let step = ((high - low) / largest_code).max(SMALLEST_SCALE);
    let (scale, edge) = if low_is_larger { (step, low) } else { (-step, high) };
    let steps_to_edge = (edge / scale).round_ties_even();
    if steps_to_edge == 0.0 {
        (scale, 0.0)
    } else {
        // Zero is then a multiple of the scale away from the edge, hence exact.
        (edge / steps_to_edge, edge)
    }
}

/// The parts of its range that a group is quantized with, in sixteenths.
const PARTS: RangeInclusive<u8> = 7..=16;

/// How often scale and codes of a group follow each other at most.
const ROUNDS: usize = 8;

/// Clip search in a quantized row: ranges from the whole down to seven sixteenths, about its middle, give codes; scale
/// and bias are then those of the least squares for these codes, and the codes the nearest ones.
pub(super) fn improve<T: Real>(
    format: QuantFormat,
    bits: Bits,
    row: Row<T>,
    words: &mut [u32],
    scales: &mut [T],
    biases: &mut [T],
) {
    let parameters = scales.iter_mut().zip(biases);
    for ((numbers, words), (scale, bias)) in groups(format, row, words).zip(parameters) {
        let weights = &numbers.weights;
        let mut group = Group::new(format, &numbers, words, scale.to_f32(), bias.to_f32());
        let mut best = None;
        let mut attempt = |group: &mut Group, codes: &[u8]| {
            let fits = least_squares(&numbers, codes, bits);
            let better = fits
                .into_iter()
                .filter(|(scale, bias): &(T, T)| group.improves(scale.to_f32(), bias.to_f32()));
            let better = better.last();
            best = better.or(best);
            better.is_some()
        };
        for part in PARTS.rev() {
            let (scale, bias) = range(weights, bits, f32::from(part) / 16.);
            let codes = nearest(format, weights, scale, bias);
            attempt(&mut group, &codes);
        }
        for _ in 0..ROUNDS {
            let codes = group.codes().to_vec();
            if !attempt(&mut group, &codes) {
                break;
            }
        }
        if let Some((better_scale, better_bias)) = best {
            (*scale, *bias) = (better_scale, better_bias);
            pack(group.codes(), bits.get(), words);
        }
    }
}

/// Scale and bias whose codes reach over a part of the group's range, about its middle.
fn range(weights: &[f32], bits: Bits, part: f32) -> (f32, f32) {
    let low = weights.iter().copied().fold(f32::INFINITY, f32::min);
    let high = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    // Halves, whose difference can't overflow.
    let (middle, half) = (low / 2. + high / 2., (high / 2. - low / 2.) * part);
    (half / f32::from(bits.largest_code()) * 2., middle - half)
}

/// Scale and bias of the smallest squared error with these codes, as far as `T` goes; and the same with the codes
/// counted from the other end, whose bias is the other end, too. Nothing if all codes are equal.
fn least_squares<T: Real>(numbers: &Numbers, codes: &[u8], bits: Bits) -> Vec<(T, T)> {
    let pairs = || {
        let pairs = numbers.weights.iter().zip(codes).zip(numbers.columns());
        pairs.map(|((weight, code), counts)| (f64::from(*weight), f64::from(*code), counts))
    };
    let count: f64 = numbers.columns().sum();
    let (weight_sum, code_sum) = pairs()
        .fold((0., 0.), |sums, (weight, code, counts)| (sums.0 + weight * counts, sums.1 + code * counts));
    let (weight_mean, code_mean) = (weight_sum / count, code_sum / count);
    let (cross, square) = pairs().fold((0., 0.), |sums, (weight, code, counts)| {
        let code = code - code_mean;
        (sums.0 + code * (weight - weight_mean) * counts, sums.1 + code * code * counts)
    });
    if square == 0. {
        return Vec::new();
    }
    let scale = T::from_f32((cross / square) as f32).to_f32();
    let other_mean = f64::from(bits.largest_code()) - code_mean;
    let fit = |scale: f32, code_mean: f64| {
        let bias = weight_mean - f64::from(scale) * code_mean;
        (T::from_f32(scale), T::from_f32(bias as f32))
    };
    vec![fit(scale, code_mean), fit(-scale, other_mean)]
}

#[cfg(test)]
mod tests {
    use super::super::{unpack, GroupScales, QuantizedRows, Quantizer};
    use super::*;
    use half::bf16;

    /// No number is further away than half a step, or than the clipped end.
    #[test]
    fn the_middle_code_is_zero() {
        for bits in [4, 8] {
            let format = QuantFormat::affine(bits, 32).unwrap();
            let largest = ((1 << bits) - 1) as f32;
            for seed in 0..300u32 {
                let number = |i: u32| {
                    let x = (i + 1).wrapping_mul(2_654_435_761).wrapping_mul(seed * 2 + 1) >> 8;
                    let x = x as f32 / (1 << 24) as f32 - (seed % 7) as f32 / 6.;
                    x * 2f32.powi(seed as i32 % 30 - 20)
                };
                let weights: Vec<_> = (0..32).map(|i| bf16::from_f32(number(i))).collect();
                let rows = QuantizedRows::quantize(format, Quantizer::Midpoint, &weights, 32, None).unwrap();
                let GroupScales::Float { scales, biases } = rows.scales else { panic!() };
                let (scale, middle) = (scales[0].to_f32(), (largest + 1.) / 2.);
                // A power of two: nothing is rounded.
                assert_eq!(biases[0].to_f32(), -(middle * scale));
                let mut codes = [0u8; 32];
                unpack(&rows.words, bits, &mut codes);
                for (code, weight) in codes.iter().zip(&weights) {
                    let error = ((f32::from(*code) - middle) * scale - weight.to_f32()).abs();
                    // Codes reach half a step less far up than down, and scales are rounded to eight bits.
                    assert!(error <= scale * (0.5 + largest / 512.), "{error} of {scale}");
                }
            }
        }
        let format = QuantFormat::affine(4, 32).unwrap();
        let zeros = [bf16::ZERO; 32];
        let rows = QuantizedRows::quantize(format, Quantizer::Midpoint, &zeros, 32, None).unwrap();
        assert_eq!(rows.dequantize(format, 32, 1.).unwrap(), [0.; 32]);
    }
}
