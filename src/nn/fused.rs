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
    let operands: Option<Vec<Operand>> = layers.into_iter().map(operand).collect();
    let outputs = match operands {
        Some(operands) => backend::matmul_many(&operands, x)?,
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
    match (operand(gate), operand(up)) {
        (Some(gate), Some(up)) => backend::swiglu(gate, up, x),
        _ => gate.forward(x)?.silu()? * up.forward(x)?,
    }
}

/// `residual + layer(x)`, in one launch where [`forward_all`] takes one.
///
/// # Errors
/// As those of the layer, and if its output differs in shape from `residual`.
pub fn forward_add(layer: &Linear, x: &Tensor, residual: &Tensor) -> Result<Tensor> {
    match operand(layer) {
        Some(operand) => backend::matmul_add(operand, x, residual),
        None => residual + layer.forward(x)?,
    }
}

/// The weight and the bias, if the weight is packed and no adapter changes it.
fn operand(layer: &Linear) -> Option<Operand<'_>> {
    match layer.weight() {
        LayerWeight::Quantized(weight) if layer.adapters().is_idle() => {
            Some(Operand { weight, bias: layer.bias() })
        }
        _ => None,
    }
}
