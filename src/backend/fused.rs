//! Matmuls that one launch on a CUDA device computes together. Elsewhere, and where shapes or formats do
//! not allow it, they are computed one after another.

use super::{check_operand, cuda, matmul, Operand};
use candle_core::{DType, Device, Result, Tensor};

/// What becomes of the outputs of a launch.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) enum Epilogue<'a> {
    /// Each is a result; `residual`, contiguous and of the shape of the first, is added to it.
    Store { residual: Option<&'a Tensor> },
    /// The result is silu(first) * second.
    Swiglu,
}

#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
impl<'a> Epilogue<'a> {
    /// Results of a launch with so many weights.
    pub(crate) fn results(self, weights: usize) -> usize {
        match self {
            Self::Store { .. } => weights,
            Self::Swiglu => 1,
        }
    }

    pub(crate) fn residual(self) -> Option<&'a Tensor> {
        match self {
            Self::Store { residual } => residual,
            Self::Swiglu => None,
        }
    }
}

/// The matmuls of several matrices with the same x.
pub(crate) fn matmul_many(operands: &[Operand], x: &Tensor) -> Result<Vec<Tensor>> {
    match in_one_launch(operands, x, Epilogue::Store { residual: None })? {
        Some(outputs) => Ok(outputs),
        None => operands.iter().map(|operand| matmul(*operand, x)).collect(),
    }
}

/// `silu(gate) * up` of the outputs for x.
pub(crate) fn swiglu(gate: Operand, up: Operand, x: &Tensor) -> Result<Tensor> {
    if gate.weight.dims() == up.weight.dims() {
        if let Some(output) = in_one_launch(&[gate, up], x, Epilogue::Swiglu)?.and_then(|mut all| all.pop()) {
            return Ok(output);
        }
    }
    matmul(gate, x)?.silu()? * matmul(up, x)?
}

/// The matmul with x, and `residual` added to it.
pub(crate) fn matmul_add(operand: Operand, x: &Tensor, residual: &Tensor) -> Result<Tensor> {
    let mut dims = x.dims().to_vec();
    if let (Some(last), [n, _]) = (dims.last_mut(), operand.weight.dims().as_slice()) {
        *last = *n;
    }
    let fits = residual.dims() == dims && residual.is_contiguous() && residual.dtype() == x.dtype();
    if fits && !residual.track_op() && residual.device().same_device(x.device()) {
        let epilogue = Epilogue::Store { residual: Some(residual) };
        if let Some(sum) = in_one_launch(&[operand], x, epilogue)?.and_then(|mut all| all.pop()) {
            return Ok(sum);
        }
    }
    residual + matmul(operand, x)?
}

/// What one launch gives, if it is possible on this device and with these weights. Not where gradients are
/// wanted: they follow from the single matmuls.
fn in_one_launch(operands: &[Operand], x: &Tensor, epilogue: Epilogue) -> Result<Option<Vec<Tensor>>> {
    let possible = |operand: &Operand| {
        let has_gradient = operand.bias.is_some_and(Tensor::track_op);
        operand.weight.packed().rank() == 2 && !has_gradient && operand.bias.is_none_or(is_plain)
    };
    if !matches!(x.device(), Device::Cuda(_)) || x.track_op() || !operands.iter().all(possible) {
        return Ok(None);
    }
    operands.iter().try_for_each(|operand| check_operand(*operand, x))?;
    cuda::fused(operands, x, epilogue)
}

/// Whether kernels can read a bias as it lies.
pub(super) fn is_plain(bias: &Tensor) -> bool {
    [DType::F16, DType::BF16, DType::F32].contains(&bias.dtype()) && bias.is_contiguous()
}
