//! Layers with their adapters merged into the weight.

use super::super::dense_rows::map_rows;
use super::super::{LayerWeight, Linear};
use super::slot::Active;
use crate::{QuantFormat, QuantTensor, Result};
use candle_core::{DType, Tensor};
use std::ops::Range;

impl Linear {
    /// The layer with its active adapters merged into the weight, and none of its own: packed in `format`, or dense, in
    /// the dtype of a dense weight and in F32 otherwise.
    ///
    /// Rows are dequantized, changed in F32, and quantized a few at a time.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_quant::nn::Lora;
    /// use candle_quant::{Linear, Module, QuantFormat, QuantTensor};
    ///
    /// # fn main() -> candle_quant::Result<()> {
    /// let random = |rows: usize, columns: usize| Tensor::randn(0f32, 1., (rows, columns), &Device::Cpu);
    /// let layer = Linear::from_quant(QuantTensor::quantize(&random(8, 64)?, QuantFormat::MXFP4)?, None);
    /// let (a, b) = (random(2, 64)?, random(8, 2)?);
    /// layer.adapters().add("style", Lora { a, b, scale: 0.5, magnitude: None })?;
    /// let dense = layer.merged(None)?;
    /// let x = random(3, 64)?;
    /// let difference = (layer.forward(&x)? - dense.forward(&x)?)?.abs()?.max_all()?.to_scalar::<f32>()?;
    /// assert!(difference < 1e-3);
    /// assert_eq!(layer.merged(Some(QuantFormat::MXFP8))?.weight().format(), Some(QuantFormat::MXFP8));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// If the weight can't be quantized to `format`, or the device fails.
    pub fn merged(&self, format: Option<QuantFormat>) -> Result<Self> {
        let weight = merged(self.weight(), &self.adapters().active()?, format)?;
        Ok(Self::new(weight, self.bias().cloned()))
    }
}

/// A weight with adapters merged into it.
pub(crate) fn merged(
    weight: &LayerWeight,
    active: &[Active],
    format: Option<QuantFormat>,
) -> Result<LayerWeight> {
    Ok(match format {
        None => dense(weight, active)?.into(),
        Some(format) => packed(weight, active, format)?.into(),
    })
}

fn dense(weight: &LayerWeight, active: &[Active]) -> Result<Tensor> {
    let dtype = weight.dense().map_or(DType::F32, Tensor::dtype);
    let chunks = map_rows(weight, |chunk, rows| merged_rows(chunk, &rows, active)?.to_dtype(dtype))?;
    Ok(Tensor::cat(&chunks, 0)?)
}

fn packed(weight: &LayerWeight, active: &[Active], format: QuantFormat) -> Result<QuantTensor> {
    // Floating-point scales stay as wide as they are.
    let dtype = match weight {
        LayerWeight::Quantized(weight) if !format.scale().is_byte() => float_of(weight),
        LayerWeight::Reordered(weight) if !format.scale().is_byte() => float_of(weight.weight()),
        LayerWeight::ColumnScaled(weight) if !format.scale().is_byte() => weight.scales().dtype(),
        LayerWeight::Dense(weight) => weight.dtype(),
        _ => DType::F32,
    };
    let quantized = |chunk: &Tensor, rows: Range<usize>| {
        Ok(QuantTensor::quantize(&merged_rows(chunk, &rows, active)?.to_dtype(dtype)?, format)?)
    };
    let chunks = map_rows(weight, quantized)?;
    // A global scale is that of all rows.
    if chunks.len() > 1 && chunks.iter().any(|chunk| chunk.global_scale().is_some()) {
        return QuantTensor::quantize(&dense(weight, active)?.to_dtype(dtype)?, format);
    }
    QuantTensor::concat(&chunks.iter().collect::<Vec<_>>())
}

/// The dtype of its scales, if they are floats.
fn float_of(weight: &QuantTensor) -> DType {
    match weight.scales().dtype() {
        float @ (DType::F16 | DType::BF16 | DType::F32) => float,
        _ => DType::F32,
    }
}

/// Rows of the frozen weight as the adapters change them.
fn merged_rows(chunk: &Tensor, rows: &Range<usize>, active: &[Active]) -> candle_core::Result<Tensor> {
    active.iter().try_fold(chunk.clone(), |chunk, Active { lora, rescale }| {
        let b = lora.b.narrow(0, rows.start, rows.len())?.to_dtype(DType::F32)?;
        let update = (b.matmul(&lora.a.to_dtype(DType::F32)?)? * lora.scale)?;
        let sum = (chunk + update)?;
        match rescale {
            Some(rescale) => sum.broadcast_mul(&rescale.narrow(0, rows.start, rows.len())?.unsqueeze(1)?),
            None => Ok(sum),
        }
    })
}
