//! The weight of a layer: packed or dense.

use crate::{QuantFormat, QuantTensor, Result};
use candle_core::{DType, Device, Tensor};

/// A weight of logical shape `[N, K]`, packed or dense. Clones share the data.
///
/// [`Linear::new`](crate::Linear::new) takes either kind, so candle's idiom for a tied head,
/// `Linear::new(embedding.embeddings().clone(), None)`, keeps a packed embedding packed.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum LayerWeight {
    /// Computed on the packed codes.
    Quantized(QuantTensor),
    /// An ordinary tensor.
    Dense(Tensor),
}

impl LayerWeight {
    /// The packed tensor, if the weight is packed.
    pub fn quantized(&self) -> Option<&QuantTensor> {
        match self {
            Self::Quantized(weight) => Some(weight),
            Self::Dense(_) => None,
        }
    }

    /// The dense tensor, if the weight is dense.
    pub fn dense(&self) -> Option<&Tensor> {
        match self {
            Self::Quantized(_) => None,
            Self::Dense(weight) => Some(weight),
        }
    }

    /// The format, if the weight is packed.
    pub fn format(&self) -> Option<QuantFormat> {
        self.quantized().map(QuantTensor::format)
    }

    /// Logical dimensions, normally `[N, K]`.
    pub fn dims(&self) -> Vec<usize> {
        match self {
            Self::Quantized(weight) => weight.dims(),
            Self::Dense(weight) => weight.dims().to_vec(),
        }
    }

    /// Where the data lives.
    pub fn device(&self) -> &Device {
        match self {
            Self::Quantized(weight) => weight.device(),
            Self::Dense(weight) => weight.device(),
        }
    }

    /// Bytes the weight occupies: codes, scales and biases, or dense elements.
    pub fn size_in_bytes(&self) -> usize {
        match self {
            Self::Quantized(weight) => weight.size_in_bytes(),
            Self::Dense(weight) => weight.elem_count() * weight.dtype().size_in_bytes(),
        }
    }

    /// The weight as a dense tensor of `dtype`, decoded when packed.
    ///
    /// # Errors
    /// If the device can't decode or convert to `dtype`.
    pub fn to_dense(&self, dtype: DType) -> Result<Tensor> {
        match self {
            Self::Quantized(weight) => weight.dequantize(dtype),
            Self::Dense(weight) => Ok(weight.to_dtype(dtype)?),
        }
    }
}

impl From<QuantTensor> for LayerWeight {
    fn from(weight: QuantTensor) -> Self {
        Self::Quantized(weight)
    }
}

impl From<Tensor> for LayerWeight {
    fn from(weight: Tensor) -> Self {
        Self::Dense(weight)
    }
}
