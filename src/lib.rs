//! Quantized checkpoints on candle, computed from the packed weights.
#![deny(missing_docs, unsafe_op_in_unsafe_fn)]

mod backend;
pub mod checkpoint;
mod error;
pub mod format;
pub mod generate;
pub mod models;
pub mod nn;
mod tensor;

pub use checkpoint::Checkpoint;
pub use error::{Error, Result};
pub use format::QuantFormat;
pub use nn::{
    embedding, layer_norm, layer_norm_no_bias, linear, linear_b, linear_no_bias, rms_norm, Activation,
    DequantizingBackend, Dropout, Embedding, Init, LayerNorm, LayerNormConfig, LayerWeight, Linear, Module,
    ModuleT, RmsNorm, VarBuilder, WeightSummary,
};
pub use tensor::QuantTensor;
