//! Layers that share their input, computed together where the device gains by it.

use super::{LayerWeight, Linear};
use crate::backend::{self, Operand};
use candle_core::{bail, Result, Tensor};
use candle_nn::Module;

/// The outputs of several layers for the same `x`.
///
/// On a CUDA device, up to three packed weights of one format are multiplied by few rows of `x` in one
/// launch; in any other case this is one `forward` after another.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_quant::{nn::forward_all, Linear};
///
/// # fn main() -> candle_core::Result<()> {
/// let layer = |n| Ok::<_, candle_core::Error>(Linear::new(Tensor::ones((n, 64), candle_core::DType::F32, &Device::Cpu)?, None));
/// let (q, k, v) = (layer(64)?, layer(16)?, layer(16)?);
/// let x = Tensor::randn(0f32, 1., (2, 64), &Device::Cpu)?;
/// let [q, k, v] = forward_all([&q, &k, &v], &x)?;
/// assert_eq!((q.dims(), k.dims(), v.dims()), (&[2, 64][..], &[2, 16][..], &[2, 16][..]));
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// As those of each layer.
pub fn forward_all<const N: usize>(layers: [&Linear; N], x: &Tensor) -> Result<[Tensor; N]> {
    let outputs = match operands(&layers, x)? {
        Some((operands, x)) => backend::matmul_many(&operands, &x)?,
        None => layers.into_iter().map(|layer| layer.forward(x)).collect::<Result<_>>()?,
    };
    match outputs.try_into() {
        Ok(outputs) => Ok(outputs),
        Err(outputs) => bail!("{} outputs of {N} layers", Vec::len(&outputs)),
    }
}

/// `silu(gate(x)) * up(x)`, in one launch where [`forward_all`] takes one.
///
/// # Errors
/// As those of each layer, and if their outputs differ in shape.
pub fn swiglu(gate: &Linear, up: &Linear, x: &Tensor) -> Result<Tensor> {
    match operands(&[gate, up], x)?.as_ref().map(|(operands, x)| (operands.as_slice(), x)) {
        Some((&[gate, up], x)) => backend::swiglu(gate, up, x),
        _ => gate.forward(x)?.silu()? * up.forward(x)?,
    }
}

/// `residual + layer(x)`, in one launch where [`forward_all`] takes one.
///
/// # Errors
/// As those of the layer, and if its output differs in shape from `residual`.
pub fn forward_add(layer: &Linear, x: &Tensor, residual: &Tensor) -> Result<Tensor> {
    match operands(&[layer], x)?.as_ref().map(|(operands, x)| (operands.as_slice(), x)) {
        Some((&[operand], x)) => backend::matmul_add(operand, x, residual),
        _ => residual + layer.forward(x)?,
    }
}

/// Weights and biases, if all weights are packed and no adapter changes them, and the x for them: in the order of their columns,
/// if that is the same for all.
fn operands<'a>(layers: &[&'a Linear], x: &Tensor) -> Result<Option<(Vec<Operand<'a>>, Tensor)>> {
    let (mut operands, mut orders) = (Vec::new(), Vec::new());
    for layer in layers.iter().filter(|layer| layer.adapters().is_idle()) {
        let (weight, order) = match layer.weight() {
            LayerWeight::Quantized(weight) => (weight, None),
            LayerWeight::Reordered(weight) => (weight.weight(), Some(weight)),
            LayerWeight::ColumnScaled(_) | LayerWeight::Ggml(_) | LayerWeight::Dense(_) => return Ok(None),
        };
        operands.push(Operand { weight, bias: layer.bias() });
        orders.push(order);
    }
    if operands.len() != layers.len() {
        return Ok(None);
    }
    let x = match orders.as_slice() {
        [Some(first), rest @ ..] => {
            let same = rest.iter().all(|order| order.is_some_and(|order| order.has_order_of(first)));
            if !same {
                return Ok(None);
            }
            first.gather(x)?
        }
        orders if orders.iter().all(Option::is_none) => x.clone(),
        _ => return Ok(None),
    };
    Ok(Some((operands, x)))
}
