//! Values that are there already, as outputs of operations of candle.

use candle_core::backend::BackendStorage;
use candle_core::{bail, CpuStorage, CudaStorage, CustomOp1, Layout, Result, Shape, Storage, Tensor};

/// `value`, which was made of `inputs`: whoever wants a gradient of theirs gets an error that names the operation, not a
/// gradient from which something is missing.
pub(crate) fn without_gradient(name: &'static str, inputs: &[&Tensor], value: Tensor) -> Result<Tensor> {
    match inputs.iter().find(|input| input.track_op()) {
        Some(input) => input.apply_op1(Known { name, value: value.contiguous()?, is_identity: false }),
        None => Ok(value),
    }
}

/// `value` with the gradient of `x`, which has its shape, dtype and device: in a backward pass it is `x` itself.
pub(crate) fn straight_through(name: &'static str, x: &Tensor, value: Tensor) -> Result<Tensor> {
    x.apply_op1(Known { name, value: value.contiguous()?, is_identity: true })
}

/// An operation whose output is `value`, whatever its input.
struct Known {
    name: &'static str,
    /// Contiguous, on the device of the input.
    value: Tensor,
    /// Whether the gradient is that of an identity; else there is none.
    is_identity: bool,
}

impl Known {
    fn copy<S: BackendStorage>(&self, of: impl FnOnce(&Storage) -> Option<&S>) -> Result<(S, Shape)> {
        let (storage, layout) = self.value.storage_and_layout();
        match of(&storage) {
            Some(storage) => Ok((storage.try_clone(layout)?, layout.shape().clone())),
            None => bail!("{}: the value is on {:?}", self.name, self.value.device().location()),
        }
    }
}

impl CustomOp1 for Known {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.copy(|storage| match storage {
            Storage::Cpu(storage) => Some(storage),
            Storage::Cuda(_) | Storage::Metal(_) => None,
        })
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.copy(|storage| match storage {
            Storage::Cuda(storage) => Some(storage),
            Storage::Cpu(_) | Storage::Metal(_) => None,
        })
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        match self.is_identity {
            true => Ok(Some(grad.clone())),
            false => Err(candle_core::Error::BackwardNotSupported { op: self.name }),
        }
    }
}
