//! Linear attention: a state of fixed size, which [`ops::gated_delta`] changes, stands for all tokens before.

mod inputs;

use crate::config::LinearAttentionConfig;
use crate::norm::{Norm, NormKind};
use crate::projection::rows_of;
use crate::sharding::Sharding;
use crate::Config;
use candle_core::{DType, Device, Result, Tensor, D};
use candle_nn::Module;
use candle_quant::nn::{LayerWeight, VarBuilder};
use candle_quant::parallel::{Rank, RowParallel};
use candle_quant::{ops, Error};
use inputs::{Inputs, Projected};
use std::ops::Range;
use std::slice;

/// Added to the square of the length by which queries and keys are divided; no number of the config.
const EPS: f64 = 1e-6;

/// A layer, or its part of some heads.
#[derive(Debug)]
pub(crate) struct LinearAttention {
    config: LinearAttentionConfig,
    /// Heads of keys of this rank.
    key_heads: usize,
    inputs: Inputs,
    /// `[kernel, channels]`, F32.
    convolution: Tensor,
    /// How fast heads of values forget, and what is added to their gates, F32.
    rates: Tensor,
    gate_bias: Tensor,
    norm: Norm,
    out_proj: RowParallel,
    gather: Option<Gather>,
    state: Option<State>,
}

/// What brings the values of all ranks together, before an output projection that every rank has whole.
#[derive(Debug)]
struct Gather {
    rank: Rank,
    /// Elements before and after those of this rank.
    others: (usize, usize),
}

/// What is left of the tokens so far, of each text of a batch, in F32.
#[derive(Debug)]
struct State {
    /// What the convolution still sees, `[B, kernel - 1, channels]`.
    seen: Tensor,
    /// `[B, value_heads, key_dim, value_dim]`.
    matrices: Tensor,
    tokens: usize,
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
        Ok(Self {
            key_heads: own.len(),
            inputs: Inputs::new(config.hidden_size, linear, &own, vb)?,
            convolution: convolution(linear, &own, &wide.pp("conv1d"))?,
            rates: of_heads("A_log")?.exp()?.neg()?,
            gate_bias: of_heads("dt_bias")?,
            norm: Norm::new(NormKind::Rms, linear.value_dim, config.norm_eps, vb.pp("norm"))?,
            out_proj: rows_of(all_values, config.hidden_size, inputs, false, output)?,
            gather,
            state: None,
            config: linear.clone(),
        })
    }

    /// `x` is `[B, T, hidden]`, the tokens that follow those in the state; what is made of them is added to `residual`, if
    /// there is one.
    pub fn forward(&mut self, x: &Tensor, residual: Option<&Tensor>) -> Result<Tensor> {
        let (batch, len, _) = x.dims3()?;
        let mut state = match self.state.take() {
            None => self.begin(batch, x.device())?,
            Some(state) => match state.seen.dim(0)? {
                texts if texts == batch => state,
                texts => {
                    let expected = format!("{texts} texts, as in the state");
                    return Err(Error::mismatch("batch", expected, batch.to_string()).into());
                }
            },
        };
        let y = self.mix(x, residual, &mut state)?;
        state.tokens = state.tokens.saturating_add(len);
        self.state = Some(state);
        Ok(y)
    }

    /// As [`forward`](Self::forward), of texts from their first token on, with a state that nobody else has. Gradients flow
    /// to `x`, `residual` and adapters.
    pub fn forward_whole(&self, x: &Tensor, residual: Option<&Tensor>) -> Result<Tensor> {
        self.mix(x, residual, &mut self.begin(x.dim(0)?, x.device())?)
    }

    /// The state of texts without tokens.
    fn begin(&self, batch: usize, device: &Device) -> Result<State> {
        let LinearAttentionConfig { kernel, key_dim, value_dim, .. } = self.config;
        let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, device);
        let heads = self.key_heads * self.config.shared();
        Ok(State {
            seen: zeros(&[batch, kernel.saturating_sub(1), self.convolution.dim(1)?])?,
            matrices: zeros(&[batch, heads, key_dim, value_dim])?,
            tokens: 0,
        })
    }

    fn mix(&self, x: &Tensor, residual: Option<&Tensor>, state: &mut State) -> Result<Tensor> {
        let LinearAttentionConfig { key_dim, value_dim, .. } = self.config;
        let (batch, len, _) = x.dims3()?;
        let Projected { qkv, gate, decay, beta } = self.inputs.project(x)?;
        let qkv = self.convolve(&qkv.to_dtype(DType::F32)?, state)?;
        let keys = self.key_heads * key_dim;
        let by_heads = |start: usize, size: usize, dim: usize| {
            qkv.narrow(D::Minus1, start, size)?.contiguous()?.reshape((batch, len, size / dim, dim))
        };
        let q = (unit(&by_heads(0, keys, key_dim)?)? * (1. / (key_dim as f64).sqrt()))?;
        let k = unit(&by_heads(keys, keys, key_dim)?)?;
        let v = by_heads(2 * keys, self.config.elements(self.key_heads).1, value_dim)?;
        let decay = decay.to_dtype(DType::F32)?.broadcast_add(&self.gate_bias)?;
        let g = softplus(&decay)?.broadcast_mul(&self.rates)?;
        let beta = candle_nn::ops::sigmoid(&beta.to_dtype(DType::F32)?)?;
        let y = ops::gated_delta(&q, &k, &v, &g, &beta, &state.matrices)?;
        let y = self.norm.forward(&y.to_dtype(x.dtype())?)?.to_dtype(DType::F32)?;
        let gate = gate.to_dtype(DType::F32)?.reshape(y.shape())?.silu()?;
        let y = self.tiled((y * gate)?.flatten_from(2)?.to_dtype(x.dtype())?)?;
        match residual {
            Some(residual) => self.out_proj.forward_add(&y, residual),
            None => self.out_proj.forward(&y),
        }
    }

    /// Values of all heads, in the order of the output projection's inputs.
    fn tiled(&self, y: Tensor) -> Result<Tensor> {
        if !self.config.tiled_output {
            return Ok(y);
        }
        let y = match &self.gather {
            None => y,
            Some(Gather { rank, others: (before, after) }) => {
                rank.all_reduce_sum(&y.pad_with_zeros(D::Minus1, *before, *after)?)?
            }
        };
        tiles(&y, self.config.key_heads, self.config.shared())
    }

    /// `silu` of what the last tokens of `x` `[B, T, channels]` give together, channel by channel.
    fn convolve(&self, x: &Tensor, state: &mut State) -> Result<Tensor> {
        let len = x.dim(1)?;
        let all = Tensor::cat(&[&state.seen, x], 1)?;
        let (kernel, _) = self.convolution.dims2()?;
        let mut sum = all.narrow(1, 0, len)?.broadcast_mul(&self.convolution.narrow(0, 0, 1)?)?;
        for tap in 1..kernel {
            let part = all.narrow(1, tap, len)?.broadcast_mul(&self.convolution.narrow(0, tap, 1)?)?;
            sum = (sum + part)?;
        }
        // A copy: a view would keep all tokens of a prompt.
        state.seen = all.narrow(1, len, kernel.saturating_sub(1))?.detach().force_contiguous()?;
        sum.silu()
    }

    /// Tokens in the state.
    pub fn tokens(&self) -> usize {
        self.state.as_ref().map_or(0, |state| state.tokens)
    }

    pub fn clear(&mut self) {
        self.state = None;
    }

    /// Bytes of the state of all texts.
    pub fn state_bytes(&self) -> u64 {
        let texts = self.state.as_ref().and_then(|state| state.seen.dims().first());
        self.bytes_of_text().saturating_mul(texts.copied().unwrap_or(0) as u64)
    }

    /// Bytes of the state of a text, of any length.
    pub fn bytes_of_text(&self) -> u64 {
        self.config.state_bytes(self.key_heads)
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

/// Heads of length 1.
fn unit(x: &Tensor) -> Result<Tensor> {
    x.broadcast_div(&(x.sqr()?.sum_keepdim(D::Minus1)? + EPS)?.sqrt()?)
}

/// `ln(1 + exp(x))`, of large numbers, too.
fn softplus(x: &Tensor) -> Result<Tensor> {
    x.relu()? + (x.abs()?.neg()?.exp()? + 1.)?.log()?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_have_one_head_of_each_key() {
        let y = Tensor::arange(0u32, 12, &Device::Cpu).unwrap().reshape((1, 1, 12)).unwrap();
        let tiled = tiles(&y, 2, 3).unwrap().flatten_all().unwrap().to_vec1::<u32>().unwrap();
        assert_eq!(tiled, [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]);
    }
}
