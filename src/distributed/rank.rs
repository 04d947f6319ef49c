//! One rank of a group, with its device.

use super::collective::Collective;
use crate::Result;
use candle_core::{
    backend::BackendStorage, bail, CpuStorage, CudaStorage, CustomOp1, Device, Layout, Shape, Storage, Tensor,
};
use std::sync::Arc;

/// One of the ranks that compute a model together, with its device. Clones are the same rank.
///
/// What ranks exchange has no gradient: a backward pass through it is an error.
#[derive(Clone, Debug)]
pub struct Rank {
    device: Device,
    collective: Arc<dyn Collective>,
}

impl Rank {
    /// A rank on `device` of any group.
    pub fn new(device: &Device, collective: Arc<dyn Collective>) -> Self {
        Self { device: device.clone(), collective }
    }

    /// Which one this is, from 0 on.
    pub fn index(&self) -> usize {
        self.collective.index()
    }

    /// How many there are.
    pub fn world_size(&self) -> usize {
        self.collective.world_size()
    }

    /// Where this rank computes.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// See [`Collective::all_reduce_sum`].
    ///
    /// # Errors
    /// As documented there.
    pub fn all_reduce_sum(&self, x: &Tensor) -> Result<Tensor> {
        without_gradient(x, self.collective.all_reduce_sum(x)?)
    }

    /// See [`Collective::all_gather`].
    ///
    /// # Errors
    /// As documented there.
    pub fn all_gather(&self, x: &Tensor, dim: usize) -> Result<Tensor> {
        without_gradient(x, self.collective.all_gather(x, dim)?)
    }

    /// See [`Collective::reduce_scatter`].
    ///
    /// # Errors
    /// As documented there.
    pub fn reduce_scatter(&self, x: &Tensor, dim: usize) -> Result<Tensor> {
        without_gradient(x, self.collective.reduce_scatter(x, dim)?)
    }

    /// See [`Collective::broadcast`].
    ///
    /// # Errors
    /// As documented there.
    pub fn broadcast(&self, x: &Tensor, root: usize) -> Result<Tensor> {
        without_gradient(x, self.collective.broadcast(x, root)?)
    }

    /// See [`Collective::barrier`].
    ///
    /// # Errors
    /// As documented there.
    pub fn barrier(&self) -> Result<()> {
        self.collective.barrier()
    }
}

/// Whoever wants a gradient gets an error, not one from which the other ranks are missing.
fn without_gradient(x: &Tensor, output: Tensor) -> Result<Tensor> {
    match x.track_op() {
        true => Ok(x.apply_op1(WithoutGradient(output.contiguous()?))?),
        false => Ok(output),
    }
}

/// What ranks have made of a tensor, as the output of an operation that has no gradient.
struct WithoutGradient(Tensor);

impl WithoutGradient {
    fn copy<S: BackendStorage>(
        &self,
        of: impl FnOnce(&Storage) -> Option<&S>,
    ) -> candle_core::Result<(S, Shape)> {
        let (storage, layout) = self.0.storage_and_layout();
        match of(&storage) {
            Some(storage) => Ok((storage.try_clone(layout)?, layout.shape().clone())),
            None => bail!("{} on {:?}", self.name(), self.0.device().location()),
        }
    }
}

impl CustomOp1 for WithoutGradient {
    fn name(&self) -> &'static str {
        "exchange-between-ranks"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        self.copy(|storage| match storage {
            Storage::Cpu(storage) => Some(storage),
            Storage::Cuda(_) | Storage::Metal(_) => None,
        })
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        self.copy(|storage| match storage {
            Storage::Cuda(storage) => Some(storage),
            Storage::Cpu(_) | Storage::Metal(_) => None,
        })
    }
}
