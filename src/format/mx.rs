//! OCP Microscaling formats: a power of two (E8M0) scales each group. MXFP4 has E2M1 elements, MXFP8 E4M3
//! ones, MXINT8 integers.

use super::bits::pack;
use super::clip_search::{improve_byte_scales, Nearby};
use super::numeric::{absmax, rounded, widened, Real};
use super::QuantFormat;

/// Quantizes a row of K finite weights as `mx.quantize` of mlx 0.32.4 does on a CPU, bit for bit.
///
/// `words` receives `K * bits / 32` words, `scales` an E8M0 byte for each group: the smallest power of two that keeps
/// the group within the range of the elements.
pub(super) fn quantize<T: Real>(format: QuantFormat, weights: &[T], words: &mut [u32], scales: &mut [u8]) {
    let element = format.element();
    let (_, largest) = element.range();
    let mut values = widened(weights);
    for (group, scale) in values.chunks_mut(format.group_size()).zip(scales) {
        let exponent = ceil_log2(rounded::<T>(absmax(group) / largest));
        *scale = (exponent + 127) as u8;
        // 2^exponent is representable in T whenever T holds a number of that size.
        let divisor = rounded::<T>(2f64.powi(exponent) as f32);
        group.iter_mut().for_each(|weight| *weight /= divisor);
    }
    let values = widened(&T::round_all(values));
    let codes: Vec<u8> = values.iter().map(|value| element.nearest::<T>(*value)).collect();
    pack(&codes, element.bits(), words);
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

/// Clip search in a quantized row, by the scales nearby.
pub(super) fn improve<T: Real>(format: QuantFormat, weights: &[T], words: &mut [u32], scales: &mut [u8]) {
    // Powers of two reach far; a larger one may be better since the steps of E2M1 are not even.
    improve_byte_scales(format, weights, words, scales, Nearby { below: 2, above: 1, last: 0xFE });
}
