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

    /// What [`QuantTensor::quantize`] makes of a weight `[.., N, K]`, dequantized to the dtype of the weight, for
    /// quantization-aware training.
    ///
    /// Its gradient passes straight through: rounding has a derivative of zero almost everywhere, with which nothing
    /// would be learned, so that of an identity stands in for it. This is the straight-through estimator of Bengio,
    /// Léonard and Courville, [Estimating or Propagating Gradients Through Stochastic Neurons for Conditional
    /// Computation](https://arxiv.org/abs/1308.3432) (2013). Elements beyond the largest code have it, too.
    ///
    /// A layer of few bits is repaired by training its dense weight through this function, until the quantized layer
    /// does again what the dense one did. What is stored in the end is the quantization of the trained weight, which has
    /// the values that the training has seen:
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor, Var};
    /// use candle_nn::{loss::mse, Optimizer, SGD};
    /// use candle_quant::{QuantFormat, QuantTensor};
    ///
    /// let numbers = |n: usize, k: usize| -> candle_core::Result<Tensor> {
    ///     Tensor::arange(1f32, (n * k + 1) as f32, &Device::Cpu)?.sqr()?.sin()?.reshape((n, k))
    /// };
    /// // Inputs that hang together, so that errors of some weights can make up for those of others.
    /// let (format, x) = (QuantFormat::affine(2, 32)?, numbers(48, 4)?.matmul(&numbers(4, 64)?)?);
    /// let weight = Var::from_tensor(&numbers(8, 64)?)?;
    /// let expected = x.matmul(&weight.t()?)?.detach();
    /// let loss = || -> candle_core::Result<Tensor> {
    ///     mse(&x.matmul(&QuantTensor::fake_quantize(&weight, format)?.t()?)?, &expected)
    /// };
    /// let before = loss()?.to_scalar::<f32>()?;
    /// let mut optimizer = SGD::new(vec![weight.clone()], 0.02)?;
    /// for _ in 0..40 {
    ///     optimizer.backward_step(&loss()?)?;
    /// }
    /// assert!(loss()?.to_scalar::<f32>()? < before / 3.);
    ///
    /// let repaired = QuantTensor::quantize(&weight, format)?;
    /// let seen = QuantTensor::fake_quantize(&weight, format)?;
    /// assert_eq!(repaired.dequantize(DType::F32)?.to_vec2::<f32>()?, seen.to_vec2::<f32>()?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`QuantTensor::quantize`].
    pub fn fake_quantize(weight: &Tensor, format: QuantFormat) -> Result<Tensor> {
        let quantized = Self::quantize(&weight.detach(), format)?.dequantize(weight.dtype())?;
        Ok(crate::known::straight_through("fake-quantize", weight, quantized)?)
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
    /// Sums are f32. `x` and `bias` have gradients, weights are constants. The gradient of `x` is the product of that of
    /// the result and the weight, which stays packed: parts of it are dequantized, in f32 on a CPU, in the dtype of
    /// `x` on a CUDA device. Gradients of gradients are not supported.
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
            Self::Reordered(weight) => weight.dequantize(dtype),
            Self::ColumnScaled(weight) => weight.dequantize(dtype),
            Self::Ggml(weight) => Ok(weight.dequantize(&weight.device())?.to_dtype(dtype)?),
            Self::Dense(weight) => Ok(weight.to_dtype(dtype)?),
        }
    }
}
