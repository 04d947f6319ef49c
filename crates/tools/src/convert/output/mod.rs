//! What is written, as data: jobs, their sources and tensors, and the files that these lie in. Plans are made of it,
//! targets arrange it, and runs carry it out.

mod file;
mod job;
mod source;
mod tensor;

/// What is in an output, with sizes and digests: lies in it, and belongs to no other.
pub(super) const FILE_LIST: &str = "candle-quant.json";

pub(super) use file::OutputFile;
pub use job::TensorPlan;
pub(super) use job::{Job, Packing, Work, WIDE_MXFP4};
pub(super) use source::{SourcePart, SourceTensor};
pub(super) use tensor::{file_dtype, OutputTensor, Style};
