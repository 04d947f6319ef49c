//! NVFP4: E2M1 elements, an E4M3 scale for each group of 16, and a global scale where the tensor needs one.

use super::bits::pack;
use super::clip_search::{improve_byte_scales, Nearby, Row};
use super::numeric::{absmax, rounded, widened, Real};
use super::small_floats::{e4m3_to_f32, f32_to_e4m3, E2M1_MAX, E4M3_MAX};
use super::QuantFormat;

/// `6 * 448`: the largest magnitude that NVFP4 expresses without a global scale, and the divisor of
/// MLX's `global_scale`.
pub const NVFP4_MAX: f32 = E2M1_MAX * E4M3_MAX;

/// The multiplier that stands for MLX's `global_scale`, which is the absolute maximum of the tensor.
///
/// This crate keeps the multiplier (`w = e2m1 * (e4m3 * multiplier)`), as ModelOpt's `weight_scale_2`
/// already is; MLX's number is converted once, when a checkpoint is opened: `RN32(absmax / 2688)`.
pub fn global_scale_from_absmax(absmax: f32) -> f32 {
    absmax / NVFP4_MAX
}

/// Quantizes a row of K finite weights as `mx.quantize` of mlx 0.32.4 does on a CPU, bit for bit.
///
/// `words` receives `K / 8` words, `scales` `K / 16` E4M3 bytes. `absmax_of_tensor` is MLX's `global_scale`; without
/// it, magnitudes above [`NVFP4_MAX`] saturate.
pub(super) fn quantize<T: Real>(
    format: QuantFormat,
    weights: &[T],
    absmax_of_tensor: Option<f32>,
    words: &mut [u32],
    scales: &mut [u8],
) {
    let element = format.element();
    let scale_of_scales = absmax_of_tensor.map_or(1.0, |absmax| NVFP4_MAX / absmax);
    let mut values = widened(weights);
    for (group, scale) in values.chunks_mut(format.group_size()).zip(scales) {
        *scale = f32_to_e4m3(rounded::<T>(absmax(group) / E2M1_MAX) * scale_of_scales);
        let divisor = e4m3_to_f32(*scale);
        group.iter_mut().for_each(|weight| *weight /= divisor);
    }
    let values = widened(&T::round_all(values));
    let scaled = values.into_iter().map(|value| value * scale_of_scales);
    pack(&element.nearest_all::<f32>(scaled), element.bits(), words);
}

/// Clip search in a row that was quantized without a global scale, by the scales nearby.
pub(super) fn improve<T: Real>(format: QuantFormat, row: Row<T>, words: &mut [u32], scales: &mut [u8]) {
    // E4M3 has eight steps for a power of two, and 4 / 6 is as good a place for the largest number of a group as the end.
    improve_byte_scales(format, row, words, scales, Nearby { below: 8, above: 16, last: 0x7E });
}
