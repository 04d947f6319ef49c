//! `y = x w^T + b`, on packed or dense weights.

use super::adapters::{Frozen, OwnColumns};
use super::ggml::ggml_matmul;
use super::{AdapterSlot, LayerWeight, VarBuilder};
use crate::QuantTensor;
use candle_core::{Module, Result, Tensor};
use candle_nn::init::{Init, DEFAULT_KAIMING_NORMAL};
use std::ops::Range;

/// A linear layer: weight `[N, K]`, optional bias `[N]`; maps `[.., K]` to `[.., N]`.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_quant::{Linear, Module, QuantFormat, QuantTensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let weight = Tensor::randn(0f32, 1., (8, 64), &Device::Cpu)?;
/// let layer = Linear::from_quant(QuantTensor::quantize(&weight, QuantFormat::MXFP4)?, None);
/// let x = Tensor::randn(0f32, 1., (2, 3, 64), &Device::Cpu)?;
/// assert_eq!(layer.forward(&x)?.dims(), &[2, 3, 8]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Linear {
    weight: LayerWeight,
    bias: Option<Tensor>,
    adapters: AdapterSlot,
}

impl Linear {
    /// A layer from a dense [`Tensor`], a [`QuantTensor`], or another layer's [`LayerWeight`].
    pub fn new(weight: impl Into<LayerWeight>, bias: Option<Tensor>) -> Self {
        let weight = weight.into();
        let adapters = AdapterSlot::whole(&weight);
        Self { weight, bias, adapters }
    }

    /// A layer on packed weights.
    pub fn from_quant(weight: QuantTensor, bias: Option<Tensor>) -> Self {
        Self::new(weight, bias)
    }

    /// The weight, `[N, K]`.
    pub fn weight(&self) -> &LayerWeight {
        &self.weight
    }

    /// The additive bias, `[N]` (not the `biases` of an affine format, which belong to the weight).
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// The layer's adapters.
    pub fn adapters(&self) -> &AdapterSlot {
        &self.adapters
    }

    /// The layer as that of the builder's module, of which it has `part`, for its adapters. `columns` if ranks sum what
    /// they make of theirs.
    pub(crate) fn of_module(
        self,
        vb: &VarBuilder,
        dims: [usize; 2],
        part: &[Range<usize>; 2],
        columns: Option<OwnColumns>,
    ) -> Self {
        let frozen = Frozen::Matrix(self.weight.clone(), columns);
        Self { adapters: vb.adapter_slot(&dims, part, frozen), ..self }
    }
}

/// `x w^T + b` of a frozen weight.
pub(super) fn frozen(weight: &LayerWeight, bias: Option<&Tensor>, x: &Tensor) -> Result<Tensor> {
    match weight {
        LayerWeight::Quantized(weight) => weight.matmul(x, bias),
        LayerWeight::Reordered(weight) => weight.matmul(x, bias),
        LayerWeight::ColumnScaled(weight) => weight.matmul(x, bias),
        LayerWeight::Ggml(weight) => match bias {
            Some(bias) => ggml_matmul(weight, x)?.broadcast_add(bias),
            None => ggml_matmul(weight, x),
        },
        LayerWeight::Dense(weight) => candle_nn::Linear::new(weight.clone(), bias.cloned()).forward(x),
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let bias = self.bias.as_ref();
        self.adapters.apply(x, frozen(&self.weight, bias, x)?, bias)
    }
}

/// A linear layer with a bias, from the tensors `weight` and `bias` at the builder's path.
///
/// # Errors
/// If a tensor is missing, damaged, or not of shape `[out_dim, in_dim]` and `[out_dim]`.
pub fn linear(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<Linear> {
    let weight = vb.weight(out_dim, in_dim, DEFAULT_KAIMING_NORMAL)?;
    let bound = 1. / (in_dim as f64).sqrt();
    let hint = Init::Uniform { lo: -bound, up: bound };
    let bias = vb.get_with_hints(out_dim, "bias", hint)?;
    let layer = Linear::new(weight, Some(bias));
    Ok(layer.of_module(&vb, [out_dim, in_dim], &[0..out_dim, 0..in_dim], None))
}

/// A linear layer without a bias, from the tensor `weight` at the builder's path.
///
/// # Errors
/// If the weight is missing, damaged, or not of shape `[out_dim, in_dim]`.
pub fn linear_no_bias(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<Linear> {
    let weight = vb.weight(out_dim, in_dim, DEFAULT_KAIMING_NORMAL)?;
    Ok(Linear::new(weight, None).of_module(&vb, [out_dim, in_dim], &[0..out_dim, 0..in_dim], None))
}

/// [`linear`] if `bias`, else [`linear_no_bias`].
///
/// # Errors
/// As theirs.
pub fn linear_b(in_dim: usize, out_dim: usize, bias: bool, vb: VarBuilder) -> Result<Linear> {
    if bias {
        linear(in_dim, out_dim, vb)
    } else {
        linear_no_bias(in_dim, out_dim, vb)
    }
}
