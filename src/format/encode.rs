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
pub fn encode_affine<T: Real>(
    weights: &[T],
    bits: usize,
    group_size: usize,
    words: &mut [u32],
    scales: &mut [T],
    biases: &mut [T],
) {
    let largest_code = ((1u32 << bits) - 1) as f32;
    let mut codes = vec![0u8; weights.len()];
    let groups = weights.chunks(group_size).zip(codes.chunks_mut(group_size));
    for ((group, codes), (scale_out, bias_out)) in groups.zip(scales.iter_mut().zip(biases)) {
        let (scale, bias) = affine_parameters(group, bits, largest_code);
        for (code, weight) in codes.iter_mut().zip(group) {
            let quotient = (weight.to_f32() - bias) / scale;
            // Between whole numbers, the order of rounding and clamping does not matter.
            *code = round_small(quotient.max(0.0).min(largest_code)) as u8;
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
pub fn encode_afq<T: Real>(
    weights: &[T],
    bits: usize,
    group_size: usize,
    words: &mut [u32],
    scales: &mut [T],
    biases: &mut [T],
) {
    let largest_code = ((1u32 << bits) - 1) as f32;
    let mut codes = vec![0u8; weights.len()];
    let groups = weights.chunks(group_size).zip(codes.chunks_mut(group_size));
    for ((group, codes), (scale_out, bias_out)) in groups.zip(scales.iter_mut().zip(biases)) {
        let numbers = || group.iter().map(|weight| weight.to_f32());
        let (low, high) =
            (numbers().fold(f32::INFINITY, f32::min), numbers().fold(f32::NEG_INFINITY, f32::max));
        let scale = (high - low) / largest_code;
        for (code, weight) in codes.iter_mut().zip(numbers()) {
            // Ties away from zero. Of a group of one number, whose scale is zero, all codes are 0.
            let steps = ((weight - low) / scale).round();
            *code = steps.max(0.0).min(largest_code) as u8;
        }
        *scale_out = T::from_f32(scale);
        *bias_out = T::from_f32(low);
    }
    pack(&codes, bits, words);
}

/// `round_ties_even` of a number from 0 to 255, in instructions that every machine has: beyond 2^23 there are
/// whole numbers only.
#[inline(always)]
pub(super) fn round_small(value: f32) -> f32 {
    const WHOLE: f32 = (1 << 23) as f32;
    value + WHOLE - WHOLE
}

/// Scale and bias of a group, not yet rounded to the dtype of the weights.
fn affine_parameters<T: Real>(group: &[T], bits: usize, largest_code: f32) -> (f32, f32) {
    let mut low = f32::INFINITY;
    let mut high = f32::NEG_INFINITY;
    for weight in group {
        let weight = weight.to_f32();
        // Strict comparisons keep the first of equal zeros, whose sign ends up in a 1-bit bias.
        low = if weight < low { weight } else { low };
        high = if weight > high { weight } else { high };
    }
    if bits == 1 {
        return ((high - low).max(SMALLEST_SCALE), low);
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
pub fn encode_mx<T: Real>(weights: &[T], format: QuantFormat, words: &mut [u32], scales: &mut [u8]) {
    let eight_bit = format == QuantFormat::Mxfp8;
    let largest = if eight_bit { E4M3_MAX } else { E2M1_MAX };
    let mut codes = vec![0u8; weights.len()];
    let groups = weights.chunks(format.group_size()).zip(codes.chunks_mut(format.group_size()));
    for ((group, codes), scale) in groups.zip(scales) {
        let exponent = ceil_log2(round::<T>(absmax(group) / largest));
        *scale = (exponent + 127) as u8;
        // 2^exponent is representable in T whenever T holds a number of that size.
        let divisor = round::<T>(2f64.powi(exponent) as f32);
        for (code, weight) in codes.iter_mut().zip(group) {
            let value = round::<T>(weight.to_f32() / divisor);
            *code = if eight_bit { f32_to_e4m3(value) } else { nearest_e2m1::<T>(value) };
        }
    }
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
    let mut codes = vec![0u8; weights.len()];
    let group_size = QuantFormat::Nvfp4.group_size();
    let groups = weights.chunks(group_size).zip(codes.chunks_mut(group_size));
    for ((group, codes), scale) in groups.zip(scales) {
        *scale = f32_to_e4m3(round::<T>(absmax(group) / E2M1_MAX) * scale_of_scales);
        let divisor = e4m3_to_f32(*scale);
        for (code, weight) in codes.iter_mut().zip(group) {
            let value = round::<T>(weight.to_f32() / divisor) * scale_of_scales;
            *code = nearest_e2m1::<f32>(value);
        }
    }
    pack(&codes, 4, words);
}

fn absmax<T: Real>(group: &[T]) -> f32 {
    group.iter().fold(0.0, |largest, weight| weight.to_f32().abs().max(largest))
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
pub(super) fn nearest_e2m1<T: Real>(value: f32) -> u8 {
    // Of a negative number, no positive element is nearer than zero; else all is symmetric.
    let magnitude = value.abs();
    let mut nearest = 0;
    let mut smallest = round::<T>(magnitude);
    for (code, element) in E2M1.iter().enumerate().take(8).skip(1) {
        let distance = round::<T>(magnitude - element).abs();
        if distance < smallest {
            (nearest, smallest) = (code as u8, distance);
        }
    }
    if nearest > 0 && value < 0.0 {
        nearest | 8
    } else {
        nearest
    }
}
