//! Layers with candle_nn's names and call shapes, on packed or dense weights.
//!
//! The checkpoint decides for every tensor: a module with packed weights is computed on them, any
//! other one is an ordinary dense layer.
//!
//! A model that is written for candle_nn needs no change at all: in its `Cargo.toml`,
//! `candle-nn = { package = "candle-quant-nn", .. }` gives it these layers under candle_nn's names, and the rest of
//! candle_nn. New code uses them by their own path:
//!
//! ```
//! use candle_core::{Result, Tensor};
//! use candle_quant::{linear_no_bias, rms_norm, Linear, Module, RmsNorm, VarBuilder};
//!
//! struct Mlp {
//!     norm: RmsNorm,
//!     up: Linear,
//!     down: Linear,
//! }
//!
//! impl Mlp {
//!     fn new(hidden: usize, inner: usize, vb: VarBuilder) -> Result<Self> {
//!         Ok(Self {
//!             norm: rms_norm(hidden, 1e-6, vb.pp("norm"))?,
//!             up: linear_no_bias(hidden, inner, vb.pp("up_proj"))?,
//!             down: linear_no_bias(inner, hidden, vb.pp("down_proj"))?,
//!         })
//!     }
//!
//!     fn forward(&self, x: &Tensor) -> Result<Tensor> {
//!         x.apply(&self.norm)?.apply(&self.up)?.silu()?.apply(&self.down)
//!     }
//! }
//! ```
//!
//! Layers this crate has no packed form of (convolutions, group norm, ...) are candle_nn's own, given
//! [`VarBuilder::dense`].

mod adapters;
mod dense_rows;
mod dequantizing;
mod embedding;
pub(crate) mod expert_split;
mod experts;
mod fused;
mod ggml;
mod linear;
mod loaded;
mod norm;
pub(crate) mod parallel;
mod stand_in;
pub(crate) mod step;
mod stored_weight;
mod summary;
mod var_builder;

pub use crate::backend::{ExpertGroups, GroupScore, Scores};
pub use crate::tensor::{ColumnScaledTensor, LayerWeight, ReorderedTensor};
pub use adapters::{AdapterSlot, Adapters, LayerInput, Lora, LoraConfig, Observer};
pub use dequantizing::DequantizingBackend;
pub use embedding::{embedding, Embedding};
pub use experts::{experts, ExpertStack, Experts, ExpertsConfig, Gating};
pub use fused::{forward_add, forward_all, swiglu};
pub use linear::{linear, linear_b, linear_no_bias, Linear};
pub use loaded::LoadedAs;
pub use norm::{layer_norm, layer_norm_no_bias, rms_norm};
pub use summary::{FormatShare, WeightSummary};
pub use var_builder::VarBuilder;
