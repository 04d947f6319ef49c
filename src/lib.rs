//! Quantized checkpoints on candle, computed from the packed weights.
#![deny(missing_docs, unsafe_op_in_unsafe_fn)]

mod backend;
pub mod checkpoint;
mod error;
pub mod format;
mod tensor;

pub use checkpoint::Checkpoint;
pub use error::{Error, Result};
pub use format::QuantFormat;
pub use tensor::QuantTensor;
