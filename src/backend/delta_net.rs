//! Linear attention as layers of models have it: the gated delta rule between a convolution and a norm with gates.

#[cfg(test)]
mod tests;

use super::gated_delta::gated_delta;
use super::step::{DeltaLanes, DeltaNet, Lane, Norm, UNIT_EPS};
use super::{cpu, cuda, unsupported_dtype};
use crate::{DeltaNetConfig, DeltaNetState, Error, Result};
use candle_core::{DType, Device, Tensor, D};

/// What the tokens of a layer of linear attention bring, each as a projection makes it: F32, F16 or BF16, on one device.
#[derive(Clone, Copy, Debug)]
pub struct DeltaNetInputs<'a> {
    /// `[B, T, key_heads, key_dim]`, T consecutive tokens of each sequence.
    pub q: &'a Tensor,
    /// Likewise.
    pub k: &'a Tensor,
    /// `[B, T, value_heads, value_dim]`.
    pub v: &'a Tensor,
    /// As many as values: outputs are multiplied by `silu(gate)`.
    pub gate: &'a Tensor,
    /// `[B, T, value_heads]`: the state is multiplied by `exp(rate * softplus(decay + gate_bias))` first.
    pub decay: &'a Tensor,
    /// `[B, T, value_heads]`: corrections are multiplied by its sigmoid.
    pub beta: &'a Tensor,
}

/// The weights of a layer of linear attention between its projections, of any float dtype.
#[derive(Clone, Copy, Debug)]
pub struct DeltaNetWeights<'a> {
    /// Of the convolution, `[kernel, channels]`, the oldest token first: channels are those of all queries, all keys, all values.
    pub convolution: &'a Tensor,
    /// How fast heads forget, `[value_heads]`: `-exp(A_log)`.
    pub rates: &'a Tensor,
    /// `[value_heads]`: `dt_bias`.
    pub gate_bias: &'a Tensor,
    /// Of the RMS norm of each head's output, `[value_dim]`.
    pub norm: &'a Tensor,
    /// Added to the mean square.
    pub eps: f64,
}

impl<'a> DeltaNetInputs<'a> {
    fn all(self) -> [&'a Tensor; 6] {
        let Self { q, k, v, gate, decay, beta } = self;
        [q, k, v, gate, decay, beta]
    }
}

impl<'a> DeltaNetWeights<'a> {
    /// Checks devices, dtypes and shapes.
    pub(crate) fn check(&self, config: &DeltaNetConfig, device: &Device) -> Result<()> {
        let &DeltaNetConfig { value_heads, value_dim, kernel, .. } = config;
        check_tensor("the convolution", self.convolution, &[kernel, config.channels()], device)?;
        check_tensor("rates", self.rates, &[value_heads], device)?;
        check_tensor("the bias of gates", self.gate_bias, &[value_heads], device)?;
        check_tensor("the norm", self.norm, &[value_dim], device)
    }

    fn all(self) -> ([&'a Tensor; 4], f64) {
        let Self { convolution, rates, gate_bias, norm, eps } = self;
        ([convolution, rates, gate_bias, norm], eps)
    }
}

/// Linear attention by the gated delta rule, as the layers of Qwen3-Next and Qwen3.5 have it (`Qwen3NextGatedDeltaNet` of
/// transformers): queries, keys and values go through a short causal convolution, channel by channel, and SiLU; queries and keys
/// become unit vectors, queries of length `1 / sqrt(key_dim)`; [`gated_delta`](crate::ops::gated_delta) changes the state and reads
/// it; each head's output is normalized, and multiplied by `silu(gate)`.
///
/// Tokens go on where the state is, which is that of the tokens behind them then. The result is `[B, T, value_heads * value_dim]` of
/// the dtype of `v`; everything in between is f32. The number of threads does not matter. Gradients flow to all inputs and weights, but not
/// into tokens before.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_quant::ops::{self, DeltaNetInputs, DeltaNetWeights};
/// use candle_quant::{DeltaNetConfig, DeltaNetState};
///
/// let config = DeltaNetConfig { key_heads: 2, value_heads: 4, key_dim: 16, value_dim: 8, kernel: 4 };
/// let random = |dims: &[usize]| Tensor::randn(0f32, 1., dims, &Device::Cpu);
/// let weights = DeltaNetWeights {
///     convolution: &random(&[4, config.channels()])?,
///     rates: &random(&[4])?.exp()?.neg()?,
///     gate_bias: &random(&[4])?,
///     norm: &Tensor::ones(8, DType::F32, &Device::Cpu)?,
///     eps: 1e-6,
/// };
/// let mut state = DeltaNetState::new(config, &Device::Cpu)?;
/// // A prompt of five tokens, then one more.
/// for tokens in [5, 1] {
///     let inputs = DeltaNetInputs {
///         q: &random(&[1, tokens, 2, 16])?,
///         k: &random(&[1, tokens, 2, 16])?,
///         v: &random(&[1, tokens, 4, 8])?,
///         gate: &random(&[1, tokens, 4, 8])?,
///         decay: &random(&[1, tokens, 4])?,
///         beta: &random(&[1, tokens, 4])?,
///     };
///     assert_eq!(ops::gated_delta_net(inputs, weights, &mut state)?.dims(), [1, tokens, 32]);
/// }
/// assert_eq!(state.len(0), 6);
/// # Ok::<(), candle_quant::Error>(())
/// ```
///
/// # Errors
/// If shapes, dtypes or devices do not fit the state and each other, or the state is one of another number of sequences: it is
/// then as before.
pub fn gated_delta_net(
    inputs: DeltaNetInputs,
    weights: DeltaNetWeights,
    state: &mut DeltaNetState,
) -> Result<Tensor> {
    let (batch, tokens) = check(inputs, weights, state)?;
    let is_tracked = inputs.all().into_iter().chain(weights.all().0).any(Tensor::track_op);
    let y = match state.device().is_cpu() && !is_tracked {
        true => on_cpu(inputs, weights, state, (batch, tokens))?,
        false => {
            let numbers = state.numbers(batch)?;
            if !state.is_empty() {
                begin(&numbers, state.lens())?;
            }
            let begins = state.is_empty();
            let by_kernel = match is_tracked {
                true => None,
                false => cuda::delta_net(inputs.all(), weights.all(), state.config(), (&numbers, begins))?,
            };
            match by_kernel {
                Some(y) => y,
                None => {
                    let (y, changed) = by_operations(inputs, weights, *state.config(), (&numbers, begins))?;
                    match state.device().is_cpu() {
                        true => state.set_numbers(&changed)?,
                        false => numbers.slice_set(&changed, 0, 0)?,
                    }
                    y
                }
            }
        }
    };
    (0..batch).for_each(|sequence| state.extend(sequence, tokens));
    Ok(y.to_dtype(inputs.v.dtype())?)
}

/// Checks devices, dtypes and shapes; how many texts there are, and tokens of each.
fn check(inputs: DeltaNetInputs, weights: DeltaNetWeights, state: &DeltaNetState) -> Result<(usize, usize)> {
    let DeltaNetConfig { key_heads, value_heads, key_dim, value_dim, .. } = *state.config();
    let DeltaNetInputs { q, k, v, gate, decay, beta } = inputs;
    let (batch, tokens) = match *q.dims() {
        [batch, tokens, _, _] if batch > 0 && tokens > 0 => (batch, tokens),
        _ => {
            let expected = format!("[B, T, {key_heads}, {key_dim}], of one token at least");
            return Err(Error::mismatch("queries", expected, format!("{:?}", q.dims())));
        }
    };
    state.check_batch(batch)?;
    for (name, tensor, expected) in [
        ("queries", q, &[batch, tokens, key_heads, key_dim][..]),
        ("keys", k, &[batch, tokens, key_heads, key_dim]),
        ("values", v, &[batch, tokens, value_heads, value_dim]),
        ("gates", gate, &[batch, tokens, value_heads, value_dim]),
        ("decays", decay, &[batch, tokens, value_heads]),
        ("betas", beta, &[batch, tokens, value_heads]),
    ] {
        check_tensor(name, tensor, expected, state.device())?;
    }
    weights.check(state.config(), state.device())?;
    Ok((batch, tokens))
}

fn check_tensor(name: &str, tensor: &Tensor, expected: &[usize], device: &Device) -> Result<()> {
    if tensor.dims() != expected {
        return Err(Error::mismatch(name, format!("{expected:?}"), format!("{:?}", tensor.dims())));
    }
    if !matches!(tensor.dtype(), DType::F32 | DType::F16 | DType::BF16) {
        return Err(unsupported_dtype("linear attention", tensor.dtype()).into());
    }
    if !tensor.device().same_device(device) {
        let expected = format!("on {:?}", device.location());
        return Err(Error::mismatch(name, expected, format!("on {:?}", tensor.device().location())));
    }
    Ok(())
}

fn numbers(x: &Tensor) -> candle_core::Result<Vec<f32>> {
    x.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
}

fn on_cpu(
    inputs: DeltaNetInputs,
    weights: DeltaNetWeights,
    state: &mut DeltaNetState,
    (batch, tokens): (usize, usize),
) -> Result<Tensor> {
    let config = *state.config();
    let DeltaNetConfig { key_heads, value_heads, key_dim, value_dim, .. } = config;
    let values = value_heads / key_heads * value_dim;
    let lane = |projection, stride| Lane { projection, width: key_heads * stride, start: 0, stride };
    let net = DeltaNet {
        config,
        lanes: DeltaLanes {
            q: lane(0, key_dim),
            k: lane(1, key_dim),
            v: lane(2, values),
            gate: lane(3, values),
            decay: lane(4, value_heads / key_heads),
            beta: lane(5, value_heads / key_heads),
        },
        convolution: numbers(weights.convolution)?,
        rates: numbers(weights.rates)?,
        gate_bias: numbers(weights.gate_bias)?,
        norm: Norm {
            weight: Some(numbers(weights.norm)?),
            bias: None,
            subtracts_mean: false,
            eps: weights.eps as f32,
        },
        tiled: false,
        layer: 0,
    };
    let projected = inputs.all().map(numbers).into_iter().collect::<candle_core::Result<Vec<_>>>()?;
    state.make_room(batch);
    let y = cpu::step::mix_all(&net, state, (batch, tokens), &projected);
    Ok(Tensor::from_vec(y, (batch, tokens, net.width()), &Device::Cpu)?)
}

/// Zeros where texts begin, while others go on.
fn begin(numbers: &Tensor, lens: &[usize]) -> Result<()> {
    let texts = numbers.dim(0)?;
    for (sequence, _) in lens.iter().enumerate().take(texts).filter(|(_, len)| **len == 0) {
        numbers.slice_set(&numbers.narrow(0, sequence, 1)?.zeros_like()?, 0, sequence)?;
    }
    Ok(())
}

/// In operations of candle, which are slow: outputs, and the numbers behind the tokens.
fn by_operations(
    inputs: DeltaNetInputs,
    weights: DeltaNetWeights,
    config: DeltaNetConfig,
    (numbers, begins): (&Tensor, bool),
) -> Result<(Tensor, Tensor)> {
    let DeltaNetConfig { key_heads, value_heads, key_dim, value_dim, .. } = config;
    let [q, k, v, gate, decay, beta] = inputs.all().map(|x| x.to_dtype(DType::F32));
    let (q, k, v, gate, decay, beta) = (q?, k?, v?, gate?, decay?, beta?);
    let (batch, tokens) = (v.dim(0)?, v.dim(1)?);
    let numbers = if begins { numbers.zeros_like()? } else { numbers.clone() };
    let state = (batch, value_heads, key_dim, value_dim);
    let state = numbers.narrow(2, 0, config.matrix())?.force_contiguous()?.reshape(state)?;
    let wide = |x: &Tensor| x.to_dtype(DType::F32);
    // A head of queries or keys for each one of values, along a dimension of `heads`.
    let shared = value_heads / key_heads;
    let repeated = |x: &Tensor, dim: usize| {
        let (mut by_keys, mut by_values) = (x.dims().to_vec(), x.dims().to_vec());
        by_keys.insert(dim + 1, shared);
        if let Some(heads) = by_values.get_mut(dim) {
            *heads = value_heads;
        }
        x.unsqueeze(dim + 1)?.broadcast_as(by_keys)?.reshape(by_values)
    };
    // `[kernel, value_heads, channels of a head]`.
    let convolution = wide(weights.convolution)?;
    let keys = key_heads * key_dim;
    let section = |start: usize, len: usize, heads: usize| {
        let part = convolution.narrow(1, start, len)?;
        part.reshape((config.kernel, heads, len / heads))
    };
    let convolution = Tensor::cat(
        &[
            repeated(&section(0, keys, key_heads)?, 1)?,
            repeated(&section(keys, keys, key_heads)?, 1)?,
            section(2 * keys, value_heads * value_dim, value_heads)?,
        ],
        2,
    )?;
    let x = Tensor::cat(&[repeated(&q, 2)?, repeated(&k, 2)?, v], 3)?;
    let (taps, channels) = (config.taps(), config.channels_of_head());
    let (all, last) = match taps {
        0 => (x, None),
        taps => {
            let seen = numbers.narrow(2, config.matrix(), taps * channels)?;
            let seen = seen.reshape((batch, value_heads, taps, channels))?.transpose(1, 2)?;
            let all = Tensor::cat(&[seen.contiguous()?, x], 1)?;
            let last = all.narrow(1, tokens, taps)?.transpose(1, 2)?.detach().contiguous()?;
            (all, Some(last.flatten_from(2)?))
        }
    };
    let tap = |tap: usize| all.narrow(1, tap, tokens)?.broadcast_mul(&convolution.narrow(0, tap, 1)?);
    let mut mixed = tap(0)?;
    for index in 1..config.kernel {
        mixed = (mixed + tap(index)?)?;
    }
    let mixed = mixed.silu()?;
    let unit = |start: usize, length: f64| {
        let x = mixed.narrow(3, start, key_dim)?.contiguous()?;
        x.broadcast_div(&((x.sqr()?.sum_keepdim(D::Minus1)? + UNIT_EPS)?.sqrt()? / length)?)
    };
    let (q, k) = (unit(0, 1. / (key_dim as f64).sqrt())?, unit(key_dim, 1.)?);
    let v = mixed.narrow(3, 2 * key_dim, value_dim)?.contiguous()?;
    let g = softplus(&decay.broadcast_add(&wide(weights.gate_bias)?)?)?;
    let g = g.broadcast_mul(&wide(weights.rates)?)?;
    let y = gated_delta(&q, &k, &v, &g, &candle_nn::ops::sigmoid(&beta)?, &state)?;
    let square = (y.sqr()?.mean_keepdim(D::Minus1)? + weights.eps)?;
    let y = y.broadcast_div(&square.sqrt()?)?.broadcast_mul(&wide(weights.norm)?)?;
    let y = (y * gate.silu()?)?.reshape((batch, tokens, value_heads * value_dim))?;
    let changed: Vec<_> = [Some(state.flatten_from(2)?), last].into_iter().flatten().collect();
    Ok((y, Tensor::cat(&changed, 2)?))
}

/// `ln(1 + exp(x))`, of large numbers, too.
fn softplus(x: &Tensor) -> candle_core::Result<Tensor> {
    x.relu()? + (x.abs()?.neg()?.exp()? + 1.)?.log()?
}
