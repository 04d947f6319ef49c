//! Mechanics of files: bytes of weights, headers of safetensors files, shards, parts of tensors, JSON. What the bytes
//! mean is not known here.

mod data;
mod digest;
mod header;
mod json;
mod json_map;
mod names;
mod open;
mod opening;
#[cfg(feature = "testing")]
pub mod reads;
mod room;
mod section;
mod shards;
mod stored;
mod tensors;
mod warnings;

pub use data::Reads;
pub(super) use data::{of_tensor, open_file, DataFile};
pub use digest::Digest;
pub(super) use header::{Metadata, TensorInfo};
pub use json::with_masked_literals;
pub(super) use names::names_in;
pub(super) use open::{open, open_with_metadata, open_with_values, Values};
pub use opening::{Budget, GgmlKernels, OpenOptions};
pub(super) use opening::{Opening, GGUF_ENTRY};
pub(super) use shards::{is_plain_file_name, open_all, open_directory, read_json, shards_of_index};
pub(super) use stored::{candle_dtype, with_aligned_copy, StoredTensor};
pub(super) use tensors::Tensors;
pub(super) use warnings::Warnings;
