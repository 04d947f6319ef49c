//! candle_nn's normalization layers, from this crate's [`VarBuilder`]. Norms are never packed.

use super::VarBuilder;
use candle_core::Result;
use candle_nn::{LayerNorm, LayerNormConfig, RmsNorm};

/// Root-mean-square norm over the last `size` elements, from the tensor `weight`.
///
/// # Errors
/// If the tensor is missing or not of shape `[size]`.
pub fn rms_norm(size: usize, eps: f64, vb: VarBuilder) -> Result<RmsNorm> {
    candle_nn::rms_norm(size, eps, vb.dense())
}

/// Layer norm over the last `size` elements, from the tensors `weight` and, if affine, `bias`.
///
/// # Errors
/// If a tensor is missing or not of shape `[size]`.
pub fn layer_norm<C: Into<LayerNormConfig>>(size: usize, config: C, vb: VarBuilder) -> Result<LayerNorm> {
    candle_nn::layer_norm(size, config, vb.dense())
}

/// Layer norm without a bias, from the tensor `weight`.
///
/// # Errors
/// If the tensor is missing or not of shape `[size]`.
pub fn layer_norm_no_bias(size: usize, eps: f64, vb: VarBuilder) -> Result<LayerNorm> {
    candle_nn::layer_norm_no_bias(size, eps, vb.dense())
}
