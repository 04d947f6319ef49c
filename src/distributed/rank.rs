//! One rank of a group, with its device.

use super::collective::{Collective, StreamCollective};
use crate::{known, Result};
use candle_core::{Device, Tensor};
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

    /// See [`Collective::in_streams`].
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(crate) fn in_streams(
        &self,
        work: &mut dyn FnMut(&dyn StreamCollective) -> Result<()>,
    ) -> Option<Result<()>> {
        self.collective.in_streams(work)
    }

    /// Whether both are one.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.collective, &other.collective)
    }
}

/// What ranks have made of `x`: a gradient would lack the part of the other ranks.
fn without_gradient(x: &Tensor, output: Tensor) -> Result<Tensor> {
    Ok(known::without_gradient("exchange-between-ranks", &[x], output)?)
}
