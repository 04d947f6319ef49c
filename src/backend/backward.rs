//! The gradient of x through a packed weight.

use super::{contiguous, cpu, cuda, unsupported_dtype, with_matrix};
use crate::QuantTensor;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Device, Layout, Result, Shape, Tensor};

/// The gradient of x, `dy * weight`: `dy` is `[.., N]`, the weight a matrix `[N, K]`. The weight stays packed. The result
/// has no gradient of its own.
pub(super) fn matmul_backward(weight: &QuantTensor, dy: &Tensor) -> Result<Tensor> {
    let dy = match dy.device() {
        // The CUDA device takes views, or copies them.
        Device::Cuda(_) => dy.clone(),
        Device::Cpu | Device::Metal(_) => dy.contiguous()?,
    };
    dy.apply_op1_no_bwd(&MatmulBackward { weight })
}

/// [`matmul_backward`] of the storage of dy.
struct MatmulBackward<'a> {
    weight: &'a QuantTensor,
}

impl CustomOp1 for MatmulBackward<'_> {
    fn name(&self) -> &'static str {
        "quant-matmul-backward"
    }

    #[allow(clippy::wildcard_enum_match_arm, reason = "candle has dtypes that nothing here computes with")]
    fn cpu_fwd(&self, dy: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let dx = with_matrix(self.weight, 0, |matrix| {
            Ok(match dy {
                CpuStorage::F32(dy) => CpuStorage::F32(cpu::matmul_backward(matrix, contiguous(dy, layout)?)),
                CpuStorage::F16(dy) => CpuStorage::F16(cpu::matmul_backward(matrix, contiguous(dy, layout)?)),
                CpuStorage::BF16(dy) => {
                    CpuStorage::BF16(cpu::matmul_backward(matrix, contiguous(dy, layout)?))
                }
                other => return Err(unsupported_dtype(self.name(), other.dtype())),
            })
        })?;
        Ok((dx, shape_of_x(self.weight, layout)))
    }

    fn cuda_fwd(&self, dy: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        Ok((cuda::matmul_backward(self.weight, dy, layout)?, shape_of_x(self.weight, layout)))
    }
}

/// The shape of x whose product has the layout of dy.
fn shape_of_x(weight: &QuantTensor, dy: &Layout) -> Shape {
    let mut dims = dy.dims().to_vec();
    if let (Some(last), [.., k]) = (dims.last_mut(), weight.dims().as_slice()) {
        *last = *k;
    }
    Shape::from(dims)
}
