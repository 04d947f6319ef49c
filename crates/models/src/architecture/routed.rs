//! Experts as DeepSeek's models have them, and others after these.

use crate::fields::Fields;
use crate::{Config, Correction, MoeConfig, Routing, SharedExpert};
use candle_quant::nn::Gating;
use candle_quant::Result;

/// What is added to the scores of experts, for the choice.
pub(super) const CORRECTION: Correction =
    Correction { path: "gate.e_score_correction_bias", is_row: false, is_optional: false };

/// What differs between families.
pub(super) struct Routed {
    pub routing: Routing,
    /// The first layer with experts.
    pub first_sparse: usize,
    /// How many experts' elements the one has that all tokens use.
    pub shared: usize,
}

/// Experts in all layers from one on, and one that all tokens use.
pub(super) fn routed(fields: Fields, config: &Config, family: Routed) -> Result<MoeConfig> {
    let Routed { routing, first_sparse, shared } = family;
    let inner = fields.required_size("moe_intermediate_size")?;
    let step = fields.size("moe_layer_freq")?.unwrap_or(1);
    let sparse = |layer: usize| layer >= first_sparse && layer.is_multiple_of(step);
    Ok(MoeConfig {
        experts: fields.required_size("n_routed_experts")?,
        top_k: fields.required_size("num_experts_per_tok")?,
        intermediate_size: inner,
        routing,
        bias: false,
        gating: Gating::Plain(config.hidden_act),
        sparse_layers: (0..config.num_hidden_layers).map(sparse).collect(),
        block_name: "mlp",
        router_name: "gate",
        stack_names: None,
        transposed_parameters: false,
        shared: (shared > 0).then_some(SharedExpert {
            intermediate_size: inner.saturating_mul(shared),
            block_name: "shared_experts",
            gate_name: None,
        }),
    })
}
