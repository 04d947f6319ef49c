//! Qwen3-Next and Qwen 3.5, most of whose layers are of linear attention.

use super::{
    required, size, Architecture, Key, LinearOrder, EXPERTS, LLAMA, QKV_BIAS, RMS_NORM, RMS_NORM_EPS, SILU,
};
use crate::checkpoint::gguf::config::{Map, Source};
use crate::Result;
use serde_json::json;

const WITH_EXPERTS: &[Key] = &[
    required(RMS_NORM_EPS),
    required(size(EXPERTS, "num_experts")),
    required(size("expert_used_count", "num_experts_per_tok")),
    required(size("expert_feed_forward_length", "moe_intermediate_size")),
    required(size("expert_shared_feed_forward_length", "shared_expert_intermediate_size")),
];

const QWEN: Architecture = Architecture {
    parts: &[
        ("attn_qkv", "linear_attn.in_proj_qkv"),
        ("attn_gate", "linear_attn.in_proj_z"),
        ("ssm_ba", "linear_attn.in_proj_ba"),
        ("ssm_alpha", "linear_attn.in_proj_a"),
        ("ssm_beta", "linear_attn.in_proj_b"),
        ("ssm_conv1d", "linear_attn.conv1d"),
        ("ssm_dt", "linear_attn.dt_bias"),
        ("ssm_a", "linear_attn.A_log"),
        ("ssm_norm", "linear_attn.norm"),
        ("ssm_out", "linear_attn.out_proj"),
        ("post_attention_norm", "post_attention_layernorm"),
        ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
        ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
        ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
        ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
    ],
    keys: WITH_EXPERTS,
    flags: &[QKV_BIAS],
    common: &[SILU],
    norms_are_sums: true,
    linear: Some(LinearOrder::Tiled),
    others: heads,
    ..LLAMA
};

pub(super) const ARCHITECTURES: &[Architecture] = &[
    Architecture {
        name: "qwen3next",
        model_type: "qwen3_next",
        linear: Some(LinearOrder::ByKeys),
        others: |source, config| {
            const EARLY: &str = "blk.0.ssm_in.weight";
            if (source.has_tensor)(EARLY) {
                let problem = format!("`{EARLY}`: queries, keys, values and gates in one projection");
                return Err(source.problem(problem));
            }
            heads(source, config)
        },
        ..QWEN
    },
    Architecture { name: "qwen35", model_type: "qwen3_5_text", keys: RMS_NORM, ..QWEN },
    Architecture { name: "qwen35moe", model_type: "qwen3_5_moe_text", ..QWEN },
];

/// Heads of linear attention, and which layers attend to keys instead.
fn heads(source: &Source, config: &mut Map) -> Result<()> {
    const HEADS_OF_VALUES: &str = "ssm.time_step_rank";
    const ALL_VALUES: &str = "ssm.inner_size";
    for (key, field) in [
        ("ssm.group_count", "linear_num_key_heads"),
        (HEADS_OF_VALUES, "linear_num_value_heads"),
        ("ssm.state_size", "linear_key_head_dim"),
        ("ssm.conv_kernel", "linear_conv_kernel_dim"),
    ] {
        config.insert(field.into(), json!(source.required_size(key)?));
    }
    let (all, heads) = (source.required_size(ALL_VALUES)?, source.required_size(HEADS_OF_VALUES)?);
    if !all.is_multiple_of(heads) {
        return Err(source.wrong(ALL_VALUES, &format!("a multiple of the {heads} heads of values")));
    }
    config.insert("linear_value_head_dim".into(), json!(all / heads));
    if source.has_tiled_outputs {
        config.insert("linear_out_proj_is_tiled".into(), json!(true));
    }
    const INTERVAL: &str = "full_attention_interval";
    if let Some(interval) = source.size(INTERVAL)?.filter(|interval| *interval > 0) {
        config.insert(INTERVAL.into(), json!(interval));
    }
    const LISTED: &str = "attention.recurrent_layers";
    match source.has_key(LISTED) {
        true => Err(source.unsupported(LISTED, "given: layers that are no matter of an interval")),
        false => Ok(()),
    }
}
