//! Decoders of text with experts.

use super::transformers::models::*;
use super::Family;
use crate::{decoder, parse};
use serde_json::json;

pub fn mixtral() -> Family {
    Family::new(
        json!({ "num_local_experts": 4, "num_experts_per_tok": 2, "use_flash_attn": false }),
        |config, vb| {
            let mut model = mixtral::Model::new(&parse(config)?, vb)?;
            decoder(move |ids, position| model.forward(ids, position))
        },
    )
}

/// The first layer has no experts.
pub fn qwen2_moe() -> Family {
    let config = json!({
        "decoder_sparse_step": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 128, "norm_topk_prob": false,
    });
    Family::new(config, |config, vb| {
        let mut model = qwen2_moe::Model::new(&parse(config)?, vb)?;
        decoder(move |ids, position| model.forward(ids, position))
    })
}

pub fn qwen3_moe() -> Family {
    let config = json!({
        "decoder_sparse_step": 1, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
        "norm_topk_prob": true,
    });
    Family::new(config, |config, vb| {
        let mut model = qwen3_moe::ModelForCausalLM::new(&parse(config)?, vb)?;
        decoder(move |ids, position| model.forward(ids, position))
    })
}

/// Both kinds of queries would need two families: here they have a low rank.
pub fn deepseek2() -> Family {
    let config = json!({
        "moe_intermediate_size": 64, "n_shared_experts": 2, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "first_k_dense_replace": 1, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16, "v_head_dim": 32, "n_group": 1, "topk_group": 1, "rope_scaling": null,
    });
    Family::new(config, |config, vb| {
        let mut model = deepseek2::DeepSeekV2::new(&parse(config)?, vb)?;
        decoder(move |ids, position| model.forward(ids, position))
    })
    .with_read_dense(&[("mlp.gate.weight", "multiplied by the model itself, in f32")])
}
