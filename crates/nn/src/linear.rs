//! `y = x w^T + b`, on packed or dense weights.

use crate::VarBuilder;
use candle_core::{Module, Result, Tensor};
use candle_nn::init::DEFAULT_KAIMING_NORMAL;
use candle_nn::Init;
use candle_quant_packed::Weight;

/// A linear layer: weight `[N, K]`, optional bias `[N]`; maps `[.., K]` to `[.., N]`.
///
/// It is packed if its weight is a [stand-in](candle_quant_packed::stand_in), as those are that [`linear`] loads and that
/// [`weight`](Linear::weight) and [`embeddings`](crate::Embedding::embeddings) may return.
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Weight,
    bias: Option<Tensor>,
}

impl Linear {
    /// A layer from a weight `[N, K]` and, if there is one, a bias `[N]`.
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Self {
        Self { weight: Weight::new(weight), bias }
    }

    /// The weight. A packed one is dequantized when it is first asked for, unless the caller probably makes another
    /// layer of it ([`Weight::tensor`]).
    pub fn weight(&self) -> &Tensor {
        self.weight.tensor()
    }

    /// The bias (not the `biases` of an affine format, which belong to the weight).
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self.weight.packed() {
            Some(packed) => packed.matmul(x, self.bias.as_ref()),
            None => candle_nn::Linear::new(self.weight.tensor().clone(), self.bias.clone()).forward(x),
        }
    }
}

/// A linear layer with a bias, from the tensors `weight` and `bias` at the builder's path.
///
/// # Errors
/// If a tensor is missing, damaged, or not of shape `[out_dim, in_dim]` and `[out_dim]`.
pub fn linear(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<Linear> {
    let weight = vb.weight_tensor(out_dim, in_dim, DEFAULT_KAIMING_NORMAL)?;
    let bound = 1. / (in_dim as f64).sqrt();
    let bias = vb.get_with_hints(out_dim, "bias", Init::Uniform { lo: -bound, up: bound })?;
    Ok(Linear::new(weight, Some(bias)))
}

/// A linear layer without a bias, from the tensor `weight` at the builder's path.
///
/// # Errors
/// If the weight is missing, damaged, or not of shape `[out_dim, in_dim]`.
pub fn linear_no_bias(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<Linear> {
    Ok(Linear::new(vb.weight_tensor(out_dim, in_dim, DEFAULT_KAIMING_NORMAL)?, None))
}

/// [`linear`] if `bias`, else [`linear_no_bias`].
///
/// # Errors
/// As theirs.
pub fn linear_b(in_dim: usize, out_dim: usize, bias: bool, vb: VarBuilder) -> Result<Linear> {
    match bias {
        true => linear(in_dim, out_dim, vb),
        false => linear_no_bias(in_dim, out_dim, vb),
    }
}
