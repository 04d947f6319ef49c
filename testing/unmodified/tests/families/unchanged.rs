//! The families of candle-transformers as it is.

use candle::{DType, Device, Result};
pub use candle_nn_unchanged::var_builder::SimpleBackend;
use candle_quant::{Checkpoint, DequantizingBackend};
use candle_transformers as transformers;
use std::path::Path;

#[path = "table/encoders.rs"]
pub mod encoders;
#[path = "table/moe.rs"]
pub mod moe;
#[path = "table/other.rs"]
pub mod other;
#[path = "table/recurrent.rs"]
pub mod recurrent;
#[path = "table/text.rs"]
pub mod text;

pub use candle_nn_unchanged::{Init, VarBuilder};
pub type Family = crate::Family<VarBuilder<'static>>;

pub fn on(backend: impl SimpleBackend + 'static) -> VarBuilder<'static> {
    VarBuilder::from_backend(Box::new(backend), DType::F32, Device::Cpu)
}

pub fn dequantized(checkpoint: &Checkpoint) -> VarBuilder<'static> {
    on(DequantizingBackend::new(checkpoint))
}

pub fn dense(file: &Path) -> Result<VarBuilder<'static>> {
    // SAFETY: nobody writes to the file while the test runs.
    unsafe { VarBuilder::from_mmaped_safetensors(&[file], DType::F32, &Device::Cpu) }
}
