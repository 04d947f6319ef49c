//! Gradients: of x through a packed weight, and of a weight through its own quantization.

use super::{contiguous, cpu, cuda, unsupported_dtype, with_matrix};
use crate::QuantTensor;
use candle_core::backend::BackendStorage;
use candle_core::{bail, CpuStorage, CudaStorage, CustomOp1, Device, Layout, Result, Shape, Storage, Tensor};

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

/// `quantized`, with the gradient of `weight` in its place.
pub(super) fn straight_through(weight: &Tensor, quantized: Tensor) -> Result<Tensor> {
    weight.apply_op1(StraightThrough { quantized })
}

/// Its output is `quantized`, whatever its input; its gradient is that of an identity.
struct StraightThrough {
    /// Contiguous, of the shape, dtype and device of the input.
    quantized: Tensor,
}

impl StraightThrough {
    fn copy<S: BackendStorage>(&self, of: impl FnOnce(&Storage) -> Option<&S>) -> Result<(S, Shape)> {
        let (storage, layout) = self.quantized.storage_and_layout();
        match of(&storage) {
            Some(storage) => Ok((storage.try_clone(layout)?, layout.shape().clone())),
            None => bail!("{} is on {:?}", self.name(), self.quantized.device().location()),
        }
    }
}

impl CustomOp1 for StraightThrough {
    fn name(&self) -> &'static str {
        "fake-quantize"
    }

    fn cpu_fwd(&self, _weight: &CpuStorage, _layout: &Layout) -> Result<(CpuStorage, Shape)> {
        self.copy(|storage| match storage {
            Storage::Cpu(storage) => Some(storage),
            Storage::Cuda(_) | Storage::Metal(_) => None,
        })
    }

    fn cuda_fwd(&self, _weight: &CudaStorage, _layout: &Layout) -> Result<(CudaStorage, Shape)> {
        self.copy(|storage| match storage {
            Storage::Cuda(storage) => Some(storage),
            Storage::Cpu(_) | Storage::Metal(_) => None,
        })
    }

    fn bwd(&self, _weight: &Tensor, _output: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(grad.clone()))
    }
}
