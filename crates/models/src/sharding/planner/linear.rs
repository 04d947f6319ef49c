//! The tensors of linear attention.

use super::{columns, ModuleName, Planner, Shared};
use crate::sharding::Split;
use candle_quant::checkpoint::Weight;

impl Planner<'_> {
    /// The part of a tensor of linear attention.
    pub(super) fn of_linear(&self, module: &ModuleName, weight: &Weight) -> Shared {
        let Some(linear) = &self.config.linear else { return (Split::Whole, None) };
        let Some(heads) = &self.sharding.linear_heads else {
            let why = format!("{} heads are fewer than the {} ranks", linear.key_heads, self.ranks);
            return (Split::Whole, Some(why));
        };
        let of_heads = |size: usize| heads.iter().map(|own| own.start * size..own.end * size).collect();
        let [qkvz, ba] = linear.rows_of_group();
        let values = linear.elements(1).1;
        let split = match module.projection {
            "in_proj_qkvz" => Split::Rows(of_heads(qkvz)),
            "in_proj_ba" => Split::Rows(of_heads(ba)),
            "in_proj_z" => Split::Rows(of_heads(values)),
            "in_proj_qkv" | "conv1d" => {
                Split::Segments(heads.iter().map(|own| linear.channels_of(own).to_vec()).collect())
            }
            "out_proj" if linear.tiled_output => {
                return (Split::Whole, Some("inputs of a rank's heads do not lie together".into()));
            }
            "out_proj" => return columns(module, of_heads(values), weight),
            _ => Split::Rows(of_heads(linear.shared())),
        };
        (split, None)
    }
}
