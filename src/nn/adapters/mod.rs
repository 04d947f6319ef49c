//! Low-rank adapters: small trainable updates of frozen weights, several for each layer, by name.

mod lora;
mod registry;
mod slot;

pub use lora::Lora;
pub use registry::{Adapters, LoraConfig};
pub use slot::AdapterSlot;
