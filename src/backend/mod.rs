//! The one door to the kernels: the device of a weight decides who computes.

#![deny(clippy::wildcard_enum_match_arm)]

mod attention;
mod backward;
mod column_scaled;
mod cpu;
#[cfg_attr(not(feature = "cuda"), path = "no_cuda.rs")]
mod cuda;
mod decode_attention;
mod delta_net;
mod experts;
mod fused;
mod gated_delta;
mod lent;
pub(crate) mod low_rank;
mod ops;
mod precision;
mod prefill_attention;
mod quantize;
mod reordered;
pub(crate) mod routing;
pub(crate) mod sample;
pub(crate) mod step;
mod step_caches;

use crate::format::Real;
use crate::{Error, QuantFormat, QuantTensor};
pub use attention::{attention, AttentionOptions};
use backward::matmul_backward;
use candle_core::{
    bail, CpuStorage, CudaStorage, CustomOp1, CustomOp2, DType, Device, Layout, Result, Shape, Tensor, D,
};
use cpu::GroupValues;
pub(crate) use cuda::StepLaunches;
pub use decode_attention::decode_attention;
pub(crate) use decode_attention::NewToken;
pub use delta_net::{gated_delta_net, DeltaNetInputs, DeltaNetWeights};
pub use experts::Gating;
pub(crate) use experts::{experts, weighted_sum, ChosenExperts};
pub use fused::rms_norm_matmul;
pub(crate) use fused::{matmul_add, matmul_many, swiglu, Epilogue, NormOfX};
pub use gated_delta::gated_delta;
use half::{bf16, f16};
use lent::{group_values, with_matrix, Lent};
pub use ops::quantize_rows;
pub use precision::ActivationPrecision;
pub use prefill_attention::prefill_attention;
pub(crate) use prefill_attention::NewTokens;
pub(crate) use quantize::Parts;
pub use routing::{ExpertGroups, GroupScore, Scores};
pub use sample::{sample, SampleOptions};
pub use step_caches::StepCaches;

#[cfg(target_endian = "big")]
compile_error!("candle-quant reads packed words as little-endian bytes");

/// The instruction set that the CPU's kernels use: `avx512amx`, `avx512vnni`, `avx512`, `avx2`, `neon` or `portable`.
pub fn instruction_set() -> &'static str {
    cpu::instruction_set()
}

/// The weight of a matmul, and what is added to its output.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operand<'a> {
    pub(crate) weight: &'a QuantTensor,
    pub(crate) bias: Option<&'a Tensor>,
}

/// See [`QuantTensor::matmul`].
pub(crate) fn matmul(operand: Operand, x: &Tensor) -> Result<Tensor> {
    let Operand { weight, bias } = operand;
    check_operand(operand, x)?;
    if weight.packed().rank() > 2 {
        return stacked_matmul(operand, x);
    }
    let x = match x.device() {
        // Kernels of the device take views, or copy them.
        Device::Cuda(_) => x.clone(),
        Device::Cpu | Device::Metal(_) => x.contiguous()?,
    };
    let bias = bias.map(for_kernels).transpose()?;
    let matmul = QuantMatmul { weight: weight.clone(), bias: bias.as_ref().map(Tensor::detach) };
    match bias.filter(Tensor::track_op) {
        Some(bias) => x.apply_op2(&bias, matmul),
        None => x.apply_op1(matmul),
    }
}

/// A bias as the kernels of its device take it.
fn for_kernels(bias: &Tensor) -> Result<Tensor> {
    match (bias.device(), bias.dtype()) {
        (Device::Cuda(_), DType::F16 | DType::BF16) => bias.contiguous(),
        _ => bias.to_dtype(DType::F32)?.contiguous(),
    }
}

/// Checks shapes and devices of a matmul; the kernels check its dtype.
fn check_operand(Operand { weight, bias }: Operand, x: &Tensor) -> Result<()> {
    let dims = weight.dims();
    let [.., n, k] = dims.as_slice() else { bail!("a weight has at least two dimensions") };
    if x.dims().last() != Some(k) {
        let expected = format!("last dimension {k} (K of {weight:?})");
        return Err(Error::mismatch("x", expected, format!("shape {:?}", x.dims())).into());
    }
    if let Some(bias) = bias {
        if bias.dims() != [*n] {
            return Err(Error::mismatch("bias", format!("shape [{n}]"), format!("{:?}", bias.dims())).into());
        }
        if !bias.dtype().is_float() {
            return Err(Error::mismatch("bias", "a float dtype", format!("{:?}", bias.dtype())).into());
        }
        check_device("bias", bias, weight.device())?;
    }
    check_device("x", x, weight.device())
}

/// One matmul for each matrix of a stack; leading dimensions broadcast both ways.
fn stacked_matmul(Operand { weight, bias }: Operand, x: &Tensor) -> Result<Tensor> {
    let dims = weight.dims();
    let [stack @ .., _, _] = dims.as_slice() else { bail!("a weight has at least two dimensions") };
    let [x_stack @ .., m, k] = x.dims() else {
        let expected = "a shape [.., M, K] for a stack of weights";
        return Err(Error::mismatch("x", expected, format!("{:?}", x.dims())).into());
    };
    let shape = Shape::from(x_stack).broadcast_shape_binary_op(&Shape::from(stack), "matmul")?;
    let batch = shape.dims().to_vec();
    let output_dims = [&batch[..], &[*m, weight.packed().dim(D::Minus2)?]].concat();
    if shape.elem_count() == 0 {
        return Tensor::zeros(output_dims, x.dtype(), x.device());
    }
    // Which entry of a flattened stack each batch entry meets.
    let entries = |stack: &[usize]| -> Result<Vec<u32>> {
        let count: usize = stack.iter().product();
        let index = Tensor::arange(0u32, count as u32, &Device::Cpu)?.reshape(stack)?;
        index.broadcast_as(batch.as_slice())?.flatten_all()?.to_vec1()
    };
    let matrices = entries(stack)?.into_iter().map(|matrix| matrix as usize);
    let pairs = matrices.zip(entries(x_stack)?.into_iter().map(|entry| entry as usize));
    let x = x.reshape((x_stack.iter().product::<usize>(), *m, *k))?;
    if matches!(x.device(), Device::Cuda(_)) && !x.track_op() && !bias.is_some_and(Tensor::track_op) {
        let bias = bias.map(for_kernels).transpose()?;
        let operand = Operand { weight, bias: bias.as_ref() };
        return cuda::stacked(operand, &pairs.collect::<Vec<_>>(), &x)?.reshape(output_dims);
    }
    let flat = weight.flatten_stack()?;
    let outputs =
        pairs.map(|(matrix, entry)| matmul(Operand { weight: &flat.matrix(matrix)?, bias }, &x.get(entry)?));
    Tensor::stack(&outputs.collect::<Result<Vec<_>>>()?, 0)?.reshape(output_dims)
}

/// Whether anything computes with weights of a format on a device.
pub(crate) fn has_kernels(format: QuantFormat, device: &Device) -> bool {
    match device {
        Device::Cpu => true,
        Device::Cuda(_) => cuda::has_kernels(format),
        Device::Metal(_) => false,
    }
}

/// See [`QuantTensor::dequantize`].
pub(crate) fn dequantize(weight: &QuantTensor, dtype: DType) -> Result<Tensor> {
    fn typed<T: Real>(weight: &QuantTensor) -> Result<Tensor> {
        let dims = weight.dims();
        let matrices = dims[..dims.len() - 2].iter().product();
        let mut all = Vec::with_capacity(dims.iter().product());
        for matrix in 0..matrices {
            all.extend(with_matrix(weight, matrix, |matrix| Ok(cpu::dequantize::<T>(matrix)))?);
        }
        Tensor::from_vec(all, dims, &Device::Cpu)
    }
    match (weight.device(), dtype) {
        (Device::Cuda(_), DType::F32 | DType::F16 | DType::BF16) => cuda::dequantize(weight, dtype),
        (_, DType::F32) => typed::<f32>(weight),
        (_, DType::F16) => typed::<f16>(weight),
        (_, DType::BF16) => typed::<bf16>(weight),
        (_, other) => Err(unsupported_dtype("dequantize", other)),
    }
}

/// See [`QuantTensor::embed`].
#[allow(clippy::wildcard_enum_match_arm, reason = "candle has dtypes that nothing here computes with")]
pub(crate) fn embed(weight: &QuantTensor, ids: &Tensor, dtype: DType) -> Result<Tensor> {
    fn typed<T: Real>(weight: &QuantTensor, ids: &[usize], dims: Vec<usize>) -> Result<Tensor> {
        let rows = with_matrix(weight, 0, |matrix| Ok(cpu::embed::<T>(matrix, ids)))?;
        Tensor::from_vec(rows, dims, &Device::Cpu)
    }
    let [n, k] = weight.dims()[..] else {
        return Err(Error::mismatch("embedding", "a weight [N, K]", format!("{weight:?}")).into());
    };
    check_device("ids", ids, weight.device())?;
    if !matches!(ids.dtype(), DType::U8 | DType::U32 | DType::I64) {
        return Err(Error::mismatch("ids", "dtype U8, U32 or I64", format!("{:?}", ids.dtype())).into());
    }
    if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
        return Err(unsupported_dtype("embed", dtype));
    }
    if let Device::Cuda(_) = weight.device() {
        return cuda::embed(weight, ids, dtype);
    }
    let flat = ids.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
    let in_range = |id: &i64| usize::try_from(*id).ok().filter(|id| *id < n);
    let Some(rows) = flat.iter().map(in_range).collect::<Option<Vec<_>>>() else {
        let bad = flat.iter().find(|id| in_range(id).is_none()).copied().unwrap_or_default();
        return Err(Error::mismatch("ids", format!("each below {n}"), bad.to_string()).into());
    };
    let dims = [ids.dims(), &[k]].concat();
    match dtype {
        DType::F32 => typed::<f32>(weight, &rows, dims),
        DType::F16 => typed::<f16>(weight, &rows, dims),
        DType::BF16 => typed::<bf16>(weight, &rows, dims),
        other => Err(unsupported_dtype("embed", other)),
    }
}

/// The largest magnitude of a contiguous tensor; NaN if there is a NaN.
pub(crate) fn absmax(tensor: &Tensor) -> Result<f32> {
    match (tensor.device(), tensor.dtype()) {
        (Device::Cuda(_), DType::F32 | DType::F16 | DType::BF16) => cuda::absmax(tensor),
        _ => quantize::absmax(tensor),
    }
}

/// Quantizes the rows of a contiguous tensor `[.., K]` of finite numbers.
///
/// `absmax` is NVFP4's global scale in MLX's convention.
pub(crate) fn quantize(weight: &Tensor, format: QuantFormat, absmax: Option<f32>) -> Result<Parts> {
    match weight.device() {
        Device::Cuda(_) => cuda::quantize(weight, format, absmax),
        Device::Cpu | Device::Metal(_) => quantize::quantize(weight, format, absmax),
    }
}

/// A matmul with a matrix `[N, K]`; candle hands it the storage of `x`.
struct QuantMatmul {
    weight: QuantTensor,
    /// `[N]`, contiguous, F32 on the CPU.
    bias: Option<Tensor>,
}

/// With the bias as second operand, for its gradient.
impl CustomOp2 for QuantMatmul {
    fn name(&self) -> &'static str {
        CustomOp1::name(self)
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        layout: &Layout,
        _bias: &CpuStorage,
        _bias_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        CustomOp1::cpu_fwd(self, x, layout)
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        layout: &Layout,
        _bias: &CudaStorage,
        _bias_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        CustomOp1::cuda_fwd(self, x, layout)
    }

    /// That of the bias is the sum of `grad` over all rows.
    fn bwd(
        &self,
        x: &Tensor,
        bias: &Tensor,
        output: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let of_x = if x.track_op() { CustomOp1::bwd(self, x, output, grad)? } else { None };
        let of_bias = grad.to_dtype(bias.dtype())?.contiguous()?.reshape(((), bias.elem_count()))?.sum(0)?;
        Ok((of_x, Some(of_bias)))
    }
}

impl CustomOp1 for QuantMatmul {
    fn name(&self) -> &'static str {
        "quant-matmul"
    }

    #[allow(clippy::wildcard_enum_match_arm, reason = "candle has dtypes that nothing here computes with")]
    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let bias: Option<Vec<f32>> = self.bias.as_ref().map(|bias| bias.to_vec1()).transpose()?;
        let bias = bias.as_deref();
        let output = with_matrix(&self.weight, 0, |matrix| {
            Ok(match storage {
                CpuStorage::F32(x) => CpuStorage::F32(cpu::matmul(matrix, contiguous(x, layout)?, bias)),
                CpuStorage::F16(x) => CpuStorage::F16(cpu::matmul(matrix, contiguous(x, layout)?, bias)),
                CpuStorage::BF16(x) => CpuStorage::BF16(cpu::matmul(matrix, contiguous(x, layout)?, bias)),
                _ => {
                    return Err(unsupported_dtype(
                        CustomOp1::name(self),
                        candle_core::backend::BackendStorage::dtype(storage),
                    ))
                }
            })
        })?;
        let mut dims = layout.dims().to_vec();
        if let (Some(last), [.., n, _]) = (dims.last_mut(), self.weight.dims().as_slice()) {
            *last = *n;
        }
        Ok((output, Shape::from(dims)))
    }

    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        cuda::matmul(Operand { weight: &self.weight, bias: self.bias.as_ref() }, storage, layout)
    }

    fn bwd(&self, _x: &Tensor, _output: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        matmul_backward(&self.weight, grad).map(Some)
    }
}

/// The elements of a contiguous CPU tensor.
fn contiguous<'a, T>(storage: &'a [T], layout: &Layout) -> Result<&'a [T]> {
    let range = layout.contiguous_offsets().map(|(start, end)| start..end);
    match range.and_then(|range| storage.get(range)) {
        Some(elements) => Ok(elements),
        None => bail!("a contiguous tensor is needed here, found layout {layout:?}"),
    }
}

fn check_device(what: &str, tensor: &Tensor, device: &Device) -> Result<()> {
    if tensor.device().same_device(device) {
        return Ok(());
    }
    let expected = format!("on {:?}, where the weight is", device.location());
    Err(Error::mismatch(what, expected, format!("on {:?}", tensor.device().location())).into())
}

fn unsupported_dtype(operation: &str, dtype: DType) -> candle_core::Error {
    Error::Unsupported {
        what: format!("{operation} with dtype {dtype:?}"),
        remedy: "use F32, F16 or BF16".to_string(),
    }
    .into()
}

fn unsupported_device(device: &Device) -> candle_core::Error {
    Error::Unsupported {
        what: format!("computing with quantized weights on {:?}", device.location()),
        remedy: "use Device::Cpu".to_string(),
    }
    .into()
}
