//! The families of the same sources, with the candle_nn of this crate's manifest.

use candle::{DType, Device, Result};
use std::path::Path;
use unmodified as transformers;

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

pub use candle_nn::{dense_copies, LoadedAs, VarBuilder};
pub type Family = crate::Family<VarBuilder<'static>>;

/// As a program for candle opens a checkpoint; and who knows what was loaded.
pub fn open(file: &Path) -> Result<(VarBuilder<'static>, VarBuilder<'static>)> {
    // SAFETY: nobody writes to the file while the test runs.
    let builder = unsafe { VarBuilder::from_mmaped_safetensors(&[file], DType::F32, &Device::Cpu) }?;
    Ok((builder.clone(), builder))
}
