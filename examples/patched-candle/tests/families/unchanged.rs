//! The families on dense weights.

use candle::{DType, Device, Result, Shape, Tensor};
use candle_quant::{Checkpoint, DequantizingBackend};
use std::path::Path;

pub use crate::packed::*;
pub use candle_nn::var_builder::SimpleBackend;
pub use candle_nn::Init;

pub fn on(backend: impl SimpleBackend + 'static) -> VarBuilder<'static> {
    VarBuilder::from_backend(Box::new(backend), DType::F32, Device::Cpu)
}

pub fn dequantized(checkpoint: &Checkpoint) -> VarBuilder<'static> {
    on(Computes(DequantizingBackend::new(checkpoint)))
}

pub fn dense(file: &Path) -> Result<VarBuilder<'static>> {
    // SAFETY: nobody writes to the file while the test runs.
    unsafe { VarBuilder::from_mmaped_safetensors(&[file], DType::F32, &Device::Cpu) }
}

/// Computes with what it passes on, as a backend with adapters does: layers get dense tensors from it.
struct Computes(DequantizingBackend);

impl SimpleBackend for Computes {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        self.0.get(shape, name, init, dtype, device)? * 1.
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        self.0.get_unchecked(name, dtype, device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.contains_tensor(name)
    }
}
