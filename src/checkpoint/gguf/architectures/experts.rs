//! Models with experts.

use super::dense::{scale_of_granite, MULTIPLIERS};
use super::{
    flag, has, index, number, required, size, Architecture, Constant, Key, EXPERTS, LLAMA, QKV_BIAS,
    RMS_NORM_EPS, SIGMOID, SILU,
};

/// The fields of most families with experts.
const QWEN: &[Key] = &[
    RMS_NORM_EPS,
    size(EXPERTS, "num_experts"),
    size(EXPERTS, "num_local_experts"),
    size("expert_used_count", "num_experts_per_tok"),
    size("expert_feed_forward_length", "moe_intermediate_size"),
];

const MIXTRAL: &[(&str, &str)] = &[
    ("ffn_gate_inp", "block_sparse_moe.gate"),
    ("ffn_gate_exps", "block_sparse_moe.experts.gate_proj"),
    ("ffn_up_exps", "block_sparse_moe.experts.up_proj"),
    ("ffn_down_exps", "block_sparse_moe.experts.down_proj"),
    ("ffn_gate_up_exps", "block_sparse_moe.experts.gate_up_proj"),
];

const GPT_OSS: Architecture = Architecture {
    model_type: "gpt_oss",
    parts: &[("ffn_gate_inp", "mlp.router"), ("post_attention_norm", "post_attention_layernorm")],
    keys: QWEN,
    has_early_mxfp4: true,
    scores: None,
    others: |_, config| {
        if let Some(scaling) = config.get_mut("rope_scaling").filter(|scaling| scaling.is_object()) {
            scaling["truncate"] = false.into();
        }
        Ok(())
    },
    ..LLAMA
};

pub(super) const ARCHITECTURES: &[Architecture] = &[
    Architecture {
        model_type: "mixtral",
        is_this: |metadata| has(metadata, "llama.expert_count"),
        parts: MIXTRAL,
        is_paired: true,
        keys: QWEN,
        ..LLAMA
    },
    Architecture {
        name: "llama4",
        model_type: "llama4_text",
        parts: &[
            ("ffn_gate", "feed_forward.gate_proj"),
            ("ffn_up", "feed_forward.up_proj"),
            ("ffn_down", "feed_forward.down_proj"),
            ("ffn_gate_inp", "feed_forward.router"),
            ("ffn_gate_exps", "feed_forward.experts.gate_proj"),
            ("ffn_up_exps", "feed_forward.experts.up_proj"),
            ("ffn_down_exps", "feed_forward.experts.down_proj"),
            ("ffn_gate_shexp", "feed_forward.shared_expert.gate_proj"),
            ("ffn_up_shexp", "feed_forward.shared_expert.up_proj"),
            ("ffn_down_shexp", "feed_forward.shared_expert.down_proj"),
        ],
        keys: &[
            required(RMS_NORM_EPS),
            required(size(EXPERTS, "num_local_experts")),
            required(size("expert_used_count", "num_experts_per_tok")),
            required(size("interleave_moe_layer_step", "interleave_moe_layer_step")),
        ],
        flags: &[QKV_BIAS],
        // Chunks, which layers have them, and how queries grow: files say nothing, and config and llama.cpp the same.
        scores: None,
        others: |source, config| {
            source.refuse_keys(&["attention.chunk_size", "use_qk_norm"])?;
            const WINDOW: &str = "attention.sliding_window";
            if source.size(WINDOW)? == Some(0) {
                return Err(source.unsupported(WINDOW, "0: a model without chunks"));
            }
            config.insert(
                "intermediate_size".into(),
                source.required_size("expert_feed_forward_length")?.into(),
            );
            config
                .insert("intermediate_size_mlp".into(), source.required_size("feed_forward_length")?.into());
            // Which llama.cpp tells by the experts, too.
            let is_maverick = source.size(EXPERTS)? == Some(128);
            config.insert("use_qk_norm".into(), (!is_maverick).into());
            Ok(())
        },
        ..LLAMA
    },
    Architecture { name: "gpt-oss", ..GPT_OSS },
    Architecture { name: "gptoss", ..GPT_OSS },
    Architecture {
        name: "qwen3moe",
        model_type: "qwen3_moe",
        keys: QWEN,
        common: &[SILU, ("norm_topk_prob", Constant::Bool(true))],
        ..LLAMA
    },
    Architecture {
        name: "qwen2moe",
        model_type: "qwen2_moe",
        parts: &[
            ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
            ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
            ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
            ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
        ],
        keys: &[
            required(RMS_NORM_EPS),
            required(size(EXPERTS, "num_experts")),
            required(size("expert_used_count", "num_experts_per_tok")),
            required(size("expert_feed_forward_length", "moe_intermediate_size")),
            required(size("expert_shared_feed_forward_length", "shared_expert_intermediate_size")),
        ],
        flags: &[("qkv_bias", "self_attn.q_proj.bias")],
        common: &[SILU, ("norm_topk_prob", Constant::Bool(false))],
        ..LLAMA
    },
    Architecture {
        name: "olmoe",
        model_type: "olmoe",
        keys: &[
            required(RMS_NORM_EPS),
            required(size(EXPERTS, "num_experts")),
            required(size("expert_used_count", "num_experts_per_tok")),
        ],
        flags: &[QKV_BIAS],
        common: &[SILU, ("norm_topk_prob", Constant::Bool(false))],
        ..LLAMA
    },
    Architecture {
        name: "granitemoe",
        model_type: "granitemoe",
        parts: &[
            ("ffn_gate_inp", "block_sparse_moe.router.layer"),
            ("ffn_gate_exps", "block_sparse_moe.experts.gate_proj"),
            ("ffn_up_exps", "block_sparse_moe.experts.up_proj"),
            ("ffn_down_exps", "block_sparse_moe.experts.down_proj"),
            ("ffn_gate_up_exps", "block_sparse_moe.experts.gate_up_proj"),
        ],
        is_paired: true,
        keys: MULTIPLIERS,
        flags: &[QKV_BIAS],
        others: |source, config| {
            for (key, field) in [(EXPERTS, "num_local_experts"), ("expert_used_count", "num_experts_per_tok")]
            {
                config.insert(field.into(), source.required_size(key)?.into());
            }
            const SHARED: &str = "expert_shared_feed_forward_length";
            if let Some(inner) = source.size(SHARED)?.filter(|inner| *inner > 0) {
                return Err(source.unsupported(SHARED, &format!("{inner}: an expert that all tokens use")));
            }
            scale_of_granite(source, config)
        },
        ..LLAMA
    },
    Architecture {
        name: "glm4moe",
        model_type: "glm4_moe",
        parts: &[
            ("post_attention_norm", "post_attention_layernorm"),
            ("exp_probs_b", "mlp.gate.e_score_correction_bias"),
            ("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
            ("ffn_up_shexp", "mlp.shared_experts.up_proj"),
            ("ffn_down_shexp", "mlp.shared_experts.down_proj"),
        ],
        keys: &[
            required(RMS_NORM_EPS),
            required(size(EXPERTS, "n_routed_experts")),
            required(size("expert_used_count", "num_experts_per_tok")),
            required(size("expert_feed_forward_length", "moe_intermediate_size")),
            required(index("expert_shared_count", "n_shared_experts")),
            required(index("leading_dense_block_count", "first_k_dense_replace")),
            size("expert_group_count", "n_group"),
            size("expert_group_used_count", "topk_group"),
            number("expert_weights_scale", "routed_scaling_factor"),
            flag("expert_weights_norm", "norm_topk_prob"),
        ],
        flags: &[QKV_BIAS, ("use_qk_norm", "self_attn.q_norm.weight")],
        scores: Some(SIGMOID),
        ..LLAMA
    },
    Architecture {
        name: "ernie4_5-moe",
        model_type: "ernie4_5_moe",
        parts: &[
            ("exp_probs_b", "mlp.moe_statics.e_score_correction_bias"),
            ("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
            ("ffn_up_shexp", "mlp.shared_experts.up_proj"),
            ("ffn_down_shexp", "mlp.shared_experts.down_proj"),
        ],
        // The length of shared experts is there, too, and wrong where other sizes are in other proportions: converters
        // divide that of dense layers by the heads. Experts from the first on that is not dense go to the last layer.
        keys: &[
            required(RMS_NORM_EPS),
            required(size(EXPERTS, "moe_num_experts")),
            required(size("expert_used_count", "moe_k")),
            required(size("expert_feed_forward_length", "moe_intermediate_size")),
            required(index("expert_shared_count", "moe_num_shared_experts")),
            required(index("leading_dense_block_count", "moe_layer_start_index")),
            required(size("interleave_moe_layer_step", "moe_layer_interval")),
        ],
        flags: &[("use_bias", "self_attn.q_proj.bias")],
        ..LLAMA
    },
];
