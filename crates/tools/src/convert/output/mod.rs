//! What is written, as data: jobs, their sources and tensors, and the files that these lie in. Plans are made of it,
//! targets arrange it, and runs carry it out.

mod file;
mod job;
mod scaling;
mod source;
mod tensor;

pub(super) use file::{told_of, OutputFile};
pub use job::TensorPlan;
pub(super) use job::{Columns, Encoding, HeadOrder, Job, Packing, Work, WIDE_MXFP4};
pub(super) use scaling::Scaling;
pub(super) use source::{SourcePart, SourceTensor, View};
pub(super) use tensor::{file_dtype, OutputTensor, Style};
