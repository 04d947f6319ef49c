//! Norms of hidden states, queries and keys.

use super::differentiable;
use candle_core::{DType, Result, Tensor, D};
use candle_nn::{Init, RmsNorm};
use candle_quant::nn::VarBuilder;
use candle_quant::parallel::Rank;
use candle_quant::step::StepNorm;
use std::ops::Range;
use std::slice;

/// What a norm does beside dividing by a length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// Divides by the root of the mean square, and multiplies by `weight`.
    Rms,
    /// The same, times one more than `weight`.
    RmsOnePlus,
    /// Divides by the root of the mean square; there are no tensors.
    RmsPlain,
    /// Subtracts the mean first, and adds `bias` in the end, if there is one.
    Layer {
        /// Whether there is.
        bias: bool,
    },
    /// The same with a bias, times one more than `weight`.
    LayerOnePlus,
    /// Subtracts the mean first; there are no tensors.
    LayerPlain,
}

impl NormKind {
    fn subtracts_mean(self) -> bool {
        !matches!(self, Self::Rms | Self::RmsOnePlus | Self::RmsPlain)
    }

    pub(super) fn is_one_plus(self) -> bool {
        matches!(self, Self::RmsOnePlus | Self::LayerOnePlus)
    }

    /// Its tensors: `weight`, `bias`.
    pub(super) fn tensors(self) -> &'static [&'static str] {
        match self {
            Self::Rms | Self::RmsOnePlus | Self::Layer { bias: false } => &["weight"],
            Self::Layer { bias: true } | Self::LayerOnePlus => &["weight", "bias"],
            Self::RmsPlain | Self::LayerPlain => &[],
        }
    }
}

/// A norm over the last dimension, with gradients.
#[derive(Debug)]
pub(super) enum Norm {
    /// Candle's, in one pass.
    Rms(RmsNorm),
    Other(Other),
}

#[derive(Debug)]
pub(super) struct Other {
    subtracts_mean: bool,
    eps: f64,
    /// In f32, of the last dimension or the last two.
    weight: Option<Tensor>,
    bias: Option<Tensor>,
    sum: Option<Sum>,
}

/// What a norm over elements of several ranks needs.
#[derive(Debug)]
struct Sum {
    rank: Rank,
    /// Elements of all ranks, each counted once.
    count: usize,
    /// How many ranks have the elements of this one.
    copies: usize,
}

impl Norm {
    /// Over `size` elements, with the tensors at `vb`.
    pub fn new(kind: NormKind, size: usize, eps: f64, vb: VarBuilder) -> Result<Self> {
        // Those of a model to be trained begin with no effect.
        let neutral = if kind.is_one_plus() { 0. } else { 1. };
        let get = |name: &str, init: f64| {
            let is_there = kind.tensors().contains(&name);
            is_there.then(|| vb.dense().get_with_hints(size, name, Init::Const(init))).transpose()
        };
        let (weight, bias) = (get("weight", neutral)?, get("bias", 0.)?);
        match (kind, weight) {
            (NormKind::Rms, Some(weight)) => Ok(Self::Rms(RmsNorm::new(weight, eps))),
            (NormKind::RmsOnePlus, Some(weight)) => Ok(Self::Rms(RmsNorm::new(one_plus(&weight)?, eps))),
            (_, weight) => Self::other(kind, eps, weight, bias, None),
        }
    }

    /// Of heads, each with a weight of its own, of which this rank has those of `own`: one tensor `[heads, head_dim]`, or
    /// one of `norms.0`, `norms.1` and so on each.
    pub fn of_each_head(
        kind: NormKind,
        heads: usize,
        own: &Range<usize>,
        head_dim: usize,
        eps: f64,
        vb: VarBuilder,
    ) -> Result<Self> {
        let weight = match vb.contains_tensor("weight") || !vb.contains_tensor("norms.0.weight") {
            true => vb.tensor_part(&[heads, head_dim], "weight", &[own.clone(), 0..head_dim])?,
            false => {
                let of_head = |head: usize| vb.pp("norms").pp(head).get(head_dim, "weight");
                let all = (0..heads).map(of_head).collect::<Result<Vec<_>>>()?;
                Tensor::stack(&all, 0)?.narrow(0, own.start, own.len())?
            }
        };
        Self::other(kind, eps, Some(weight), None, None)
    }

    /// Over the elements of all heads, `size` in all, of which this rank has those of `own`, and so do `copies` ranks.
    pub fn of_all_heads(
        kind: NormKind,
        size: usize,
        own: &Range<usize>,
        copies: usize,
        eps: f64,
        vb: VarBuilder,
    ) -> Result<Self> {
        if *own == (0..size) {
            return Self::new(kind, size, eps, vb);
        }
        let weight = vb.tensor_part(&[size], "weight", slice::from_ref(own))?;
        let sum = vb.rank().map(|rank| Sum { rank: rank.clone(), count: size, copies });
        Self::other(kind, eps, Some(weight), None, sum)
    }

    fn other(
        kind: NormKind,
        eps: f64,
        weight: Option<Tensor>,
        bias: Option<Tensor>,
        sum: Option<Sum>,
    ) -> Result<Self> {
        let wide = |x: Tensor| x.to_dtype(DType::F32);
        let weight = weight.map(wide).transpose()?;
        let weight = match kind.is_one_plus() {
            true => weight.map(|x| one_plus(&x)).transpose()?,
            false => weight,
        };
        let bias = bias.map(wide).transpose()?;
        Ok(Self::Other(Other { subtracts_mean: kind.subtracts_mean(), eps, weight, bias, sum }))
    }

    /// The normalized `x`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Rms(norm) => differentiable::rms_norm(norm, x),
            Self::Other(norm) => norm.forward(x),
        }
    }

    /// The norm in a plan, if this rank has all of it.
    pub fn of_step(&self) -> Option<StepNorm<'_>> {
        match self {
            Self::Rms(norm) => Some(norm.into()),
            Self::Other(Other { sum: Some(_), .. }) => None,
            Self::Other(Other { subtracts_mean, eps, weight, bias, sum: None }) => Some(StepNorm {
                weight: weight.as_ref(),
                bias: bias.as_ref(),
                subtracts_mean: *subtracts_mean,
                eps: *eps,
            }),
        }
    }
}

impl Other {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut y = x.to_dtype(DType::F32)?;
        if self.subtracts_mean {
            y = y.broadcast_sub(&y.mean_keepdim(D::Minus1)?)?;
        }
        let mean = match &self.sum {
            None => y.sqr()?.mean_keepdim(D::Minus1)?,
            Some(Sum { rank, count, copies }) => {
                let own = (y.sqr()?.sum_keepdim(D::Minus1)? / *copies as f64)?;
                (rank.all_reduce_sum(&own)? / *count as f64)?
            }
        };
        y = y.broadcast_div(&(mean + self.eps)?.sqrt()?)?;
        if let Some(weight) = &self.weight {
            y = y.broadcast_mul(weight)?;
        }
        if let Some(bias) = &self.bias {
            y = y.broadcast_add(bias)?;
        }
        y.to_dtype(x.dtype())
    }
}

fn one_plus(weight: &Tensor) -> Result<Tensor> {
    weight + 1.
}
