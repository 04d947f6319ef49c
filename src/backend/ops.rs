//! What users call: operations as methods of the weights.

use super::{Operand, Parts};
use crate::format::{global_scale_from_absmax, GroupScales, QuantizedRows, Real, NVFP4_MAX};
use crate::tensor::LayerWeight;
use crate::{Error, QuantFormat, QuantTensor, Result};
use candle_core::{DType, Device, Tensor};

/// Quantizes whole rows of finite numbers on a device, without a global scale: they go there, codes and scales come back.
/// The bits are those of [`QuantizedRows::quantize`] with MLX's arithmetic.
///
/// # Errors
/// If `k` is not a positive multiple of the group size, `rows` are no whole rows, the device fails, or nothing
/// quantizes to the format.
pub fn quantize_rows<T: Real>(
    rows: &[T],
    k: usize,
    format: QuantFormat,
    device: &Device,
) -> Result<QuantizedRows<T>> {
    format.words_per_row(k)?;
    let rows = Tensor::from_slice(rows, (rows.len() / k, k), device)?;
    let Parts { packed, scales, biases } = super::quantize(&rows, format, None)?;
    let scales = match format.scale().is_byte() {
        true => GroupScales::Bytes(scales.to_vec1()?),
        false => {
            let biases = biases.map(|biases| biases.to_vec1()).transpose()?.unwrap_or_default();
            GroupScales::Float { scales: scales.to_vec1()?, biases }
        }
    };
    Ok(QuantizedRows { words: packed.to_vec1()?, scales })
}

impl QuantTensor {
    /// Quantizes a weight `[.., N, K]` (F16, BF16 or F32): formats that MLX has as its `mx.quantize` does on a CPU, bit
    /// for bit. Scales and biases that are floats take the dtype of the weight.
    ///
    /// NVFP4 gets a global scale when the weight exceeds 2688, the most that it holds without one.
    /// The result is on the weight's device, which does the work if it is the CPU or a CUDA device.
    ///
    /// # Errors
    /// If the weight has fewer than two dimensions, another dtype, an element that is not finite, or
    /// a K that is not a multiple of the group size.
    pub fn quantize(weight: &Tensor, format: QuantFormat) -> Result<Self> {
        let dims = weight.dims();
        let [.., _, k] = dims else {
            return Err(Error::mismatch("weight to quantize", "a shape [.., N, K]", format!("{dims:?}")));
        };
        if weight.elem_count() == 0 {
            return Err(Error::mismatch("weight to quantize", "at least one element", format!("{dims:?}")));
        }
        let row = (format.words_per_row(*k)?, format.groups_per_row(*k)?);
        let source = match weight.device() {
            Device::Cuda(_) => weight.contiguous()?,
            Device::Cpu | Device::Metal(_) => weight.to_device(&Device::Cpu)?.contiguous()?,
        };
        let absmax = super::absmax(&source)?;
        if !absmax.is_finite() {
            return Err(Error::mismatch("weight to quantize", "finite numbers", "infinities or NaN"));
        }
        let global = (format == QuantFormat::NVFP4 && absmax > NVFP4_MAX).then_some(absmax);
        let parts = super::quantize(&source, format, global)?;
        let shaped = |flat: Tensor, last: usize| {
            let mut dims = dims.to_vec();
            dims.splice(dims.len() - 1.., [last]);
            flat.reshape(dims)?.to_device(weight.device())
        };
        let global_scale = global
            .map(|absmax| Tensor::new(&[global_scale_from_absmax(absmax)], weight.device()))
            .transpose()?;
        Self::new(
            format,
            shaped(parts.packed, row.0)?,
            shaped(parts.scales, row.1)?,
            parts.biases.map(|biases| shaped(biases, row.1)).transpose()?,
            global_scale,
        )
    }

    /// All weights as a dense tensor `[.., N, K]`.
    ///
    /// F32 is exact (see [`crate::format::dequantize_row`]); F16 and BF16 are that number rounded once.
    ///
    /// # Errors
    /// If `dtype` is none of these, or the device fails.
    pub fn dequantize(&self, dtype: DType) -> Result<Tensor> {
        Ok(super::dequantize(self, dtype)?)
    }

    /// `x * weight^T + bias`.
    ///
    /// * `x`: `[.., K]` of F32, F16 or BF16; `[K]` gives `[N]`. With a stack of weights
    ///   `[.., N, K]`, `x` is `[.., M, K]` and leading dimensions broadcast both ways.
    /// * `bias`: `[N]`, any float dtype; added before the result is rounded to the dtype of `x`.
    ///
    /// Sums are f32. The gradient with respect to `x` is supported, weights and bias are constants.
    ///
    /// The same operands give the same bits on the same kind of device. A row of `x` need not give the
    /// same bits among other numbers of rows; on a CUDA device, with so many that the weights are dequantized
    /// first, they are rounded to the dtype of `x`.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit.
    pub fn matmul(&self, x: &Tensor, bias: Option<&Tensor>) -> candle_core::Result<Tensor> {
        super::matmul(Operand { weight: self, bias }, x)
    }

    /// The rows `ids` of a weight `[N, K]`: shape of `ids` (U8, U32 or I64) followed by K.
    ///
    /// # Errors
    /// If the weight is a stack, or `dtype` is not F32, F16 or BF16. If an id is N or more; on a CUDA
    /// device, where ids are not read back, such a row is NaN instead.
    pub fn embed(&self, ids: &Tensor, dtype: DType) -> candle_core::Result<Tensor> {
        super::embed(self, ids, dtype)
    }
}

impl LayerWeight {
    /// The weight as a dense tensor of `dtype`, dequantized when packed.
    ///
    /// # Errors
    /// If the device can't dequantize or convert to `dtype`.
    pub fn to_dense(&self, dtype: DType) -> Result<Tensor> {
        match self {
            Self::Quantized(weight) => weight.dequantize(dtype),
            Self::Ggml(weight) => Ok(weight.dequantize(&weight.device())?.to_dtype(dtype)?),
            Self::Dense(weight) => Ok(weight.to_dtype(dtype)?),
        }
    }
}
