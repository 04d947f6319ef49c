//! Low-rank adapters: small trainable updates of frozen weights, several for each layer, by name.

mod files;
mod lora;
mod merge;
mod modules;
mod observer;
mod registry;
mod row_norms;
mod slot;

pub use lora::Lora;
pub(crate) use merge::merged;
pub use observer::{LayerInput, Observer};
pub use registry::{Adapters, LoraConfig};
pub(crate) use row_norms::OwnColumns;
pub use slot::AdapterSlot;
pub(crate) use slot::Frozen;
