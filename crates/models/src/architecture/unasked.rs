//! Fields that change numbers, in families that do not know them.

use crate::fields::{Asked, Fields};
use candle_quant::{Error, Result};
use serde_json::Value;

/// What a field says where it changes nothing.
enum Neutral {
    /// Nothing at all.
    Absent,
    False,
    True,
    Number(f64),
    /// No more than one.
    AtMostOne,
}

/// Fields of some families, and what they say where they change nothing.
const CHANGE_NUMBERS: &[(&str, Neutral)] = &[
    ("alibi", Neutral::False),
    ("attention_bias", Neutral::False),
    ("attention_chunk_size", Neutral::Absent),
    ("floor_scale", Neutral::Absent),
    ("attention_multiplier", Neutral::Absent),
    ("attention_out_bias", Neutral::False),
    ("attn_logit_softcapping", Neutral::Absent),
    ("attn_output_gate", Neutral::False),
    ("attn_temperature_tuning", Neutral::False),
    ("clip_qkv", Neutral::Absent),
    ("dim_model_base", Neutral::Absent),
    ("embedding_multiplier", Neutral::Number(1.)),
    ("final_logit_softcapping", Neutral::Absent),
    ("kv_lora_rank", Neutral::Absent),
    ("linear_out_proj_is_tiled", Neutral::False),
    ("logit_scale", Neutral::Number(1.)),
    ("logits_scaling", Neutral::Number(1.)),
    ("mlp_bias", Neutral::False),
    ("no_rope_layers", Neutral::Absent),
    ("partial_rotary_factor", Neutral::Number(1.)),
    ("qk_layernorm", Neutral::False),
    ("qkv_bias", Neutral::False),
    ("query_pre_attn_scalar", Neutral::Absent),
    ("residual_multiplier", Neutral::Number(1.)),
    ("rope_interleave", Neutral::True),
    ("rope_local_base_freq", Neutral::Absent),
    ("rotary_pct", Neutral::Number(1.)),
    ("scale_depth", Neutral::Absent),
    ("scale_emb", Neutral::Absent),
    ("shared_expert_intermediate_size", Neutral::Number(0.)),
    ("use_bias", Neutral::False),
    ("use_bidirectional_attention", Neutral::False),
    ("use_mrope", Neutral::False),
    ("use_parallel_residual", Neutral::False),
    ("use_qk_norm", Neutral::False),
    ("use_qkv_bias", Neutral::False),
    ("use_sliding_window", Neutral::False),
];

/// How many experts there are, by the names of all families: those with experts know one of them.
const COUNT_EXPERTS: &[(&str, Neutral)] = &[
    ("moe_num_experts", Neutral::AtMostOne),
    ("n_routed_experts", Neutral::AtMostOne),
    ("num_experts", Neutral::AtMostOne),
    ("num_local_experts", Neutral::AtMostOne),
];

/// Refuses a field that changes numbers, if it was not asked for. `has_experts` says whether the family does.
pub(super) fn check(fields: Fields, asked: &Asked, model_type: &str, has_experts: bool) -> Result<()> {
    let of_experts = COUNT_EXPERTS.iter().filter(|_| !has_experts);
    let others = CHANGE_NUMBERS.iter().chain(of_experts).filter(|(key, _)| !asked.contains(key));
    for (key, neutral) in others {
        let Some(value) = fields.get(key) else { continue };
        let changes_nothing = match neutral {
            Neutral::Absent => false,
            Neutral::False => value == &Value::Bool(false),
            Neutral::True => value == &Value::Bool(true),
            Neutral::Number(neutral) => value.as_f64() == Some(*neutral),
            Neutral::AtMostOne => value.as_u64().is_some_and(|count| count <= 1),
        };
        if !changes_nothing {
            return Err(Error::Unsupported {
                what: format!("`{key}`: {value} in a model of type `{model_type}`"),
                remedy: "it changes what is computed, and this type is not known to have it".to_string(),
            });
        }
    }
    Ok(())
}
