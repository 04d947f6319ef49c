//! Weights as they lie in files: format, byte ranges and logical shape. Only what is loaded is read.

mod dense;
mod filled;
mod ggml;
pub(super) mod ggml_blocks;
mod ggml_grids;
mod ggml_packed;
mod ggml_types;
mod ggml_unpack;
mod ggml_unpack_grids;
pub(super) mod hqq_codes;
mod integer_groups;
mod irregular;
mod layout;
mod mlx_form;
mod names;
mod packed;
mod parts;
mod row_classes;
mod row_order;
mod slice;
mod stored;
mod stored_form;
mod tiled;

pub use dense::DenseTensor;
pub use ggml::GgmlWeight;
#[cfg(feature = "testing")]
pub use ggml_types::block_types;
pub use integer_groups::IntegerGroups;
pub use irregular::IrregularWeight;
pub use mlx_form::MlxForm;
pub use names::natural_order;
pub use names::{module_of, tensor_of};
pub use packed::PackedWeight;
pub use stored::Weight;
pub use stored_form::{StoredBlocks, StoredForm, StoredFourBits, StoredFp8, StoredHqq};

pub(super) use filled::{filled_columns, filled_group_size, Filled};
pub(super) use ggml_types::{block_type, BlockType, Kind, Nibbles, EARLY_MXFP4};
pub(super) use layout::{Dequantize, GgmlBlocks, IrregularLayout, Layout, SliceInMemory};
pub(super) use parts::{GlobalScale, GlobalScaleMeaning, Parts};
pub(super) use row_classes::{gcd, CutInMemory, RowClasses, StoredGroups};
pub(super) use row_order::halves_of_pairs;
pub(super) use slice::Slice;
pub(super) use tiled::{TiledFp8, Tiles};
