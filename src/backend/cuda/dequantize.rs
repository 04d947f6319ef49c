//! Packed weights to dense ones: all of them, or the rows of a table.

use super::bindings::{CqDequantize, CqMatrix};
use super::formats::FormatKernels;
use super::launch::{launch, Grid};
use super::memory::{address_mut, allocate, float_dtype, u32_of, Locked};
use super::operand::LockedWeight;
use crate::{QuantFormat, QuantTensor};
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::op::BackpropOp;
use candle_core::{bail, CudaStorage, DType, Device, Result, Shape, Storage, Tensor};
use std::ops::Range;

/// Elements of a row that a block dequantizes.
pub(super) const ELEMENTS_OF_BLOCK: usize = 2048;

/// All rows of a matrix or a stack.
pub(crate) fn dequantize(weight: &QuantTensor, dtype: DType) -> Result<Tensor> {
    let dims = weight.dims();
    let [.., rows, k] = dims[..] else { bail!("a weight has at least two dimensions") };
    let matrices = dims.iter().product::<usize>() / (rows * k);
    // Without global scales of its own a stack is one tall matrix.
    let (matrices, rows) = match weight.global_scale().is_some_and(|global| global.elem_count() > 1) {
        true => (matrices, rows),
        false => (1, matrices * rows),
    };
    filled(weight.device(), dims, dtype, |y, stream| {
        let locked = LockedWeight::new(weight);
        let addresses = locked.addresses(stream)?;
        for index in 0..matrices {
            let matrix = addresses.rows_of(index * rows, rows, weight.global_scale_of(index))?;
            let y = y + (index * rows * k * dtype.size_in_bytes()) as u64;
            // SAFETY: the weight is held, and the tensor has room for all its rows.
            unsafe { rows_to(stream, weight.format(), &matrix, 0..rows, k, (y, dtype))? };
        }
        Ok(())
    })
}

/// The rows `ids` (U8, U32 or I64) of a matrix. A row that the matrix does not have is NaN: the host never
/// reads the ids.
pub(crate) fn embed(weight: &QuantTensor, ids: &Tensor, dtype: DType) -> Result<Tensor> {
    let [rows, k] = weight.dims()[..] else { bail!("an embedding is a matrix") };
    let ids = ids.contiguous()?;
    let kernel = FormatKernels::of(weight.format())?.dequantize();
    filled(weight.device(), [ids.dims(), &[k]].concat(), dtype, |y, stream| {
        let (weights, locked_ids) = (LockedWeight::new(weight), Locked::new(&ids));
        let addresses = weights.addresses(stream)?;
        let ids_address = locked_ids.view()?.address(stream)?;
        let params = CqDequantize {
            matrix: addresses.matrix(0, weight.global_scale_of(0))?,
            ids: ids_address.as_ptr(),
            y: y as *mut _,
            first_row: 0,
            vocabulary: rows as u64,
            count: u32_of("ids", ids.elem_count())?,
            k: u32_of("K", k)?,
            group_size: u32_of("group size", weight.format().group_size())?,
            ids_bytes: u32_of("bytes of an id", ids.dtype().size_in_bytes())?,
            y_dtype: float_dtype(dtype)?,
            factor: 1.,
        };
        let blocks = (ids.elem_count(), k.div_ceil(ELEMENTS_OF_BLOCK));
        // SAFETY: ids, weight and y are borrowed until after the launch; y has a row for each id.
        unsafe { launch(stream, kernel, Grid { blocks, shared_bytes: 0 }, &params) }
    })
}

/// Dequantizes some rows of a matrix to an address.
///
/// # Safety
/// The matrix is one of a weight on the stream's device, whose addresses are held until the launch. At the
/// address is device memory for the rows, not used but by work ordered by the stream.
pub(super) unsafe fn rows_to(
    stream: &CudaStream,
    format: QuantFormat,
    matrix: &CqMatrix,
    rows: Range<usize>,
    k: usize,
    (y, dtype): (u64, DType),
) -> Result<()> {
    let kernel = FormatKernels::of(format)?.dequantize();
    let params = CqDequantize {
        matrix: *matrix,
        ids: std::ptr::null(),
        y: y as *mut _,
        first_row: rows.start as u64,
        vocabulary: 0,
        count: u32_of("rows of a weight", rows.len())?,
        k: u32_of("K", k)?,
        group_size: u32_of("group size", format.group_size())?,
        ids_bytes: 0,
        y_dtype: float_dtype(dtype)?,
        factor: 1.,
    };
    let blocks = (rows.len(), k.div_ceil(ELEMENTS_OF_BLOCK));
    // SAFETY: as the caller promises.
    unsafe { launch(stream, kernel, Grid { blocks, shared_bytes: 0 }, &params) }
}

/// A new tensor that `fill` writes.
fn filled(
    device: &Device,
    dims: Vec<usize>,
    dtype: DType,
    fill: impl FnOnce(u64, &CudaStream) -> Result<()>,
) -> Result<Tensor> {
    let Device::Cuda(device) = device else { bail!("a weight on a CUDA device is needed here") };
    let (shape, stream) = (Shape::from(dims), device.cuda_stream());
    let mut storage: CudaStorage = allocate(device, &shape, dtype)?;
    if shape.elem_count() > 0 {
        let y = address_mut(&mut storage, &stream)?;
        fill(y.get(), &stream)?;
    }
    Ok(Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false))
}
