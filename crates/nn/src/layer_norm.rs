//! Layer normalization and root-mean-square normalization.

pub use candle_nn::layer_norm::*;
pub use candle_quant::nn::{layer_norm, layer_norm_no_bias, rms_norm};
