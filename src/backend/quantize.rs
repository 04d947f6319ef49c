//! Quantizing whole tensors, over rayon's threads.

use crate::format::{GroupScales, QuantizedRows, Quantizer, Real};
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
#[allow(clippy::wildcard_enum_match_arm, reason = "storages of other dtypes and devices are refused")]
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

/// Quantizes the rows of a contiguous CPU tensor `[.., K]` of finite numbers.
///
/// `absmax` is NVFP4's global scale in MLX's convention.
pub(crate) fn quantize(weight: &Tensor, format: QuantFormat, absmax: Option<f32>) -> Result<Parts> {
    struct Quantize {
        format: QuantFormat,
        absmax: Option<f32>,
        k: usize,
    }
    impl OverElements for Quantize {
        type Output = Parts;
        fn run<T: Real>(self, elements: &[T]) -> Result<Parts> {
            let Self { format, absmax, k } = self;
            let mut rows = QuantizedRows::zeros(format, elements.len() / k, k)?;
            let pairs = rows.rows_mut(format, k)?.into_par_iter().zip(elements.par_chunks_exact(k));
            pairs.try_for_each(|(row, weights)| row.quantize(format, Quantizer::Mlx, weights, absmax))?;
            let QuantizedRows { words, scales } = rows;
            let packed = flat(words)?;
            Ok(match scales {
                GroupScales::Float { scales, biases } => {
                    let biases = format.has_biases().then(|| flat(biases)).transpose()?;
                    Parts { packed, scales: flat(scales)?, biases }
                }
                GroupScales::Bytes(scales) => Parts { packed, scales: flat(scales)?, biases: None },
            })
        }
    }
    let Some(&k) = weight.dims().last() else { bail!("a scalar cannot be quantized") };
    over_elements(weight, Quantize { format, absmax, k })
}

fn flat<T: candle_core::WithDType>(values: Vec<T>) -> Result<Tensor> {
    let len = values.len();
    Tensor::from_vec(values, len, &Device::Cpu)
}
