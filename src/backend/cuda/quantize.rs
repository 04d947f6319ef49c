//! Dense weights to packed ones, with the bits that the CPU makes.

use super::bindings::CQ_QUANTIZE_SHARED_BYTES;
use super::bindings::{CqAbsmax, CqQuantize};
use super::formats::FormatKernels;
use super::kernel::Kernel;
use super::launch::{launch, Grid};
use super::memory::{address_mut, allocate, can_read_back, float_dtype, u32_of, Locked};
use super::plan::THREADS;
use crate::backend::Parts;
use crate::format::{Scale, ZeroPoint};
use crate::QuantFormat;
use candle_core::backend::BackendStorage;
use candle_core::op::BackpropOp;
use candle_core::{bail, CpuStorage, CudaStorage, DType, Device, Result, Shape, Storage, Tensor};

/// The largest magnitude; NaN if there is a NaN.
#[allow(clippy::wildcard_enum_match_arm, reason = "candle keeps U32 as U32")]
pub(crate) fn absmax(tensor: &Tensor) -> Result<f32> {
    /// Enough to fill a card.
    const MOST_BLOCKS: usize = 1024;
    let Device::Cuda(device) = tensor.device() else { bail!("a tensor on a CUDA device is needed here") };
    let stream = device.cuda_stream();
    can_read_back("quantizing", &stream)?;
    let mut bits = CudaStorage::wrap_cuda_slice(device.alloc_zeros::<u32>(1)?, device.clone());
    {
        let locked = Locked::new(tensor);
        let numbers = locked.view()?.address(&stream)?;
        let result = address_mut(&mut bits, &stream)?;
        let params = CqAbsmax {
            numbers: numbers.as_ptr(),
            bits: result.as_mut_ptr(),
            count: tensor.elem_count() as u64,
            dtype: float_dtype(tensor.dtype())?,
            unused: 0,
        };
        let blocks = tensor.elem_count().div_ceil(THREADS as usize).min(MOST_BLOCKS);
        // SAFETY: the tensor and the result are borrowed until after the launch.
        unsafe { launch(&stream, Kernel::Absmax, Grid { blocks: (blocks, 1), shared_bytes: 0 }, &params)? };
    }
    match bits.to_cpu_storage()? {
        CpuStorage::U32(bits) => Ok(bits.first().map_or(0.0, |bits| f32::from_bits(*bits))),
        other => bail!("candle gave {:?} for U32", other.dtype()),
    }
}

/// Quantizes the rows of a contiguous tensor `[.., K]` of finite numbers.
///
/// `absmax` is NVFP4's global scale in MLX's convention.
pub(crate) fn quantize(weight: &Tensor, format: QuantFormat, absmax: Option<f32>) -> Result<Parts> {
    let Device::Cuda(device) = weight.device() else { bail!("a tensor on a CUDA device is needed here") };
    format.ensure_quantizable()?;
    let kernel = FormatKernels::of(format)?.quantize();
    let stream = device.cuda_stream();
    // Whoever calls this does.
    can_read_back("quantizing", &stream)?;
    let (elements, dtype) = (weight.elem_count(), weight.dtype());
    let groups = elements / format.group_size();
    let flat = |len: usize, dtype| allocate(device, &Shape::from(len), dtype);
    let mut packed = flat(elements * format.bits() / 32, DType::U32)?;
    let mut scales = match format.scale() {
        Scale::Float => flat(groups, dtype)?,
        Scale::E8m0 | Scale::E4m3 | Scale::SuperBlock => flat(groups, DType::U8)?,
    };
    let mut biases = match format.zero_point() {
        ZeroPoint::Bias => Some(flat(groups, dtype)?),
        ZeroPoint::Midpoint | ZeroPoint::None => None,
    };
    {
        let locked = Locked::new(weight);
        let weights = locked.view()?.address(&stream)?;
        let packed = address_mut(&mut packed, &stream)?;
        let scales = address_mut(&mut scales, &stream)?;
        let biases = biases.as_mut().map(|biases| address_mut(biases, &stream)).transpose()?;
        let params = CqQuantize {
            weights: weights.as_ptr(),
            packed: packed.as_mut_ptr(),
            scales: scales.as_mut_ptr(),
            biases: biases.as_ref().map_or(std::ptr::null_mut(), |biases| biases.as_mut_ptr()),
            absmax: absmax.unwrap_or(0.0),
            unused: 0,
            groups: groups as u64,
            group_size: u32_of("group size", format.group_size())?,
            dtype: float_dtype(dtype)?,
        };
        let blocks = elements.div_ceil(8 * format.group_size().max(32));
        let shared_bytes = CQ_QUANTIZE_SHARED_BYTES as usize;
        // SAFETY: the tensors are borrowed until after the launch, and as large as `groups` says.
        unsafe { launch(&stream, kernel, Grid { blocks: (blocks, 1), shared_bytes }, &params)? };
    }
    let tensor = |storage: CudaStorage, len: usize| {
        Tensor::from_storage(Storage::Cuda(storage), len, BackpropOp::none(), false)
    };
    Ok(Parts {
        packed: tensor(packed, elements * format.bits() / 32),
        scales: tensor(scales, groups),
        biases: biases.map(|biases| tensor(biases, groups)),
    })
}
