//! The families on packed weights.

use candle::{DType, Device, Result};
use candle_transformers as transformers;
use std::path::Path;

#[path = "../../../../testing/unmodified/tests/families/table/encoders.rs"]
pub mod encoders;
#[path = "../../../../testing/unmodified/tests/families/table/moe.rs"]
pub mod moe;
#[path = "../../../../testing/unmodified/tests/families/table/other.rs"]
pub mod other;
#[path = "../../../../testing/unmodified/tests/families/table/text.rs"]
pub mod text;

pub use candle_nn::VarBuilder;
pub use candle_quant::nn::LoadedAs;
pub use candle_quant_packed::dense_copies;
pub type Family = crate::Family<VarBuilder<'static>>;

/// candle_nn's own builder, and who knows what was loaded.
pub fn open(file: &Path) -> Result<(VarBuilder<'static>, candle_quant::VarBuilder<'static>)> {
    // SAFETY: nobody writes to the file while the test runs.
    let record =
        unsafe { candle_quant::VarBuilder::from_mmaped_safetensors(&[file], DType::F32, &Device::Cpu) }?;
    Ok((record.dense(), record))
}
