//! candle_nn's interface, with layers that compute on quantized weights as they are packed.
//!
//! Every public item of candle_nn is here under its name, in the same module. A model takes this crate in candle_nn's place
//! by one line of Cargo.toml:
//!
//! ```toml
//! candle-nn = { package = "candle-quant-nn", version = "0.1" }
//! ```
//!
//! * [`Linear`], [`Embedding`], [`VarBuilder`] and their functions are those of [`candle_quant`]: the checkpoint decides,
//!   tensor by tensor, whether a layer is quantized or dense.
//! * Functions for other layers (convolutions, norms, ...) take this [`VarBuilder`] and return candle_nn's layers. A packed
//!   weight is dequantized for them.
//! * [`LSTM`] and [`GRU`] are types of this crate, for their `new` takes a [`VarBuilder`].
//! * All other items are candle_nn's own.
//!
//! ```
//! use candle_core::{DType, Device, Module, Tensor};
//! use candle_quant_nn as candle_nn; // the line of Cargo.toml says this
//!
//! # fn main() -> candle_core::Result<()> {
//! let checkpoint = candle_nn::Checkpoint::open("assets/tiny")?;
//! let vb = candle_nn::VarBuilder::from_checkpoint(&checkpoint, DType::F32, &Device::Cpu);
//! let gate = candle_nn::linear_no_bias(256, 512, vb.pp("model.layers.0.mlp.gate_proj"))?;
//! let y = candle_nn::ops::silu(&gate.forward(&Tensor::ones((1, 256), DType::F32, &Device::Cpu)?)?)?;
//! assert_eq!(y.dims(), [1, 512]);
//! # Ok(())
//! # }
//! ```

pub mod activation;
pub mod batch_norm;
pub mod conv;
pub mod embedding;
pub mod group_norm;
pub mod layer_norm;
pub mod linear;
pub mod rnn;
pub mod var_builder;

pub use activation::prelu;
pub use batch_norm::batch_norm;
pub use candle_nn::*;
pub use candle_quant::nn::LoadedAs;
pub use candle_quant::Checkpoint;
pub use candle_quant_packed::dense_copies;
pub use conv::{
    conv1d, conv1d_no_bias, conv2d, conv2d_no_bias, conv_transpose1d, conv_transpose1d_no_bias,
    conv_transpose2d, conv_transpose2d_no_bias,
};
pub use embedding::{embedding, Embedding};
pub use group_norm::group_norm;
pub use layer_norm::{layer_norm, layer_norm_no_bias, rms_norm};
pub use linear::{linear, linear_b, linear_no_bias, Linear};
pub use rnn::{gru, lstm, GRU, LSTM};
pub use var_builder::VarBuilder;
