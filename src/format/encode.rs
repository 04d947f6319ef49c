//! Scalar encode, bit for bit what `mx.quantize` of mlx 0.32.4 computes on a CPU, but for [`encode_afq`].
//!
//! The arithmetic happens partly in f32 and partly in the dtype `T` of the weights; the roundings
//! to `T` below are the ones that MLX makes.

use super::decode::NVFP4_MAX;
use super::element::{e4m3_to_f32, f32_to_e4m3, Real, E2M1, E2M1_MAX, E4M3_MAX};
use super::packing::pack;
use super::QuantFormat;

/// Smallest affine scale, as in MLX.
const SMALLEST_SCALE: f32 = 1e-7;

/// Encodes one row of K finite weights into an affine format.
///
/// `words` receives `K * bits / 32` words, `scales` and `biases` `K / group_size` numbers each.
/// The end of a group with the larger magnitude becomes code 0 (for 1 bit: the minimum does), which
/// makes about half of all scales negative.
///
/// # Panics
/// If `group_size` is 0; in builds that check for overflow, if `bits` is 32 or more.
/// [`QuantFormat::affine`] refuses both.
pub fn encode_affine<T: Real>(
    weights: &[T],
    bits: usize,
    group_size: usize,
    words: &mut [u32],
    scales: &mut [T],
    biases: &mut [T],
) {
    let largest_code = ((1u32 << bits) - 1) as f32;
    let (numbers, mut codes) = (widened(weights), vec![0u8; weights.len()]);
    let groups = numbers.chunks(group_size).zip(codes.chunks_mut(group_size));
    for ((group, codes), (scale_out, bias_out)) in groups.zip(scales.iter_mut().zip(biases)) {
        let (scale, bias) = affine_parameters(group, bits, largest_code);
        for (code, weight) in codes.iter_mut().zip(group) {
            // Between whole numbers, the order of rounding and clamping does not matter.
            *code = small_integer(clamped((weight - bias) / scale, largest_code));
        }
        *scale_out = T::from_f32(scale);
        *bias_out = T::from_f32(bias);
    }
    pack(&codes, bits, words);
}

/// Encodes one row of K finite weights into an affine format as mistral.rs does on a CPU: the minimum of a group becomes
/// code 0, the maximum the largest code.
///
/// Receives what [`encode_affine`] does.
///
/// # Panics
/// As [`encode_affine`].
pub fn encode_afq<T: Real>(
    weights: &[T],
    bits: usize,
    group_size: usize,
    words: &mut [u32],
    scales: &mut [T],
    biases: &mut [T],
) {
    let largest_code = ((1u32 << bits) - 1) as f32;
    let (numbers, mut codes) = (widened(weights), vec![0u8; weights.len()]);
    let groups = numbers.chunks(group_size).zip(codes.chunks_mut(group_size));
    for ((group, codes), (scale_out, bias_out)) in groups.zip(scales.iter_mut().zip(biases)) {
        let (low, high) = (
            group.iter().copied().fold(f32::INFINITY, f32::min),
            group.iter().copied().fold(f32::NEG_INFINITY, f32::max),
        );
        let scale = (high - low) / largest_code;
        for (code, weight) in codes.iter_mut().zip(group) {
            // Of a group of one number, whose scale is zero, all codes are 0.
            let steps = clamped((weight - low) / scale, largest_code);
            let even = small_integer(steps);
            // Ties away from zero: no code above the largest is half a step away.
            *code = even + u8::from(steps - f32::from(even) == 0.5);
        }
        *scale_out = T::from_f32(scale);
        *bias_out = T::from_f32(low);
    }
    pack(&codes, bits, words);
}

fn widened<T: Real>(weights: &[T]) -> Vec<f32> {
    let mut numbers = vec![0.; weights.len()];
    T::widen(weights, &mut numbers);
    numbers
}

/// A number from 0 to `largest`; 0 for NaN.
#[inline(always)]
pub(super) fn clamped(value: f32, largest: f32) -> f32 {
    let value = if value > 0. { value } else { 0. };
    if value < largest {
        value
    } else {
        largest
    }
}

/// A number from 0 to 255, rounded with ties to even, in instructions that every machine has: from 2^23 on there are
/// whole numbers only, whose lowest bits are those of the number.
#[inline(always)]
pub(super) fn small_integer(value: f32) -> u8 {
    const WHOLE: f32 = (1 << 23) as f32;
    (value + WHOLE).to_bits() as u8
}

/// The smallest and the largest number of a group, in as many lanes as vectors may have.
fn ends(group: &[f32]) -> (f32, f32) {
    const LANES: usize = 16;
    let smaller = |a: f32, b: f32| if b < a { b } else { a };
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let (mut low, mut high) = ([f32::INFINITY; LANES], [f32::NEG_INFINITY; LANES]);
    let (chunks, rest) = group.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            low[lane] = smaller(low[lane], chunk[lane]);
            high[lane] = larger(high[lane], chunk[lane]);
        }
    }
    for (lane, weight) in rest.iter().enumerate() {
        low[lane] = smaller(low[lane], *weight);
        high[lane] = larger(high[lane], *weight);
    }
    for half in [8, 4, 2, 1] {
        for lane in 0..half {
            low[lane] = smaller(low[lane], low[lane + half]);
            high[lane] = larger(high[lane], high[lane + half]);
        }
    }
    (low[0], high[0])
}

/// Scale and bias of a group, not yet rounded to the dtype of the weights.
fn affine_parameters(group: &[f32], bits: usize, largest_code: f32) -> (f32, f32) {
    let (low, high) = ends(group);
    if bits == 1 {
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

/// Encodes one row of K finite weights into MXFP4 or MXFP8.
///
/// `words` receives `K * bits / 32` words, `scales` `K / 32` E8M0 bytes: the smallest power of two
/// that keeps the group within the element type's range.
///
/// # Panics
/// If `format` is an affine one with groups of 0.
pub fn encode_mx<T: Real>(weights: &[T], format: QuantFormat, words: &mut [u32], scales: &mut [u8]) {
    let eight_bit = format == QuantFormat::Mxfp8;
    let largest = if eight_bit { E4M3_MAX } else { E2M1_MAX };
    let mut values = widened(weights);
    for (group, scale) in values.chunks_mut(format.group_size()).zip(scales) {
        let exponent = ceil_log2(round::<T>(absmax(group) / largest));
        *scale = (exponent + 127) as u8;
        // 2^exponent is representable in T whenever T holds a number of that size.
        let divisor = round::<T>(2f64.powi(exponent) as f32);
        group.iter_mut().for_each(|weight| *weight /= divisor);
    }
    let values = widened(&T::round_all(values));
    let codes: Vec<u8> = match eight_bit {
        true => values.iter().map(|value| f32_to_e4m3(*value)).collect(),
        false => values.iter().map(|value| nearest_e2m1::<T>(*value)).collect(),
    };
    pack(&codes, format.bits(), words);
}

/// Encodes one row of K finite weights into NVFP4.
///
/// `words` receives `K / 8` words, `scales` `K / 16` E4M3 bytes. `absmax_of_tensor` is MLX's
/// `global_scale`; without it, magnitudes above [`NVFP4_MAX`] saturate.
pub fn encode_nvfp4<T: Real>(
    weights: &[T],
    absmax_of_tensor: Option<f32>,
    words: &mut [u32],
    scales: &mut [u8],
) {
    let scale_of_scales = absmax_of_tensor.map_or(1.0, |absmax| NVFP4_MAX / absmax);
    let mut values = widened(weights);
    for (group, scale) in values.chunks_mut(QuantFormat::Nvfp4.group_size()).zip(scales) {
        *scale = f32_to_e4m3(round::<T>(absmax(group) / E2M1_MAX) * scale_of_scales);
        let divisor = e4m3_to_f32(*scale);
        group.iter_mut().for_each(|weight| *weight /= divisor);
    }
    let values = widened(&T::round_all(values));
    let codes: Vec<u8> = values.iter().map(|value| nearest_e2m1::<f32>(value * scale_of_scales)).collect();
    pack(&codes, 4, words);
}

fn absmax(group: &[f32]) -> f32 {
    let (low, high) = ends(group);
    low.abs().max(high.abs())
}

fn round<T: Real>(value: f32) -> f32 {
    T::from_f32(value).to_f32()
}

/// Smallest `e` with `2^e >= value`, at least -127; 0 for a value of zero.
fn ceil_log2(value: f32) -> i32 {
    if value == 0.0 {
        return 0;
    }
    // f64 has no subnormals here, so its exponent field is the logarithm rounded down.
    let bits = f64::from(value).to_bits();
    let floor = (bits >> 52) as i32 - 1023;
    let is_power_of_two = bits & ((1 << 52) - 1) == 0;
    (floor + i32::from(!is_power_of_two)).max(-127)
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
    let mut smallest = round::<T>(magnitude);
    for (code, element) in E2M1.iter().enumerate().take(8).skip(1) {
        let distance = round::<T>(magnitude - element).abs();
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
