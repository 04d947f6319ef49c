//! Linear attention: a state of fixed size, which [`ops::gated_delta_net`] changes, stands for all tokens before.

mod inputs;

use crate::config::LinearAttentionConfig;
use crate::norm::{Norm, NormKind};
use crate::projection::rows_of;
use crate::sharding::Sharding;
use crate::Config;
use candle_core::{DType, Result, Tensor, D};
use candle_nn::Module;
use candle_quant::nn::{LayerWeight, VarBuilder};
use candle_quant::ops::{self, DeltaNetWeights};
use candle_quant::parallel::{Rank, RowParallel};
use candle_quant::step::{BlockOutput, DeltaNetBlock, StepNorm};
use candle_quant::{DeltaNetConfig, DeltaNetState};
use inputs::{Inputs, Projected};
use std::ops::Range;
use std::slice;

/// A layer, or its part of some heads.
#[derive(Debug)]
pub(crate) struct LinearAttention {
    /// Those of this rank.
    sizes: DeltaNetConfig,
    /// Whether inputs of the output projection are in tiles: see [`LinearAttentionConfig::tiled_output`].
    tiled_output: bool,
    inputs: Inputs,
    /// `[kernel, channels]`, F32.
    convolution: Tensor,
    /// How fast heads of values forget, and what is added to their gates, F32.
    rates: Tensor,
    gate_bias: Tensor,
    norm: Norm,
    out_proj: RowParallel,
    gather: Option<Gather>,
    state: DeltaNetState,
}

/// What brings the values of all ranks together, before an output projection that every rank has whole.
#[derive(Debug)]
struct Gather {
    rank: Rank,
    /// Elements before and after those of this rank.
    others: (usize, usize),
}

impl LinearAttention {
    /// `vb` stands at the module.
    pub fn new(config: &Config, linear: &LinearAttentionConfig, vb: &VarBuilder) -> Result<Self> {
        let share = vb.rank().and_then(|rank| {
            let heads = Sharding::new(config, rank.world_size()).linear_heads?;
            Some((rank.clone(), heads.get(rank.index())?.clone()))
        });
        let (rank, own) = share.map_or((None, 0..linear.key_heads), |(rank, own)| (Some(rank), own));
        let values = linear.elements(own.start).1..linear.elements(own.end).1;
        let heads = own.start * linear.shared()..own.end * linear.shared();
        let wide = vb.to_dtype(DType::F32);
        let of_heads = |name| wide.tensor_part(&[linear.value_heads], name, slice::from_ref(&heads));
        let all_values = linear.elements(linear.key_heads).1;
        let others = (values.start, all_values.saturating_sub(values.end));
        let gather = rank.filter(|_| linear.tiled_output).map(|rank| Gather { rank, others });
        let inputs = if gather.is_some() { 0..all_values } else { values };
        // Adapters are those of the order in which the model was published.
        let output = vb.pp("out_proj");
        let output = if linear.tiled_output { output.without_adapters() } else { output };
        let sizes = linear.of_heads(own.len());
        Ok(Self {
            sizes,
            tiled_output: linear.tiled_output,
            inputs: Inputs::new(config.hidden_size, linear, &own, vb)?,
            convolution: convolution(linear, &own, &wide.pp("conv1d"))?,
            rates: of_heads("A_log")?.exp()?.neg()?,
            gate_bias: of_heads("dt_bias")?,
            norm: Norm::new(NormKind::Rms, linear.value_dim, config.norm_eps, vb.pp("norm"))?,
            out_proj: rows_of(all_values, config.hidden_size, inputs, false, output)?,
            gather,
            state: DeltaNetState::new(sizes, vb.device())?,
        })
    }

    /// The block between its norms, if it is of the kind that plans have.
    pub fn block(&self) -> Option<DeltaNetBlock<'_>> {
        if self.gather.is_some() {
            return None;
        }
        let StepNorm { weight: Some(norm), eps, .. } = self.norm.of_step()? else { return None };
        let (out_proj, sum) = self.out_proj.part()?;
        let weights = self.weights_between(norm, eps);
        Some(DeltaNetBlock {
            tiled_output: self.tiled_output,
            out: BlockOutput { sum, ..Default::default() },
            ..DeltaNetBlock::new(self.sizes, self.inputs.of_step(), weights, out_proj)
        })
    }

    fn weights_between<'a>(&'a self, norm: &'a Tensor, eps: f64) -> DeltaNetWeights<'a> {
        let (convolution, rates, gate_bias) = (&self.convolution, &self.rates, &self.gate_bias);
        DeltaNetWeights { convolution, rates, gate_bias, norm, eps }
    }

    /// `x` is `[B, T, hidden]`, the tokens that follow those in the state; what is made of them is added to `residual`, if
    /// there is one.
    pub fn forward(&mut self, x: &Tensor, residual: Option<&Tensor>) -> Result<Tensor> {
        let mut state = std::mem::replace(&mut self.state, DeltaNetState::new(self.sizes, x.device())?);
        let y = self.mix(x, residual, &mut state);
        self.state = state;
        y
    }

    /// As [`forward`](Self::forward), of texts from their first token on, with a state that nobody else has. Gradients flow
    /// to `x`, `residual` and adapters.
    pub fn forward_whole(&self, x: &Tensor, residual: Option<&Tensor>) -> Result<Tensor> {
        self.mix(x, residual, &mut DeltaNetState::new(self.sizes, x.device())?)
    }

    fn mix(&self, x: &Tensor, residual: Option<&Tensor>, state: &mut DeltaNetState) -> Result<Tensor> {
        let Projected { q, k, v, gate, decay, beta } = self.inputs.project(x, &self.sizes)?;
        let [q, k, v, gate, decay, beta] = [&q, &k, &v, &gate, &decay, &beta];
        let inputs = ops::DeltaNetInputs { q, k, v, gate, decay, beta };
        let norm = self.norm.of_step().and_then(|norm| Some((norm.weight?, norm.eps)));
        let Some((norm, eps)) = norm else { candle_core::bail!("linear attention without a norm") };
        let y = self.tiled(ops::gated_delta_net(inputs, self.weights_between(norm, eps), state)?)?;
        match residual {
            Some(residual) => self.out_proj.forward_add(&y, residual),
            None => self.out_proj.forward(&y),
        }
    }

    /// Values of all heads, in the order of the output projection's inputs.
    fn tiled(&self, y: Tensor) -> Result<Tensor> {
        if !self.tiled_output {
            return Ok(y);
        }
        let y = match &self.gather {
            None => y,
            Some(Gather { rank, others: (before, after) }) => {
                rank.all_reduce_sum(&y.pad_with_zeros(D::Minus1, *before, *after)?)?
            }
        };
        // Behind a gather, heads are those of all ranks.
        let shared = self.sizes.value_heads / self.sizes.key_heads;
        tiles(&y, y.dim(D::Minus1)? / (shared * self.sizes.value_dim), shared)
    }

    /// What it has of the tokens so far.
    pub fn state(&self) -> &DeltaNetState {
        &self.state
    }

    pub fn state_mut(&mut self) -> &mut DeltaNetState {
        &mut self.state
    }

    pub fn weights(&self) -> Vec<LayerWeight> {
        let convolution = LayerWeight::from(self.convolution.clone());
        self.inputs.weights().chain([convolution, self.out_proj.weight().clone()]).collect()
    }
}

/// The weights of the convolution, of the channels of some heads of keys, as `[kernel, channels]`.
fn convolution(linear: &LinearAttentionConfig, own: &Range<usize>, vb: &VarBuilder) -> Result<Tensor> {
    let [channels, a, b] = linear.kernel_dims(linear.channels());
    let part = |rows: Range<usize>| vb.tensor_part(&[channels, a, b], "weight", &[rows, 0..a, 0..b]);
    let weight = match *own == (0..linear.key_heads) {
        true => part(0..channels)?,
        false => {
            let parts: Vec<_> = linear.channels_of(own).into_iter().map(part).collect::<Result<_>>()?;
            Tensor::cat(&parts, 0)?
        }
    };
    weight.reshape(((), linear.kernel))?.t()?.contiguous()
}

/// Of `[B, T, values]`, heads of values that lie by heads of keys: the first of each, then the second of each, and so on.
fn tiles(y: &Tensor, key_heads: usize, shared: usize) -> Result<Tensor> {
    let (batch, len, values) = y.dims3()?;
    let by_keys = (batch, len, key_heads, shared, values / (key_heads * shared).max(1));
    y.reshape(by_keys)?.transpose(2, 3)?.contiguous()?.flatten_from(2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn tiles_have_one_head_of_each_key() {
        let y = Tensor::arange(0u32, 12, &Device::Cpu).unwrap().reshape((1, 1, 12)).unwrap();
        let tiled = tiles(&y, 2, 3).unwrap().flatten_all().unwrap().to_vec1::<u32>().unwrap();
        assert_eq!(tiled, [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]);
    }
}
