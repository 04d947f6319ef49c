//! The gradient of x: `dy * weight`, for which parts of the weight are dequantized while cuBLAS multiplies with those
//! before them.

use super::memory::{address_mut, allocate, View};
use super::operand::LockedWeight;
use super::{cublas, dequantize, plan, workspace};
use crate::backend::unsupported_dtype;
use crate::QuantTensor;
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::{bail, CudaStorage, DType, Layout, Result, Shape};
use std::ops::Range;

/// `dy` `[.., N]` times a matrix `[N, K]`. Weights are rounded to the dtype of dy. Sums are f32, also those over several
/// parts, and are rounded once.
pub(crate) fn matmul_backward(
    weight: &QuantTensor,
    storage: &CudaStorage,
    layout: &Layout,
) -> Result<CudaStorage> {
    let [n, k] = weight.dims()[..] else {
        bail!("a gradient passes through a matrix [N, K], not {weight:?}")
    };
    let dtype = storage.dtype();
    if !matches!(dtype, DType::F16 | DType::BF16 | DType::F32) {
        return Err(unsupported_dtype("the gradient of a matmul", dtype));
    }
    let device = storage.device();
    let stream = device.cuda_stream();
    let shape = Shape::from((layout.shape().elem_count() / n, k));
    if shape.elem_count() == 0 {
        return allocate(device, &shape, dtype);
    }
    let size = dtype.size_in_bytes();
    let most = plan::rows_of_scratch(k, size).min(n);
    let sums_dtype = if most < n { DType::F32 } else { dtype };
    let mut sums = allocate(device, &shape, sums_dtype)?;
    {
        let dy = View { storage, layout };
        let (copy, in_order) = (dy.realigned(&stream)?, Layout::contiguous(layout.shape()));
        let dy = copy.as_ref().map_or(dy, |storage| View { storage, layout: &in_order }).address(&stream)?;
        let locked = LockedWeight::new(weight);
        let addresses = locked.addresses(&stream)?;
        let matrix = addresses.matrix(0, weight.global_scale_of(0))?;
        let y = address_mut(&mut sums, &stream)?;
        let fill = |stream: &CudaStream, part, place| {
            // SAFETY: the matrix is held, and the scratch has room for so many rows.
            unsafe { dequantize::rows_to(stream, weight.format(), &matrix, part, k, (place, dtype)) }
        };
        let multiply = |part: Range<usize>, place| {
            let gemm = cublas::Gemm {
                m: shape.dims().first().copied().unwrap_or_default(),
                n: k,
                k: part.len(),
                dtype,
                x: dy.get() + (part.start * size) as u64,
                x_stride: n,
                weight: place,
                transposed: false,
                y: y.get(),
                y_stride: k,
                y_dtype: sums_dtype,
                add: part.start > 0,
            };
            // SAFETY: dy, scratch and sums are as large as their dimensions say, and stay until the stream has passed.
            unsafe { cublas::multiply(device, gemm) }
        };
        let parts = (0..n).step_by(most).map(|first| first..n.min(first + most));
        workspace::with(&stream, |workspace| {
            let scratch = workspace.scratch(most * k * size, n > most)?;
            scratch.each_part(&stream, parts, fill, multiply)
        })?;
    }
    match sums_dtype == dtype {
        true => Ok(sums),
        false => sums.to_dtype(&Layout::contiguous(&shape), dtype),
    }
}
