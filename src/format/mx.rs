//! OCP Microscaling formats: a power of two (E8M0) scales each group. MXFP4 has E2M1 elements, MXFP8 E4M3
//! ones, MXINT8 integers.

use super::bits::pack;
use super::clip_search::{improve_byte_scales, Nearby, Row};
use super::numeric::{absmax, rounded, widened, Real};
use super::QuantFormat;

/// Quantizes a row of K finite weights; to MXFP4 and MXFP8 as `mx.quantize` of mlx 0.32.4 does on a CPU, bit for bit.
///
/// `words` receives `K * bits / 32` words, `scales` an E8M0 byte for each group: the smallest power of two that keeps
/// the group within the range of the elements.
pub(super) fn quantize<T: Real>(format: QuantFormat, weights: &[T], words: &mut [u32], scales: &mut [u8]) {
    let element = format.element();
    let (_, largest) = element.range();
    let mut values = widened(weights);
    for (group, scale) in values.chunks_mut(format.group_size()).zip(scales) {
        let power = |exponent| rounded::<T>(2f64.powi(exponent) as f32);
        let exponent = ceil_log2(rounded::<T>(absmax(group) / largest));
        // The largest numbers of T are just above what MXINT8 holds with the largest power of two in T: they saturate.
        let exponent = if power(exponent).is_finite() { exponent } else { exponent - 1 };
        *scale = (exponent + 127) as u8;
        let divisor = power(exponent);
        group.iter_mut().for_each(|weight| *weight /= divisor);
    }
    let values = widened(&T::round_all(values));
    pack(&element.nearest_all::<T>(values), element.bits(), words);
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
pub(super) fn improve<T: Real>(format: QuantFormat, row: Row<T>, words: &mut [u32], scales: &mut [u8]) {
    // Powers of two reach far; a larger one may be better since the steps of E2M1 are not even.
    improve_byte_scales(format, row, words, scales, Nearby { below: 2, above: 1, last: 0xFE });
}

#[cfg(test)]
mod tests {
    use super::super::{QuantizedRows, Quantizer};
    use super::*;
    use half::f16;

    /// Weights by definition: of a group whose largest is 1.5, steps are 2^-6, from -127 to 127 of them.
    #[test]
    fn mxint8_rounds_to_steps_of_the_power_of_two() {
        let mut weights = [0f32; 32];
        weights[..6].copy_from_slice(&[1.5, -1.5, 1. / 64., 0.7 / 64., 0.3 / 64., 2.5 / 64.]);
        let rows = QuantizedRows::quantize(QuantFormat::MXINT8, Quantizer::Mlx, &weights, 32, None).unwrap();
        let numbers = rows.dequantize(QuantFormat::MXINT8, 32, 1.).unwrap();
        // Ties to even.
        assert_eq!(numbers[..6], [1.5, -1.5, 1. / 64., 1. / 64., 0., 2. / 64.]);
        assert_eq!(rows.words[0].to_le_bytes(), [96, -96i8 as u8, 1, 1]);
        // 127 steps of 2^-6 are enough for 127/64 and too few for the next number.
        for (largest, step) in [(127. / 64., 1. / 64.), (128. / 64., 1. / 32.)] {
            let rows = QuantizedRows::quantize(QuantFormat::MXINT8, Quantizer::Mlx, &[largest; 32], 32, None);
            let numbers = rows.unwrap().dequantize(QuantFormat::MXINT8, 32, 1.).unwrap();
            assert_eq!((numbers[0], numbers[0] % step), (largest, 0.));
        }
    }

    /// The largest numbers of a dtype need a power of two that the dtype, or E8M0, does not have: they are clipped to
    /// 127 / 128 of it.
    #[test]
    fn the_largest_numbers_saturate() {
        fn check<T: Real>(largest: T) {
            let format = QuantFormat::MXINT8;
            let rows = QuantizedRows::quantize(format, Quantizer::Mlx, &[largest; 32], 32, None).unwrap();
            let number = rows.dequantize(format, 32, 1.).unwrap()[0];
            let off = (f64::from(number) / f64::from(largest.to_f32()) - 1.).abs();
            assert!(off <= 1. / 128., "{number} for {}", largest.to_f32());
        }
        check(f16::MAX);
        check(f32::MAX);
        check(half::bf16::MAX);
    }
}
