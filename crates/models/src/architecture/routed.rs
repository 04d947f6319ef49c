//! Experts as DeepSeek's models have them, and others after these.

use super::base::moe;
use crate::fields::Fields;
use crate::{Config, Correction, ExpertGroups, GroupScore, MoeConfig, Routing, Scores, SharedExpert};
use candle_quant::Result;

/// What is added to the scores of experts, for the choice.
const CORRECTION: Correction =
    Correction { path: "gate.e_score_correction_bias", is_row: false, is_optional: false };

/// What differs between families.
pub(super) struct Routed {
    pub routing: Routing,
    /// The first layer with experts.
    pub first_sparse: usize,
    /// How many experts' elements the one has that all tokens use.
    pub shared: usize,
    /// How many experts a token uses, if the config may leave it out.
    pub top_k: Option<usize>,
}

/// Experts in all layers from one on, and one that all tokens use.
pub(super) fn routed(fields: Fields, config: &Config, family: Routed) -> Result<MoeConfig> {
    let Routed { routing, first_sparse, shared, .. } = family;
    let inner = fields.required_size("moe_intermediate_size")?;
    let step = fields.size("moe_layer_freq")?.unwrap_or(1);
    let sparse = |layer: usize| layer >= first_sparse && layer.is_multiple_of(step);
    let experts = fields.required_size("n_routed_experts")?;
    let top_k = match family.top_k {
        Some(top_k) => fields.size("num_experts_per_tok")?.unwrap_or(top_k),
        None => fields.required_size("num_experts_per_tok")?,
    };
    Ok(MoeConfig {
        intermediate_size: inner,
        routing,
        sparse_layers: (0..config.num_hidden_layers).map(sparse).collect(),
        shared: shared_experts(inner, shared),
        ..moe(config, experts, top_k)
    })
}

/// The expert that all tokens use, as long as so many of `inner` elements.
pub(super) fn shared_experts(inner: usize, count: usize) -> Option<SharedExpert> {
    let intermediate_size = inner.saturating_mul(count);
    (count > 0).then_some(SharedExpert { intermediate_size, block_name: "shared_experts", gate_name: None })
}

/// A sigmoid for each expert, and a correction of the choice. Absent fields are so many groups, chosen groups, and a scale.
pub(super) fn by_sigmoid(fields: Fields, groups: (usize, usize), scale: f64) -> Result<Routing> {
    let groups = ExpertGroups {
        count: fields.size("n_group")?.unwrap_or(groups.0),
        chosen: fields.size("topk_group")?.unwrap_or(groups.1),
        by: GroupScore::TwoLargest,
    };
    Ok(Routing {
        scores: Scores::Sigmoid,
        correction: Some(CORRECTION),
        groups: (groups.count > 1).then_some(groups),
        normalize: fields.flag("norm_topk_prob")?.unwrap_or(true),
        scale: fields.positive("routed_scaling_factor")?.unwrap_or(scale),
        weighs_inputs: false,
    })
}
