//! DeepSeek 2 and 3, whose keys and values are made of latents.

use super::{
    flag, index, number, required, size, Architecture, Key, EXPERTS, LLAMA, RMS_NORM_EPS, SIGMOID, SOFTMAX,
};
use crate::checkpoint::gguf::config::{Map, Source};
use crate::checkpoint::gguf::rope;
use crate::Result;
use serde_json::json;

const SCORES: &str = "expert_gating_func";
const NORMALIZE: &str = "expert_weights_norm";
const GROUPS: &str = "expert_group_count";

const KEYS: &[Key] = &[
    required(RMS_NORM_EPS),
    required(size("attention.kv_lora_rank", "kv_lora_rank")),
    size("attention.q_lora_rank", "q_lora_rank"),
    required(size(EXPERTS, "n_routed_experts")),
    required(size("expert_used_count", "num_experts_per_tok")),
    required(size("expert_feed_forward_length", "moe_intermediate_size")),
    required(index("expert_shared_count", "n_shared_experts")),
    index("leading_dense_block_count", "first_k_dense_replace"),
    number("expert_weights_scale", "routed_scaling_factor"),
    flag(NORMALIZE, "norm_topk_prob"),
];

const DEEPSEEK: Architecture = Architecture {
    name: "deepseek2",
    parts: &[
        ("attn_q_a", "self_attn.q_a_proj"),
        ("attn_q_a_norm", "self_attn.q_a_layernorm"),
        ("attn_q_b", "self_attn.q_b_proj"),
        ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
        ("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
        // Older files have the third, newer ones that of keys turned over, and that of values.
        ("attn_k_b", "self_attn.embed_q"),
        ("attn_v_b", "self_attn.unembed_out"),
        ("attn_kv_b", "self_attn.kv_b_proj"),
        ("exp_probs_b", "mlp.gate.e_score_correction_bias"),
        ("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
        ("ffn_up_shexp", "mlp.shared_experts.up_proj"),
        ("ffn_down_shexp", "mlp.shared_experts.down_proj"),
    ],
    keys: KEYS,
    flags: &[("attention_bias", "self_attn.kv_a_proj_with_mqa.bias")],
    has_latents: true,
    ..LLAMA
};

pub(super) const ARCHITECTURES: &[Architecture] = &[
    Architecture {
        model_type: "deepseek_v3",
        is_this: |metadata| Ok(metadata.size("deepseek2.expert_gating_func")? == Some(SIGMOID)),
        scores: Some(SIGMOID),
        others: |source, config| {
            config.insert("scoring_func".into(), json!("sigmoid"));
            sizes(source, config)?;
            let (count, chosen) = groups(source)?;
            config.insert("n_group".into(), json!(count));
            config.insert("topk_group".into(), json!(chosen));
            Ok(())
        },
        ..DEEPSEEK
    },
    Architecture {
        model_type: "deepseek_v2",
        scores: Some(SOFTMAX),
        others: |source, config| {
            sizes(source, config)?;
            // Files from before version 3 do not say what makes scores: those of version 3 have corrections.
            let first = source.size("leading_dense_block_count")?.unwrap_or(0);
            let is_corrected = source.has_in(first, "mlp.gate.e_score_correction_bias");
            if is_corrected && source.size(SCORES)?.unwrap_or(0) == 0 {
                return Err(source.missing(SCORES, "beside corrections of the choice of experts"));
            }
            if source.flag(NORMALIZE)? == Some(true) {
                return Err(source.unsupported(NORMALIZE, "true, with softmax"));
            }
            let (count, chosen) = groups(source)?;
            let method = if count > 1 { "group_limited_greedy" } else { "greedy" };
            config.insert("topk_method".into(), json!(method));
            if count > 1 {
                config.insert("n_group".into(), json!(count));
                config.insert("topk_group".into(), json!(chosen));
            }
            Ok(())
        },
        ..DEEPSEEK
    },
];

/// Elements of heads, and the rope.
fn sizes(source: &Source, config: &mut Map) -> Result<()> {
    const TURNING: &str = "rope.dimension_count";
    // Newer files call those of latents the length of keys, as attention sees them.
    let newer = source.size("attention.key_length_mla")?.is_some();
    let (keys, values) = match newer {
        true => ("attention.key_length_mla", "attention.value_length_mla"),
        false => ("attention.key_length", "attention.value_length"),
    };
    let (key_dim, turning) = (source.required_size(keys)?, source.required_size(TURNING)?);
    match key_dim.checked_sub(turning).filter(|rest| *rest > 0) {
        Some(rest) => config.insert("qk_nope_head_dim".into(), json!(rest)),
        None => return Err(source.wrong(keys, &format!("more than the {turning} elements that turn"))),
    };
    config.insert("qk_rope_head_dim".into(), json!(turning));
    config.insert("v_head_dim".into(), json!(source.required_size(values)?));
    const GROWTH: &str = "attention.temperature_scale";
    if source.number(GROWTH)?.is_some_and(|scale| scale != 0.) {
        return Err(source.unsupported(GROWTH, "given: queries that grow with their positions"));
    }
    rope::of_latents(source, config)
}

/// Groups of experts, and how many of them a token chooses.
fn groups(source: &Source) -> Result<(u32, u32)> {
    if let Some(count) = source.size(GROUPS)? {
        return match count {
            0 | 1 => Ok((1, 1)),
            count => Ok((count, source.required_size("expert_group_used_count")?)),
        };
    }
    // Converters wrote no groups until late in 2025. The models before that are told by the number of their experts:
    // those of 160 are version 2, of 256 version 3, of 384 Kimi K2, of 64 V2-Lite, Moonlight and others.
    match source.required_size(EXPERTS)? {
        64 | 384 => Ok((1, 1)),
        160 => Ok((8, 3)),
        256 => Ok((8, 4)),
        experts => Err(source.missing(GROUPS, &format!("in a model of {experts} experts"))),
    }
}
