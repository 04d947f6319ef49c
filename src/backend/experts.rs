//! Experts that tokens chose: computed together on a CUDA device, where the choice stays; the sums of their outputs.

use super::fused::is_plain;
use super::{contiguous, cuda, unsupported_dtype, Operand};
use crate::format::Real;
use candle_core::{bail, DType, Device, Result, Storage, Tensor, WithDType};
use candle_nn::Activation;
use half::{bf16, f16};
use rayon::prelude::*;

/// What joins the outputs of an expert's gate and up projections.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Gating {
    /// `activation(gate) * up`.
    Plain(Activation),
    /// gpt-oss: `g * sigmoid(alpha * g) * (u + 1)` with `g = min(gate, limit)` and `u = clamp(up, -limit, limit)`.
    Clamped {
        /// The slope inside the sigmoid, 1.702.
        alpha: f64,
        /// Where both are cut off, 7.
        limit: f64,
    },
}

impl Gating {
    /// Applies it in candle's operations, for weights and devices that no kernel takes.
    pub(crate) fn apply(self, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
        match self {
            Self::Plain(activation) => gate.apply(&activation)? * up,
            Self::Clamped { alpha, limit } => {
                let gate = gate.minimum(limit)?;
                let glu = (&gate * candle_nn::ops::sigmoid(&(&gate * alpha)?)?)?;
                glu * (up.clamp(-limit, limit)? + 1.)?
            }
        }
    }

    /// Whether the kernels that compute experts together know it.
    fn is_in_kernels(self) -> bool {
        match self {
            Self::Plain(activation) => matches!(activation, Activation::Silu | Activation::Swish),
            Self::Clamped { .. } => true,
        }
    }
}

/// Experts and who chose them.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) struct ChosenExperts<'a> {
    /// Stacks `[E, inner, hidden]`, biases `[E, inner]`.
    pub(crate) gate: Operand<'a>,
    pub(crate) up: Operand<'a>,
    /// A stack `[E, hidden, inner]`, biases `[E, hidden]`.
    pub(crate) down: Operand<'a>,
    pub(crate) gating: Gating,
    /// U32 `[tokens, top_k]`. Those that are out of range make NaN.
    pub(crate) ids: &'a Tensor,
    /// F32 `[tokens, top_k]`.
    pub(crate) routing_weights: &'a Tensor,
    /// Whether every pair of a token and an expert is computed by itself; else those of one expert together.
    pub(crate) ungrouped: bool,
}

/// For each token of `x` `[tokens, hidden]` the sum of its experts' outputs, each times its routing weight; none if the
/// device or the weights are not such that its kernels can do it.
pub(crate) fn experts(chosen: &ChosenExperts, x: &Tensor) -> Result<Option<Tensor>> {
    let operands = [chosen.gate, chosen.up, chosen.down];
    let [gate, up, down] = operands.map(|operand| operand.weight.dims());
    let fits = match (gate.as_slice(), down.as_slice(), x.dims(), chosen.ids.dims()) {
        (&[e, inner, hidden], &[of_down, n, k], &[tokens, of_x], &[of_ids, _]) => {
            (e, inner, hidden) == (of_down, k, n) && gate == up && of_x == hidden && of_ids == tokens
        }
        _ => false,
    };
    let bias_fits = |operand: &Operand| {
        operand.bias.is_none_or(|bias| {
            let dims = operand.weight.dims();
            is_plain(bias) && matches!(dims.as_slice(), [e, n, _] if bias.dims() == [*e, *n])
        })
    };
    let device = chosen.gate.weight.device();
    let here = |tensor: &Tensor| tensor.device().same_device(device);
    let possible = matches!(device, Device::Cuda(_))
        && fits
        && chosen.gating.is_in_kernels()
        && chosen.gate.weight.format() == chosen.up.weight.format()
        && operands.iter().all(|operand| here(operand.weight.packed()) && bias_fits(operand))
        && operands.iter().filter_map(|operand| operand.bias).all(|bias| here(bias) && !bias.track_op())
        && [x, chosen.ids, chosen.routing_weights]
            .into_iter()
            .all(|tensor| here(tensor) && !tensor.track_op())
        && matches!(x.dtype(), DType::F32 | DType::F16 | DType::BF16)
        && chosen.ids.dtype() == DType::U32
        && chosen.routing_weights.dtype() == DType::F32
        && chosen.ids.dims() == chosen.routing_weights.dims();
    match possible {
        true => cuda::experts(chosen, x),
        false => Ok(None),
    }
}

/// For each token the sum of its experts' outputs, each times its routing weight: in f32, in the order of `routing_weights`, rounded once.
///
/// `outputs` `[rows, N]`, one below the other, have a row for each of the `routing_weights` `[tokens, top_k]` (F32): row `order[i]`
/// is that of routing weight `i`.
#[allow(clippy::wildcard_enum_match_arm, reason = "candle has dtypes that nothing here computes with")]
pub(crate) fn weighted_sum(outputs: &[Tensor], order: &[u32], routing_weights: &Tensor) -> Result<Tensor> {
    let Some(first) = outputs.first() else { bail!("there are no outputs to add") };
    let is_plain = |tensor: &Tensor| matches!(tensor.device(), Device::Cpu) && !tensor.track_op();
    if outputs.iter().chain([routing_weights]).all(is_plain) {
        return match first.dtype() {
            DType::F32 => sum_rows::<f32>(outputs, order, routing_weights),
            DType::F16 => sum_rows::<f16>(outputs, order, routing_weights),
            DType::BF16 => sum_rows::<bf16>(outputs, order, routing_weights),
            other => Err(unsupported_dtype("experts", other)),
        };
    }
    let in_order = Tensor::cat(outputs, 0)?.index_select(&Tensor::new(order, first.device())?, 0)?;
    let (tokens, top_k) = routing_weights.dims2()?;
    let in_f32 = in_order.to_dtype(DType::F32)?.reshape((tokens, top_k, ()))?;
    in_f32.broadcast_mul(&routing_weights.unsqueeze(2)?)?.sum(1)?.to_dtype(first.dtype())
}

fn sum_rows<T: Real + WithDType>(
    outputs: &[Tensor],
    order: &[u32],
    routing_weights: &Tensor,
) -> Result<Tensor> {
    let (tokens, top_k) = routing_weights.dims2()?;
    let routing_weights = routing_weights.flatten_all()?.to_vec1::<f32>()?;
    let n = outputs.first().map_or(Ok(0), |output| output.dim(1))?.max(1);
    let locked: Vec<_> = outputs.iter().map(Tensor::storage_and_layout).collect();
    let mut rows: Vec<&[T]> = Vec::with_capacity(order.len());
    for (storage, layout) in &locked {
        let Storage::Cpu(storage) = &**storage else { bail!("outputs of experts are on one device") };
        rows.extend(contiguous(storage.as_slice::<T>()?, layout)?.chunks(n));
    }
    let mut sums = vec![T::from_f32(0.); tokens * n];
    let of_tokens = order.par_chunks(top_k.max(1)).zip(routing_weights.par_chunks(top_k.max(1)));
    sums.par_chunks_mut(n).zip(of_tokens).try_for_each(|(to, (order, routing_weights))| {
        let mut sum = vec![0f32; n];
        for (row, weight) in order.iter().zip(routing_weights) {
            let Some(row) = rows.get(*row as usize) else { bail!("no row {row} of {}", rows.len()) };
            for (sum, output) in sum.iter_mut().zip(*row) {
                *sum += weight * output.to_f32();
            }
        }
        for (to, sum) in to.iter_mut().zip(sum) {
            *to = T::from_f32(sum);
        }
        Ok(())
    })?;
    drop(rows);
    Tensor::from_vec(sums, (tokens, n), &Device::Cpu)
}
