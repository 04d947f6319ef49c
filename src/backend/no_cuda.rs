//! What stands in for the CUDA backend without the feature `cuda`: the same functions, each an error.

use super::sample::{Choice, Draw};
use super::step::{GraphMode, Plan, StepMemory};
use super::{ChosenExperts, Epilogue, NewToken, NewTokens, NormOfX, Operand, Parts};
use crate::tensor::{CachePlace, DeviceRows};
use crate::{DeltaNetConfig, DeviceKvCache, Error, KvFormat, QuantFormat, QuantTensor};
use candle_core::{CudaStorage, DType, Device, Layout, Result, Shape, Tensor};
use std::sync::Arc;

// Arithmetic and names, whose tests need no CUDA.
#[cfg(test)]
#[path = "cuda/attend.rs"]
#[allow(dead_code)]
mod attend;
#[cfg(test)]
#[path = "cuda/bindings.rs"]
#[allow(dead_code)]
mod bindings;
#[cfg(test)]
#[path = "cuda/formats.rs"]
#[allow(dead_code)]
mod formats;
#[cfg(test)]
#[path = "cuda/gemv.rs"]
#[allow(dead_code)]
mod gemv;
#[cfg(test)]
#[path = "cuda/kernel.rs"]
#[allow(dead_code)]
mod kernel;
#[cfg(test)]
#[path = "cuda/plan.rs"]
#[allow(dead_code)]
mod plan;
#[cfg(test)]
#[path = "cuda/tiles.rs"]
#[allow(dead_code)]
mod tiles;

fn error<T>() -> Result<T> {
    Err(Error::Unsupported {
        what: "computing on a CUDA device".to_string(),
        remedy: "build candle-quant with the feature `cuda`".to_string(),
    }
    .into())
}

pub(super) fn has_kernels(_: QuantFormat) -> bool {
    false
}

pub(super) fn matmul(_: Operand, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
    error()
}

pub(super) fn matmul_backward(_: &QuantTensor, _: &CudaStorage, _: &Layout) -> Result<CudaStorage> {
    error()
}

pub(super) fn delta_net(
    _: [&Tensor; 6],
    _: ([&Tensor; 4], f64),
    _: &DeltaNetConfig,
    _: (&Tensor, bool),
) -> Result<Option<Tensor>> {
    Ok(None)
}

pub(super) fn stacked(_: Operand, _: &[(usize, usize)], _: &Tensor) -> Result<Tensor> {
    error()
}

pub(super) fn fused(
    _: &[Operand],
    _: &Tensor,
    _: Option<NormOfX>,
    _: Epilogue,
) -> Result<Option<Vec<Tensor>>> {
    error()
}

pub(super) fn experts(_: &ChosenExperts, _: &Tensor) -> Result<Option<Tensor>> {
    error()
}

pub(super) fn dequantize(_: &QuantTensor, _: DType) -> Result<Tensor> {
    error()
}

pub(super) fn embed(_: &QuantTensor, _: &Tensor, _: DType) -> Result<Tensor> {
    error()
}

pub(super) fn attend(_: &DeviceRows, _: &NewToken) -> Result<Option<Tensor>> {
    error()
}

pub(super) fn attends_to_prompts(
    _: &Tensor,
    _: usize,
    _: Option<[KvFormat; 2]>,
    _: &[CachePlace],
) -> Result<bool> {
    Ok(false)
}

pub(crate) fn keeps_ring(_: &DeviceKvCache, _: (&Device, DType), _: usize) -> Result<bool> {
    Ok(false)
}

pub(super) fn attend_prompt(_: &DeviceRows, _: &NewTokens) -> Result<Tensor> {
    error()
}

/// Cannot be made.
pub(crate) enum StepLaunches {}

impl StepLaunches {
    pub(crate) fn new(_: &Arc<Plan>, _: (&Device, DType), _: usize, _: bool, _: GraphMode) -> Result<Self> {
        error()
    }

    pub(crate) fn run(&mut self, _: &Tensor, _: &StepMemory, _: &[u32]) -> Result<Tensor> {
        match *self {}
    }

    pub(crate) fn next(
        &mut self,
        _: &[u32],
        _: &StepMemory,
        _: &[u32],
        _: (&Choice, Draw),
    ) -> Result<Vec<u32>> {
        match *self {}
    }

    pub(crate) fn launches(&self) -> Option<usize> {
        match *self {}
    }

    pub(crate) fn is_capturing(&self) -> Result<bool> {
        match *self {}
    }

    pub(crate) fn keeps_ring(&self, _: &DeviceKvCache) -> Result<bool> {
        match *self {}
    }

    pub(crate) fn release(&mut self) {
        match *self {}
    }

    pub(crate) fn is_captured(&self) -> bool {
        match *self {}
    }

    pub(crate) fn has_launched(&self) -> bool {
        match *self {}
    }
}

pub(super) fn absmax(_: &Tensor) -> Result<f32> {
    error()
}

pub(super) fn quantize(_: &Tensor, _: QuantFormat, _: Option<f32>) -> Result<Parts> {
    error()
}

pub(super) fn sample(_: &Tensor, _: &Choice, _: Draw) -> Result<Vec<u32>> {
    error()
}
