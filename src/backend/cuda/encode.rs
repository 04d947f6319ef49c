//! Dense weights to packed ones, with the bits of the CPU's encoder.

use super::bindings::{CqAbsmax, CqEncode};
use super::launch::{launch, Grid};
use super::memory::{address_mut, allocate, float_dtype, u32_of, Locked};
use super::module::Kernel;
use super::plan::THREADS;
use crate::backend::Parts;
use crate::QuantFormat;
use candle_core::backend::BackendStorage;
use candle_core::op::BackpropOp;
use candle_core::{bail, CpuStorage, CudaStorage, DType, Device, Result, Shape, Storage, Tensor};

/// The largest magnitude; NaN if there is a NaN.
pub(crate) fn absmax(tensor: &Tensor) -> Result<f32> {
    /// Enough to fill a card.
    const MOST_BLOCKS: usize = 1024;
    let Device::Cuda(device) = tensor.device() else { bail!("a tensor on a CUDA device is needed here") };
    let stream = device.cuda_stream();
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

/// Encodes the rows of a contiguous tensor `[.., K]` of finite numbers.
///
/// `absmax` is NVFP4's global scale in MLX's convention.
pub(crate) fn quantize(weight: &Tensor, format: QuantFormat, absmax: Option<f32>) -> Result<Parts> {
    let Device::Cuda(device) = weight.device() else { bail!("a tensor on a CUDA device is needed here") };
    let stream = device.cuda_stream();
    let (elements, dtype) = (weight.elem_count(), weight.dtype());
    let groups = elements / format.group_size();
    let flat = |len: usize, dtype| allocate(device, &Shape::from(len), dtype);
    let mut packed = flat(elements * format.bits() / 32, DType::U32)?;
    let mut scales = flat(groups, if format.has_biases() { dtype } else { DType::U8 })?;
    let mut biases = format.has_biases().then(|| flat(groups, dtype)).transpose()?;
    {
        let locked = Locked::new(weight);
        let weights = locked.view()?.address(&stream)?;
        let packed = address_mut(&mut packed, &stream)?;
        let scales = address_mut(&mut scales, &stream)?;
        let biases = biases.as_mut().map(|biases| address_mut(biases, &stream)).transpose()?;
        let params = CqEncode {
            weights: weights.as_ptr(),
            packed: packed.as_mut_ptr(),
            scales: scales.as_mut_ptr(),
            biases: biases.as_ref().map_or(std::ptr::null_mut(), |biases| biases.as_mut_ptr()),
            absmax: absmax.unwrap_or(0.0),
            groups: groups as u64,
            group_size: u32_of("group size", format.group_size())?,
            dtype: float_dtype(dtype)?,
        };
        let blocks = elements.div_ceil(8 * format.group_size().max(32));
        // SAFETY: the tensors are borrowed until after the launch, and as large as `groups` says.
        unsafe {
            launch(&stream, Kernel::Encode(format), Grid { blocks: (blocks, 1), shared_bytes: 0 }, &params)?;
        }
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
