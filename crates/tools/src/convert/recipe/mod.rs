//! Recipes: which tensor becomes what, by its name, role, layer and shape. Nothing is known here of checkpoints and of
//! outputs.

mod choice;
mod file;
mod file_type;
mod mlx_mixed;
pub(super) mod ollama_rules;
mod role;
mod rules;
mod spec;
mod tensor_info;
mod topology;

pub(super) use choice::{Choice, OPEN};
pub(super) use file_type::{of_experts, rows};
pub use file_type::{FileType, Fp8Scales};
pub(super) use mlx_mixed::ModelLayers;
pub(super) use role::roles;
pub use role::Role;
pub(super) use rules::{is_default, Fallback};
pub use rules::{Recipe, Rule};
pub use spec::Spec;
pub(super) use tensor_info::TensorInfo;
