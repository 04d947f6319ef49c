//! What a plan needs to know of layers, checked.

use super::StepNorm;
use crate::backend::step::{
    Activation, ExpertGating, HeadNorm, Matrix, Norm, Projection, QueryGrowth, StackProjection, Turn,
};
use crate::backend::{has_kernels, Gating};
use crate::nn::ExpertStack;
use crate::tensor::LayerWeight;
use crate::{Error, QuantTensor, Result};
use candle_core::{DType, Device, Tensor};

/// A packed weight, or a dense one that nothing trains.
pub(super) fn matrix(what: &str, weight: &LayerWeight, device: &Device) -> Result<Matrix> {
    if weight.dims().len() != 2 {
        return Err(unsupported(what, &format!("in {} dimensions", weight.dims().len())));
    }
    match weight {
        LayerWeight::Quantized(weight) => has_kernel(what, weight, device).map(Matrix::Packed),
        LayerWeight::Dense(weight) if weight.track_op() => Err(unsupported(what, "that is trained")),
        LayerWeight::Dense(weight) if !weight.device().same_device(device) => {
            let found = format!("as {:?} on {:?}", weight.dtype(), weight.device().location());
            Err(unsupported(what, &found))
        }
        LayerWeight::Dense(weight) if matches!(weight.dtype(), DType::F32 | DType::F16 | DType::BF16) => {
            Ok(Matrix::Dense(weight.detach().contiguous()?))
        }
        other => Err(unsupported(what, &format!("as {}", other.format_name()))),
    }
}

pub(super) fn has_kernel(what: &str, weight: &QuantTensor, device: &Device) -> Result<QuantTensor> {
    match weight.device().same_device(device) && has_kernels(weight.format(), device) {
        true => Ok(weight.clone()),
        false => {
            let found = format!("in {} on {:?}", weight.format(), weight.device().location());
            Err(unsupported(what, &found))
        }
    }
}

/// A projection of `experts` experts with so many inputs, and so many outputs if that is known.
pub(super) fn stack(
    what: &str,
    stack: &ExpertStack,
    (experts, rows, inputs): (usize, Option<usize>, usize),
    device: &Device,
) -> Result<StackProjection> {
    let Some(operand) = stack.packed() else {
        return Err(unsupported(what, "of experts that are dense or differ"));
    };
    let weight = has_kernel(what, operand.weight, device)?;
    let found = match weight.dims().as_slice() {
        &[found, n, k] if (found, k) == (experts, inputs) && rows.is_none_or(|rows| rows == n) => Some(n),
        _ => None,
    };
    let Some(n) = found else {
        let rows = rows.map_or("N".to_string(), |rows| rows.to_string());
        let expected = format!("a stack [{experts}, {rows}, {inputs}]");
        return Err(Error::mismatch(what, expected, format!("{:?}", weight.dims())));
    };
    let bias = operand.bias.map(|bias| numbers(what, bias, experts * n)).transpose()?;
    Ok(StackProjection { weight, bias, rows: n, k: inputs })
}

pub(super) fn expert_gating(gating: Gating) -> Result<ExpertGating> {
    match gating {
        Gating::Plain(plain) => Ok(ExpertGating::Activation(activation(plain)?)),
        Gating::Clamped { alpha, limit } => Ok(ExpertGating::Clamped {
            alpha: factor("slope of gates", alpha)?,
            limit: factor("limit of gates", limit)?,
        }),
    }
}

pub(super) fn check_rows(what: &str, projection: &Projection, expected: usize) -> Result<()> {
    match projection.rows == expected {
        true => Ok(()),
        false => Err(Error::mismatch(what, format!("{expected} outputs"), projection.rows.to_string())),
    }
}

pub(super) fn norm(what: &str, norm: Option<StepNorm>, size: usize) -> Result<Option<Norm>> {
    let Some(StepNorm { weight, bias, subtracts_mean, eps }) = norm else { return Ok(None) };
    let numbers = |x: Option<&Tensor>| x.map(|x| numbers(what, x, size)).transpose();
    Ok(Some(Norm { weight: numbers(weight)?, bias: numbers(bias)?, subtracts_mean, eps: eps as f32 }))
}

/// A norm of queries or keys; the shape of its numbers says of what.
pub(super) fn head_norm(
    what: &str,
    head_norm: Option<StepNorm>,
    (heads, head_dim): (usize, usize),
    turns_first: bool,
) -> Result<Option<HeadNorm>> {
    let Some(all) = head_norm else { return Ok(None) };
    let dims = all.weight.or(all.bias).map(Tensor::dims);
    let is_of_head = dims.is_none_or(|dims| dims == [head_dim]);
    let over_all = !is_of_head && dims.is_some_and(|dims| dims.len() == 1);
    if over_all && turns_first {
        return Err(unsupported(what, "over all heads, behind their turn,"));
    }
    let size = if is_of_head { head_dim } else { heads * head_dim };
    Ok(norm(what, head_norm, size)?.map(|norm| HeadNorm { norm, over_all }))
}

/// What is not there turns nothing.
pub(super) fn turn(turn: Option<&Turn>, head_dim: usize) -> Result<Turn> {
    let turn = turn.cloned().unwrap_or_default();
    let pairs = turn.inverse_frequencies.len();
    for frequencies in [Some(&turn.inverse_frequencies), turn.of_long_texts.as_ref()].into_iter().flatten() {
        if frequencies.len() != pairs || pairs > head_dim / 2 {
            let expected = format!("one for each pair that turns of {head_dim} elements");
            return Err(Error::mismatch("frequencies", expected, frequencies.len().to_string()));
        }
    }
    factor("factor of turns", turn.factor.into())?;
    if let Some(QueryGrowth { beta, period, .. }) = turn.query_growth {
        if !beta.is_finite() || period == 0 {
            let found = format!("{beta} and {period}");
            return Err(Error::mismatch("growth of queries", "a number, and tokens", found));
        }
    }
    Ok(turn)
}

pub(super) fn activation(activation: candle_nn::Activation) -> Result<Activation> {
    #[allow(clippy::wildcard_enum_match_arm, reason = "candle has more than models use")]
    match activation {
        candle_nn::Activation::Silu | candle_nn::Activation::Swish => Ok(Activation::Silu),
        candle_nn::Activation::Gelu => Ok(Activation::Gelu),
        candle_nn::Activation::NewGelu | candle_nn::Activation::GeluPytorchTanh => Ok(Activation::GeluTanh),
        candle_nn::Activation::Relu2 => Ok(Activation::Relu2),
        other => Err(unsupported("activation", &format!("{other:?}"))),
    }
}

/// A number above zero.
pub(super) fn factor(what: &str, number: f64) -> Result<f32> {
    let narrow = number as f32;
    match narrow.is_finite() && narrow > 0. {
        true => Ok(narrow),
        false => Err(Error::mismatch(what, "a finite number above zero", number.to_string())),
    }
}

/// The same, if there is one.
pub(super) fn limit(what: &str, number: Option<f64>) -> Result<Option<f32>> {
    number.map(|number| factor(what, number)).transpose()
}

pub(super) fn numbers(what: &str, tensor: &Tensor, len: usize) -> Result<Vec<f32>> {
    if tensor.elem_count() != len {
        return Err(Error::mismatch(what, format!("{len} numbers"), format!("shape {:?}", tensor.dims())));
    }
    Ok(tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
}

pub(super) fn unsupported(what: &str, found: &str) -> Error {
    Error::Unsupported {
        what: format!("{what} of a step plan {found}"),
        remedy: "call the layers one by one".to_string(),
    }
}
