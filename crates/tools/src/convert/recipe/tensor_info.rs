//! What rules see of a tensor.

use super::mlx_mixed::ModelLayers;
use super::role::Role;
use candle_quant::QuantFormat;
use candle_quant_models::MlxWeight;

/// A tensor as rules see it.
pub(in crate::convert) struct TensorInfo<'a> {
    pub name: &'a str,
    pub dims: &'a [usize],
    pub roles: &'a [Role],
    /// What mlx-lm makes of its module.
    pub mlx_lm: MlxWeight,
    pub layers: &'a ModelLayers,
    /// Whether the output has a format.
    pub has_format: &'a dyn Fn(QuantFormat) -> bool,
}
