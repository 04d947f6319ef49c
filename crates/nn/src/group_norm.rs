//! Group normalization.

use crate::VarBuilder;
use candle_core::Result;

pub use candle_nn::group_norm::*;

/// A group norm from the tensors `weight` and `bias`.
///
/// # Errors
/// If a tensor is missing or not of shape `[num_channels]`, or the channels don't divide into `num_groups`.
pub fn group_norm(num_groups: usize, num_channels: usize, eps: f64, vb: VarBuilder) -> Result<GroupNorm> {
    candle_nn::group_norm(num_groups, num_channels, eps, vb.dense())
}
