//! Matmuls that one launch on a CUDA device computes together. Elsewhere, and where shapes or formats do
//! not allow it, they are computed one after another.

use super::{check_operand, cuda, matmul, Operand};
use crate::{Error, QuantTensor};
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::RmsNorm;

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

/// The weight of an RMS norm, `[K]` in f32, and what is added to the mean square.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) struct NormOfX<'a> {
    pub(crate) weight: &'a Tensor,
    pub(crate) eps: f32,
}

/// Packed weights times a normalized x: `norm(x) * weight^T` for each of them.
///
/// On a CUDA device up to three weights of one format take one launch, which normalizes x on the way, if x is F16 or BF16 with up
/// to 8 rows; of more rows x is normalized by the launch that brings it into the order of tensor cores, of any dtype. It is then
/// not rounded to its dtype in between. (A norm's weight that is not F32 costs a conversion each time.) Elsewhere the
/// norm comes first. x and the norm's weight have gradients, by way of the separate operations.
///
/// * `x`: `[.., K]` of F32, F16 or BF16; `norm`: of K elements; each weight `[N, K]`, any N.
///
/// Returns `[.., N]` for each weight, of the dtype of x.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::RmsNorm;
/// use candle_quant::{ops::rms_norm_matmul, QuantFormat, QuantTensor};
///
/// let device = Device::Cpu;
/// let norm = RmsNorm::new(Tensor::ones(64, DType::F32, &device)?, 1e-6);
/// let weight = |rows: usize| {
///     QuantTensor::quantize(&Tensor::ones((rows, 64), DType::F32, &device)?, QuantFormat::affine(4, 64)?)
/// };
/// let (q, k) = (weight(8)?, weight(2)?);
/// let [q, k] = rms_norm_matmul(&Tensor::full(3f32, (1, 64), &device)?, &norm, [&q, &k])?;
/// assert_eq!((q.dims(), k.dims()), (&[1, 8][..], &[1, 2][..]));
/// assert!((k.to_vec2::<f32>()?[0][0] - 64.).abs() < 1e-3);
/// # Ok::<(), candle_quant::Error>(())
/// ```
///
/// # Errors
/// If shapes, dtypes or devices do not fit.
pub fn rms_norm_matmul<const N: usize>(
    x: &Tensor,
    norm: &RmsNorm,
    weights: [&QuantTensor; N],
) -> crate::Result<[Tensor; N]> {
    let operands = weights.map(|weight| Operand { weight, bias: None });
    let outputs = match fused_norm(&operands, x, norm)? {
        Some(outputs) => outputs,
        // The fused norm has no gradients.
        None if x.track_op() || norm.weight().track_op() => matmul_many(&operands, &norm.forward_diff(x)?)?,
        None => matmul_many(&operands, &norm.forward(x)?)?,
    };
    outputs.try_into().map_err(|outputs: Vec<Tensor>| {
        Error::mismatch("outputs of a matmul", N.to_string(), outputs.len().to_string())
    })
}

fn fused_norm(operands: &[Operand], x: &Tensor, norm: &RmsNorm) -> Result<Option<Vec<Tensor>>> {
    let has_kernel = matches!(x.device(), Device::Cuda(_));
    if !has_kernel || norm.weight().track_op() || x.dims().last() != Some(&norm.weight().elem_count()) {
        return Ok(None);
    }
    let weight = norm.weight().to_dtype(DType::F32)?.contiguous()?;
    let norm = NormOfX { weight: &weight, eps: norm.eps() as f32 };
    in_one_launch(operands, x, Some(norm), Epilogue::Store { residual: None })
}

/// The matmuls of several matrices with the same x.
pub(crate) fn matmul_many(operands: &[Operand], x: &Tensor) -> Result<Vec<Tensor>> {
    match in_one_launch(operands, x, None, Epilogue::Store { residual: None })? {
        Some(outputs) => Ok(outputs),
        None => operands.iter().map(|operand| matmul(*operand, x)).collect(),
    }
}

/// `silu(gate) * up` of the outputs for x.
pub(crate) fn swiglu(gate: Operand, up: Operand, x: &Tensor) -> Result<Tensor> {
    if gate.weight.dims() == up.weight.dims() {
        if let Some(output) =
            in_one_launch(&[gate, up], x, None, Epilogue::Swiglu)?.and_then(|mut all| all.pop())
        {
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
        if let Some(sum) = in_one_launch(&[operand], x, None, epilogue)?.and_then(|mut all| all.pop()) {
            return Ok(sum);
        }
    }
    residual + matmul(operand, x)?
}

/// What one launch gives, if it is possible on this device and with these weights. Not where gradients are
/// wanted: they follow from the single matmuls.
fn in_one_launch(
    operands: &[Operand],
    x: &Tensor,
    norm: Option<NormOfX>,
    epilogue: Epilogue,
) -> Result<Option<Vec<Tensor>>> {
    let possible = |operand: &Operand| {
        let has_gradient = operand.bias.is_some_and(Tensor::track_op);
        operand.weight.packed().rank() == 2 && !has_gradient && operand.bias.is_none_or(is_plain)
    };
    if !matches!(x.device(), Device::Cuda(_)) || x.track_op() || !operands.iter().all(possible) {
        return Ok(None);
    }
    operands.iter().try_for_each(|operand| check_operand(*operand, x))?;
    cuda::fused(operands, x, norm, epilogue)
}

/// Whether kernels can read a bias as it lies.
pub(super) fn is_plain(bias: &Tensor) -> bool {
    [DType::F16, DType::BF16, DType::F32].contains(&bias.dtype()) && bias.is_contiguous()
}
