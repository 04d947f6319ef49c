//! Encoding of whole tensors, over rayon's threads.

use crate::format::element::Real;
use crate::format::encode::{encode_affine, encode_mx, encode_nvfp4};
use crate::QuantFormat;
use candle_core::{bail, CpuStorage, Device, Result, Storage, Tensor};
use rayon::prelude::*;

/// Flat parts of a quantized weight.
pub(crate) struct Parts {
    pub(crate) packed: Tensor,
    pub(crate) scales: Tensor,
    pub(crate) biases: Option<Tensor>,
}

/// A computation over the elements of a tensor, whatever their dtype.
trait OverElements {
    type Output;
    fn run<T: Real>(self, elements: &[T]) -> Result<Self::Output>;
}

/// Lends the elements of a contiguous CPU tensor of F32, F16 or BF16.
fn over_elements<C: OverElements>(tensor: &Tensor, computation: C) -> Result<C::Output> {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(CpuStorage::F32(all)) => computation.run(super::contiguous(all, layout)?),
        Storage::Cpu(CpuStorage::F16(all)) => computation.run(super::contiguous(all, layout)?),
        Storage::Cpu(CpuStorage::BF16(all)) => computation.run(super::contiguous(all, layout)?),
        _ => Err(super::unsupported_dtype("quantize", tensor.dtype())),
    }
}

/// The largest magnitude; NaN if there is a NaN.
pub(crate) fn absmax(tensor: &Tensor) -> Result<f32> {
    struct Absmax;
    impl OverElements for Absmax {
        type Output = f32;
        fn run<T: Real>(self, elements: &[T]) -> Result<f32> {
            let larger = |a: f32, b: f32| if a.is_nan() || a > b { a } else { b };
            Ok(elements
                .par_chunks(1 << 14)
                .map(|part| part.iter().fold(0.0, |largest, element| larger(element.to_f32().abs(), largest)))
                .reduce(|| 0.0, larger))
        }
    }
    over_elements(tensor, Absmax)
}

/// Encodes the rows of a contiguous CPU tensor `[.., K]` of finite numbers.
///
/// `absmax` is NVFP4's global scale in MLX's convention.
pub(crate) fn quantize(weight: &Tensor, format: QuantFormat, absmax: Option<f32>) -> Result<Parts> {
    struct Encode {
        format: QuantFormat,
        absmax: Option<f32>,
        k: usize,
    }
    impl OverElements for Encode {
        type Output = Parts;
        fn run<T: Real>(self, elements: &[T]) -> Result<Parts> {
            let Self { format, absmax, k } = self;
            let words_per_row = format.words_per_row(k)?;
            let groups_per_row = format.groups_per_row(k)?;
            let rows = elements.len() / k;
            let mut packed = vec![0u32; rows * words_per_row];
            let row_pairs = elements.par_chunks_exact(k).zip(packed.par_chunks_exact_mut(words_per_row));
            let (scales, biases) = match format {
                QuantFormat::Affine { bits, group_size } => {
                    let mut scales = vec![T::from_f32(0.0); rows * groups_per_row];
                    let mut biases = scales.clone();
                    row_pairs
                        .zip(scales.par_chunks_exact_mut(groups_per_row))
                        .zip(biases.par_chunks_exact_mut(groups_per_row))
                        .for_each(|(((row, words), scales), biases)| {
                            encode_affine(row, bits, group_size, words, scales, biases);
                        });
                    (flat(scales)?, Some(flat(biases)?))
                }
                _ => {
                    let mut scales = vec![0u8; rows * groups_per_row];
                    row_pairs.zip(scales.par_chunks_exact_mut(groups_per_row)).for_each(
                        |((row, words), scales)| match format {
                            QuantFormat::Nvfp4 => encode_nvfp4(row, absmax, words, scales),
                            _ => encode_mx(row, format, words, scales),
                        },
                    );
                    (flat(scales)?, None)
                }
            };
            Ok(Parts { packed: flat(packed)?, scales, biases })
        }
    }
    let Some(&k) = weight.dims().last() else { bail!("a scalar cannot be quantized") };
    over_elements(weight, Encode { format, absmax, k })
}

fn flat<T: candle_core::WithDType>(values: Vec<T>) -> Result<Tensor> {
    let len = values.len();
    Tensor::from_vec(values, len, &Device::Cpu)
}
