//! NF4 and FP4 of bitsandbytes: 4-bit codes select quantiles of a normal distribution, or small floats over the largest
//! of them, scaled by the largest magnitude of a group.

use super::bits::pack;
use super::clip_search::{groups, Group, Row};
use super::numeric::{absmax, widened, Real};
use super::QuantFormat;

/// Values of the sixteen codes (QLoRA, appendix E), as bitsandbytes 0.50.2 has them (`functional.py`).
pub const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// Values of the sixteen codes of FP4: of a sign, two bits of exponent and one of mantissa. As bitsandbytes 0.50.2 has them,
/// twelfths that are rounded.
pub const FP4: [f32; 16] = [
    0.0,
    0.0625 / 12.,
    8. / 12.,
    1.0,
    4. / 12.,
    6. / 12.,
    2. / 12.,
    3. / 12.,
    0.0,
    -0.0625 / 12.,
    -8. / 12.,
    -1.0,
    -4. / 12.,
    -6. / 12.,
    -2. / 12.,
    -3. / 12.,
];

/// The codes of FP4 by ascending value; the second zero is none of them.
const FP4_ASCENDING: [u8; 15] = [11, 10, 13, 12, 15, 14, 9, 0, 1, 6, 7, 4, 5, 2, 3];

/// The code of FP4 whose value is nearest; that of -1 for NaN.
#[inline(always)]
pub(super) fn nearest_fp4(value: f32) -> u8 {
    let middle = |pair: &[u8]| (FP4[usize::from(pair[0])] + FP4[usize::from(pair[1])]) / 2.;
    let rank = FP4_ASCENDING.windows(2).filter(|pair| value > middle(pair)).count();
    FP4_ASCENDING[rank]
}

/// Quantizes a row of K finite weights.
///
/// `words` receives `K / 8` words, `scales` the largest magnitude of each group.
pub(super) fn quantize<T: Real>(format: QuantFormat, weights: &[T], words: &mut [u32], scales: &mut [T]) {
    let mut codes = Vec::with_capacity(weights.len());
    for (group, scale) in widened(weights).chunks(format.group_size()).zip(scales) {
        let largest = absmax(group);
        *scale = T::from_f32(largest);
        let over_largest = |weight: &f32| if largest > 0. { weight / largest } else { 0. };
        codes.extend(format.element().nearest_all::<T>(group.iter().map(over_largest)));
    }
    pack(&codes, 4, words);
}

/// Clip search in a quantized row, by smaller scales.
pub(super) fn improve<T: Real>(format: QuantFormat, row: Row<T>, words: &mut [u32], scales: &mut [T]) {
    for ((numbers, words), scale) in groups(format, row, words).zip(scales) {
        let mut group = Group::new(format, &numbers, words, scale.to_f32(), 0.);
        let part = |sixteenths: u8| T::from_f32(scale.to_f32() * f32::from(sixteenths) / 16.);
        let better = (8..16).rev().map(part).filter(|scale| group.improves(scale.to_f32(), 0.)).last();
        if let Some(better) = better {
            *scale = better;
            pack(group.codes(), 4, words);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{QuantizedRows, Quantizer};
    use super::*;

    /// Every value of the table times the largest magnitude is its own code; half way between two, the lower one is.
    #[test]
    fn values_of_the_table_are_kept_and_ties_go_down() {
        let mut weights = vec![0f32; 64];
        for (code, weight) in weights.iter_mut().take(16).enumerate() {
            *weight = NF4[code] * 4.;
        }
        for (pair, weight) in NF4.windows(2).zip(weights.iter_mut().skip(16)) {
            *weight = (pair[0] + pair[1]) / 2. * 4.;
        }
        let rows = QuantizedRows::quantize(QuantFormat::NF4, Quantizer::Mlx, &weights, 64, None).unwrap();
        let codes: Vec<u32> = (0..31).map(|i| rows.words[i / 8] >> (i % 8 * 4) & 15).collect();
        let expected: Vec<u32> = (0..16).chain(0..15).collect();
        assert_eq!(codes, expected);
        assert_eq!(rows.scales, super::super::GroupScales::Float { scales: vec![4.], biases: vec![] });
        let numbers = rows.dequantize(QuantFormat::NF4, 64, 1.).unwrap();
        assert_eq!(numbers[..16], weights[..16]);
        // Zero has a code, so that rows of zeros stay zero.
        let zeros = QuantizedRows::quantize(QuantFormat::NF4, Quantizer::Mlx, &[0f32; 64], 64, None).unwrap();
        assert_eq!(zeros.dequantize(QuantFormat::NF4, 64, 1.).unwrap(), [0.; 64]);
    }
    /// Of FP4, too, whose codes are not in the order of their values; its second zero is never chosen.
    #[test]
    fn values_of_fp4_are_kept_and_ties_go_down() {
        for (code, value) in (0u8..16).zip(FP4) {
            assert_eq!(nearest_fp4(value), if code == 8 { 0 } else { code }, "{value}");
        }
        for pair in FP4_ASCENDING.windows(2) {
            let [low, high] = [pair[0], pair[1]].map(|code| FP4[usize::from(code)]);
            assert!(low < high);
            let middle = (low + high) / 2.;
            assert_eq!([nearest_fp4(middle), nearest_fp4(middle.next_up())], [pair[0], pair[1]], "{middle}");
        }
        assert_eq!([nearest_fp4(7.), nearest_fp4(-7.)], [3, 11]);
    }
}
