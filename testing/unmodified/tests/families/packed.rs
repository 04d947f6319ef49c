//! The families of the same sources, with the candle_nn of this crate's manifest.

use candle::{DType, Device, Result};
use candle_quant::{Checkpoint, DequantizingBackend};
use std::collections::BTreeSet;
use std::path::Path;
use unmodified as transformers;

#[path = "table/moe.rs"]
pub mod moe;
#[path = "table/other.rs"]
pub mod other;
#[path = "table/text.rs"]
pub mod text;

pub use candle_nn::VarBuilder;
pub type Family = crate::Family<VarBuilder<'static>>;

/// As a program for candle opens a checkpoint.
pub fn open(file: &Path) -> Result<VarBuilder<'static>> {
    // TODO(swap): unsafe { VarBuilder::from_mmaped_safetensors(&[file], DType::F32, &Device::Cpu) }
    let checkpoint = Checkpoint::open(file.parent().unwrap())?;
    Ok(VarBuilder::from_backend(Box::new(DequantizingBackend::new(&checkpoint)), DType::F32, Device::Cpu))
}

/// Packed weights that a model was given as dense ones.
// TODO(swap): ask the builder.
pub fn given_dense(_: &VarBuilder) -> Option<BTreeSet<String>> {
    None
}
