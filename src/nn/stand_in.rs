//! Weights of layers in the place of candle's tensors.

use super::{Embedding, LayerWeight, Linear};
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_quant_packed::{stand_in, PackedWeight};
use std::sync::Arc;

impl PackedWeight for LayerWeight {
    fn dims(&self) -> Vec<usize> {
        LayerWeight::dims(self)
    }

    fn device(&self) -> Device {
        LayerWeight::device(self)
    }

    fn matmul(&self, x: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        Linear::new(self.clone(), bias.cloned()).forward(x)
    }

    fn rows(&self, ids: &Tensor, dtype: DType) -> Result<Tensor> {
        let hidden_size = LayerWeight::dims(self).last().copied().unwrap_or(0);
        Embedding::from_weight(self.clone(), hidden_size, dtype).forward(ids)
    }

    fn dequantize(&self, dtype: DType) -> Result<Tensor> {
        Ok(self.to_dense(dtype)?)
    }
}

impl LayerWeight {
    /// The weight as a tensor of `dtype` for a layer that knows of packed weights: the dense tensor, or the
    /// [stand-in](candle_quant_packed::stand_in) of a packed one. `shared`: it is probably both embedding and output head.
    ///
    /// # Errors
    /// If the device has no memory for one element.
    pub fn into_tensor(self, dtype: DType, shared: bool) -> Result<Tensor> {
        match self {
            Self::Dense(tensor) => tensor.to_dtype(dtype),
            packed => stand_in(Arc::new(packed), dtype, shared),
        }
    }
}
