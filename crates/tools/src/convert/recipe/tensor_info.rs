//! What rules see of a tensor.

use super::mlx_mixed::ModelLayers;
use super::role::Role;
use candle_quant::QuantFormat;

/// A tensor as rules see it.
pub(in crate::convert) struct TensorInfo<'a> {
    pub name: &'a str,
    pub dims: &'a [usize],
    pub roles: &'a [Role],
    pub layers: &'a ModelLayers,
    /// Whether the output has a format.
    pub has_format: &'a dyn Fn(QuantFormat) -> bool,
}
