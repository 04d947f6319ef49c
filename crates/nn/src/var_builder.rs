//! Where layers get their tensors from.

pub use candle_nn::var_builder::*;
pub use candle_quant::nn::VarBuilder;
