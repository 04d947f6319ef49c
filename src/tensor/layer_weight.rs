//! The weight of a layer: packed, in GGML blocks, or dense.

use super::{ColumnScaledTensor, QuantTensor, ReorderedTensor};
use crate::QuantFormat;
use candle_core::quantized::QTensor;
use candle_core::{Device, Tensor};
use std::sync::Arc;

/// A weight of logical shape `[N, K]`, packed or dense. Clones share the data.
///
/// [`Linear::new`](crate::Linear::new) takes either kind, so candle's idiom for a tied head,
/// `Linear::new(embedding.embeddings().clone(), None)`, keeps a packed embedding packed.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum LayerWeight {
    /// Computed on the packed codes.
    Quantized(QuantTensor),
    /// The same, of an x whose elements are brought into another order first, or filled up to whole groups.
    Reordered(ReorderedTensor),
    /// Computed on the packed codes, too, whose groups run across rows.
    ColumnScaled(ColumnScaledTensor),
    /// Blocks of a GGML type, computed by candle, which rounds activations to 8 bits for that.
    Ggml(Arc<QTensor>),
    /// An ordinary tensor.
    Dense(Tensor),
}

impl LayerWeight {
    /// The packed tensor, if the weight is packed and its columns are in the order of x.
    pub fn quantized(&self) -> Option<&QuantTensor> {
        match self {
            Self::Quantized(weight) => Some(weight),
            _ => None,
        }
    }

    /// The dense tensor, if the weight is dense.
    pub fn dense(&self) -> Option<&Tensor> {
        match self {
            Self::Dense(weight) => Some(weight),
            _ => None,
        }
    }

    /// The format, if the weight is packed; of codes whose groups run across rows that of integers without scales.
    pub fn format(&self) -> Option<QuantFormat> {
        match self {
            Self::Quantized(weight) => Some(weight.format()),
            Self::Reordered(weight) => Some(weight.weight().format()),
            Self::ColumnScaled(weight) => Some(weight.codes().format()),
            Self::Ggml(_) | Self::Dense(_) => None,
        }
    }

    /// Logical dimensions, normally `[N, K]`.
    pub fn dims(&self) -> Vec<usize> {
        match self {
            Self::Quantized(weight) => weight.dims(),
            Self::Reordered(weight) => weight.dims(),
            Self::ColumnScaled(weight) => weight.dims(),
            Self::Ggml(weight) => weight.shape().dims().to_vec(),
            Self::Dense(weight) => weight.dims().to_vec(),
        }
    }

    /// Where the data lives.
    pub fn device(&self) -> Device {
        match self {
            Self::Quantized(weight) => weight.device().clone(),
            Self::Reordered(weight) => weight.weight().device().clone(),
            Self::ColumnScaled(weight) => weight.codes().device().clone(),
            Self::Ggml(weight) => weight.device(),
            Self::Dense(weight) => weight.device().clone(),
        }
    }

    /// The name of the format, for reports: `affine 4-bit g64`, `affine 4-bit g64, act-order`, `fp8 g32, filled`, `ggml Q4K`, `BF16`.
    pub fn format_name(&self) -> String {
        match self {
            Self::Quantized(weight) => weight.format().to_string(),
            Self::Reordered(weight) => reordered_name(weight.weight().format(), weight.is_in_order()),
            Self::ColumnScaled(weight) => weight.format_name(),
            Self::Ggml(weight) => format!("ggml {:?}", weight.dtype()),
            Self::Dense(weight) => format!("{:?}", weight.dtype()),
        }
    }

    /// Bytes the weight occupies: codes, scales and biases, or dense elements.
    pub fn size_in_bytes(&self) -> usize {
        match self {
            Self::Quantized(weight) => weight.size_in_bytes(),
            Self::Reordered(weight) => weight.size_in_bytes(),
            Self::ColumnScaled(weight) => weight.size_in_bytes(),
            Self::Ggml(weight) => weight.storage_size_in_bytes(),
            Self::Dense(weight) => weight.elem_count() * weight.dtype().size_in_bytes(),
        }
    }
}

/// The name of a format whose columns are reordered, or in order and only filled up to whole groups.
pub(crate) fn reordered_name(format: QuantFormat, is_in_order: bool) -> String {
    let how = if is_in_order { "filled" } else { "act-order" };
    format!("{format}, {how}")
}

impl From<ReorderedTensor> for LayerWeight {
    fn from(weight: ReorderedTensor) -> Self {
        Self::Reordered(weight)
    }
}

impl From<ColumnScaledTensor> for LayerWeight {
    fn from(weight: ColumnScaledTensor) -> Self {
        Self::ColumnScaled(weight)
    }
}

impl From<QuantTensor> for LayerWeight {
    fn from(weight: QuantTensor) -> Self {
        Self::Quantized(weight)
    }
}

impl From<QTensor> for LayerWeight {
    fn from(weight: QTensor) -> Self {
        Self::Ggml(Arc::new(weight))
    }
}

impl From<Tensor> for LayerWeight {
    /// A tensor that stands for a packed weight becomes that weight.
    fn from(weight: Tensor) -> Self {
        let packed = candle_quant_packed::Weight::new(weight.clone());
        packed.packed().and_then(|packed| packed.downcast_ref().cloned()).unwrap_or(Self::Dense(weight))
    }
}
