//! Batch normalization.

use crate::VarBuilder;
use candle_core::Result;

pub use candle_nn::batch_norm::*;

/// A batch norm from the tensors `running_mean`, `running_var` and, if affine, `weight` and `bias`.
///
/// # Errors
/// If a tensor is missing or not of shape `[num_features]`, or `eps` is negative.
pub fn batch_norm<C: Into<BatchNormConfig>>(
    num_features: usize,
    config: C,
    vb: VarBuilder,
) -> Result<BatchNorm> {
    candle_nn::batch_norm(num_features, config, vb.dense())
}
