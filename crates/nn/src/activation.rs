//! Activation functions.

use crate::VarBuilder;
use candle_core::Result;

pub use candle_nn::activation::*;

/// A PReLU layer from the tensor `weight`: one slope for all channels if `num_channels` is `None`, else one for each.
///
/// # Errors
/// If the tensor is missing or has another shape.
pub fn prelu(num_channels: Option<usize>, vb: VarBuilder) -> Result<PReLU> {
    candle_nn::prelu(num_channels, vb.dense())
}
