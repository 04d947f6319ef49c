//! Decoder-only language models, written once on the layers of [`nn`](candle_quant::nn): packed and dense
//! weights run through the same code.
//!
//! [`families()`] lists them. A family of known parts is one entry of a table: what its config says is read into a [`Config`],
//! which describes everything that distinguishes it, and one decoder computes them all.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_quant::Checkpoint;
//! use candle_quant_models::Model;
//!
//! # fn main() -> candle_quant::Result<()> {
//! let device = Device::Cpu;
//! let mut model = Model::load(&Checkpoint::open("assets/tiny")?, DType::F32, &device)?;
//! let logits = model.forward(&Tensor::new(&[[1u32, 2, 3]], &device)?, 0)?;
//! assert_eq!(logits.dims(), [1, 3, 640]); // of every token, over the vocabulary
//! # Ok(())
//! # }
//! ```

mod architecture;
mod attention;
pub mod chat;
mod config;
mod decoder;
mod differentiable;
mod fields;
pub mod generate;
mod inputs;
mod layer;
mod linear_config;
mod mixer;
mod mlp;
mod moe;
mod names;
mod norm;
mod options;
mod projection;
mod published;
mod root;
mod rope;
mod shapes;
pub mod sharding;
pub mod train;

pub use architecture::mlx_lm::{MlxLm, MlxWeight};
pub use architecture::published::published_fields;
pub use architecture::{families, Family};
pub use config::{Config, Inside, Latents, LinearAttentionConfig, Names, QkNorm, QkNormOver, Role};
pub use decoder::{Model, StepBytes};
pub use inputs::{Given, Maker, ModuleInput, ScaledInput};
pub use linear_config::SomeRows;
pub use moe::{Correction, ExpertGroups, GroupScore, MoeConfig, Routing, Scores, SharedExpert};
pub use norm::NormKind;
pub use options::{CacheOptions, ModelOptions};
pub use published::{Arrangement, Entries, Piece, Published, PublishedForm, PublishedTensor, EXPERT_BLOCKS};
pub use root::{layer_of, name_in_mlx_lm};
pub use rope::{Rope, RopeScaling};
pub use shapes::Expected;
