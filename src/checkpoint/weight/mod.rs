//! Weights as they lie in files: format, byte ranges and logical shape. Only what is loaded is read.

mod dense;
mod ggml;
pub(super) mod ggml_blocks;
mod ggml_grids;
mod ggml_packed;
mod ggml_types;
mod ggml_unpack;
mod ggml_unpack_grids;
mod layout;
mod mlx_form;
mod names;
mod packed;
mod parts;
mod row_order;
mod slice;
mod stored;

pub use dense::DenseTensor;
pub use ggml::GgmlWeight;
pub use mlx_form::MlxForm;
pub use names::natural_order;
pub use names::{module_of, tensor_of};
pub use packed::PackedWeight;
pub use stored::Weight;

pub(super) use ggml_types::{block_type, BlockType, Kind, Nibbles, EARLY_MXFP4};
pub(super) use layout::{Dequantize, GgmlBlocks, Layout, SliceInMemory};
pub(super) use parts::{GlobalScale, GlobalScaleMeaning, Parts};
pub(super) use row_order::halves_of_pairs;
pub(super) use slice::Slice;
