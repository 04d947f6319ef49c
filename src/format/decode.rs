//! Scalar decode: the reference for every other path.
//!
//! All arithmetic is f32. `RN32` below is rounding to nearest, ties to even.
//! Affine is `RN32(RN32(q * s) + b)` with an f32 scale, and `RN32((q - 2^(bits - 1)) * s)` if it is
//! symmetric, that is, has no biases; MXFP4, MXFP8 and NVFP4 are one exact product (exact with a global
//! scale up to `RN32`). Codes that stand for NaN decode to NaN.

use super::element::{e4m3_to_f32, e8m0_to_f32, E2M1, E2M1_MAX, E4M3_MAX};
use super::packing::unpack;
use super::{QuantFormat, ScaleKind};

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

/// Value of a scale byte, multiplied by the global scale (1 where there is none).
///
/// [`ScaleKind::Float`] has no scale bytes; it is read as E4M3 never is, so the answer is NaN.
#[inline(always)]
pub fn scale_from_byte(kind: ScaleKind, byte: u8, global_scale: f32) -> f32 {
    match kind {
        ScaleKind::E8m0 => e8m0_to_f32(byte) * global_scale,
        ScaleKind::E4m3 => e4m3_to_f32(byte) * global_scale,
        ScaleKind::Float => f32::NAN,
    }
}

/// The code that stands for zero in a symmetric affine format.
pub fn symmetric_zero(bits: usize) -> f32 {
    (1u32 << bits.clamp(1, 8) >> 1) as f32
}

/// Value of a code before scale and bias.
#[inline(always)]
pub fn element(format: QuantFormat, code: u8) -> f32 {
    match format {
        QuantFormat::Affine { .. } => f32::from(code),
        QuantFormat::Mxfp4 | QuantFormat::Nvfp4 => E2M1[usize::from(code & 15)],
        QuantFormat::Mxfp8 => e4m3_to_f32(code),
    }
}

/// Decodes one row.
///
/// `words` holds the packed row, `scales` and `biases` one f32 for each group (`biases` is empty for
/// formats without and for symmetric codes), `row` receives K numbers.
///
/// # Panics
/// If the group size of an affine format is 0, which [`QuantFormat::validate`] refuses.
///
/// ```
/// use candle_quant::{format::decode::decode_row, QuantFormat};
///
/// let mut row = [0f32; 32];
/// // 32 codes of 4 bits; the first two are 1 and 2.
/// decode_row(QuantFormat::affine(4, 32)?, &[0x21, 0, 0, 0], &[0.5], &[-1.0], &mut row);
/// assert_eq!(row[..3], [-0.5, 0.0, -1.0]);
/// # Ok::<(), candle_quant::Error>(())
/// ```
pub fn decode_row(format: QuantFormat, words: &[u32], scales: &[f32], biases: &[f32], row: &mut [f32]) {
    let bits = format.bits();
    let symmetric = format.has_biases() && biases.is_empty();
    let mut codes = vec![0; row.len()];
    let known = unpack(words, bits, &mut codes);
    let groups = row.chunks_mut(format.group_size()).zip(codes.chunks(format.group_size())).enumerate();
    for (group, (values, codes)) in groups {
        let scale = scales.get(group).copied().unwrap_or(f32::NAN);
        match biases.get(group).copied() {
            // A fused sum of zero is +0, whatever the sign of the scale.
            None if symmetric => {
                let bias = -symmetric_zero(bits) * scale;
                decode_group(format, codes, values, |element| element.mul_add(scale, bias));
            }
            None => decode_group(format, codes, values, |element| element * scale),
            Some(bias) => decode_group(format, codes, values, |element| element * scale + bias),
        }
    }
    // What the row has no codes for.
    row.iter_mut().skip(known).for_each(|value| *value = f32::NAN);
}

/// One loop for each kind of elements, each without a branch.
#[inline(always)]
fn decode_group(format: QuantFormat, codes: &[u8], values: &mut [f32], of: impl Fn(f32) -> f32) {
    let pairs = values.iter_mut().zip(codes);
    match format {
        QuantFormat::Affine { .. } => pairs.for_each(|(value, code)| *value = of(f32::from(*code))),
        _ => pairs.for_each(|(value, code)| *value = of(element(format, *code))),
    }
}
