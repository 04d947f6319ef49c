//! Models without experts.

use super::{
    has, number, required, size, Architecture, Constant, Key, LAYER_NORM_EPS, LLAMA, QKV_BIAS, RMS_NORM,
    RMS_NORM_EPS,
};
use crate::checkpoint::gguf::config::{Map, Source};
use crate::checkpoint::gguf::rope;
use crate::Result;
use serde_json::json;

const LAYER_NORM: &[Key] = &[required(number(LAYER_NORM_EPS, "layer_norm_eps"))];

/// Norms behind the blocks, and none before them.
const NORMS_BEHIND: &[(&str, &str)] =
    &[("post_attention_norm", "post_attention_layernorm"), ("post_ffw_norm", "post_feedforward_layernorm")];

const GLM: Architecture = Architecture {
    parts: &[("ffn_up", "mlp.gate_up_proj")],
    keys: RMS_NORM,
    flags: &[QKV_BIAS, ("attention_bias", "self_attn.qkv_proj.bias")],
    ..LLAMA
};

pub(super) const ARCHITECTURES: &[Architecture] = &[
    // Mistral models are called llama, too; the window is what tells them apart.
    Architecture {
        model_type: "mistral",
        is_this: |metadata| has(metadata, "llama.attention.sliding_window"),
        is_paired: true,
        ..LLAMA
    },
    Architecture { is_paired: true, ..LLAMA },
    Architecture { name: "qwen2", model_type: "qwen2", ..LLAMA },
    Architecture { name: "qwen3", model_type: "qwen3", ..LLAMA },
    Architecture { name: "chatglm", model_type: "glm", ..GLM },
    Architecture {
        name: "cohere2",
        model_type: "cohere2",
        keys: &[
            required(number(LAYER_NORM_EPS, "layer_norm_eps")),
            required(number("logit_scale", "logit_scale")),
            required(size("attention.sliding_window", "sliding_window")),
        ],
        flags: &[QKV_BIAS],
        ..LLAMA
    },
    Architecture {
        name: "command-r",
        model_type: "cohere",
        keys: &[
            required(number(LAYER_NORM_EPS, "layer_norm_eps")),
            required(number("logit_scale", "logit_scale")),
        ],
        flags: &[QKV_BIAS, ("use_qk_norm", "self_attn.q_norm.weight")],
        ..LLAMA
    },
    Architecture {
        name: "ernie4_5",
        model_type: "ernie4_5",
        keys: RMS_NORM,
        flags: &[("use_bias", "self_attn.q_proj.bias")],
        ..LLAMA
    },
    Architecture {
        name: "exaone4",
        model_type: "exaone4",
        parts: NORMS_BEHIND,
        keys: RMS_NORM,
        flags: &[],
        ..LLAMA
    },
    Architecture {
        name: "glm4",
        model_type: "glm4",
        parts: &[
            ("ffn_up", "mlp.gate_up_proj"),
            ("post_attention_norm", "post_self_attn_layernorm"),
            ("post_ffw_norm", "post_mlp_layernorm"),
        ],
        ..GLM
    },
    Architecture {
        name: "granite",
        model_type: "granite",
        is_paired: true,
        keys: MULTIPLIERS,
        others: scale_of_granite,
        ..LLAMA
    },
    Architecture {
        name: "hunyuan-dense",
        model_type: "hunyuan_v1_dense",
        parts: &[("attn_q_norm", "self_attn.query_layernorm"), ("attn_k_norm", "self_attn.key_layernorm")],
        keys: RMS_NORM,
        flags: &[QKV_BIAS, ("use_qk_norm", "self_attn.query_layernorm.weight")],
        ..LLAMA
    },
    Architecture {
        name: "mistral3",
        model_type: "ministral3",
        is_paired: true,
        keys: RMS_NORM,
        flags: &[],
        others: |source, config| {
            source.refuse_keys(&["rope.scaling.beta_fast", "rope.scaling_beta"])?;
            rope::of_ministral(source, config)
        },
        ..LLAMA
    },
    Architecture {
        name: "nemotron",
        model_type: "nemotron",
        keys: &[required(number(LAYER_NORM_EPS, "norm_eps"))],
        flags: &[QKV_BIAS, ("mlp_bias", "mlp.up_proj.bias")],
        norms_are_sums: true,
        common: &[],
        ..LLAMA
    },
    Architecture {
        name: "olmo",
        model_type: "olmo",
        is_paired: true,
        keys: &[number(LAYER_NORM_EPS, "layer_norm_eps"), number("attention.clamp_kqv", "clip_qkv")],
        flags: &[QKV_BIAS],
        ..LLAMA
    },
    // OLMo 3 is called olmo2, too; only it has a window.
    Architecture {
        name: "olmo2",
        model_type: "olmo3",
        is_this: |metadata| has(metadata, "olmo2.attention.sliding_window"),
        parts: NORMS_BEHIND,
        keys: RMS_NORM,
        flags: &[QKV_BIAS],
        others: rope::of_layer_types,
        ..LLAMA
    },
    Architecture {
        name: "olmo2",
        model_type: "olmo2",
        parts: NORMS_BEHIND,
        keys: RMS_NORM,
        flags: &[QKV_BIAS],
        ..LLAMA
    },
    Architecture {
        name: "phi2",
        model_type: "phi",
        parts: &[("attn_output", "self_attn.dense"), ("ffn_up", "mlp.fc1"), ("ffn_down", "mlp.fc2")],
        final_norm: "model.final_layernorm",
        keys: LAYER_NORM,
        flags: &[],
        common: &[],
        ..LLAMA
    },
    Architecture {
        name: "phi3",
        model_type: "phi3",
        parts: &[("ffn_up", "mlp.gate_up_proj")],
        keys: RMS_NORM,
        flags: &[],
        // Zero is none; early converters wrote nothing, of models with a window and without.
        others: |source, _| match source.size("attention.sliding_window")? {
            Some(_) => Ok(()),
            None => Err(source.missing("attention.sliding_window", "(0 is none)")),
        },
        ..LLAMA
    },
    Architecture {
        name: "seed_oss",
        model_type: "seed_oss",
        parts: &[("post_attention_norm", "post_attention_layernorm")],
        keys: RMS_NORM,
        flags: &[
            QKV_BIAS,
            ("attention_out_bias", "self_attn.o_proj.bias"),
            ("mlp_bias", "mlp.gate_proj.bias"),
        ],
        ..LLAMA
    },
    // In all models of the type each fourth layer has no positions, which is the config's default.
    Architecture { name: "smollm3", model_type: "smollm3", is_paired: true, keys: RMS_NORM, ..LLAMA },
    Architecture {
        name: "stablelm",
        model_type: "stablelm",
        parts: &[("attn_q_norm", "self_attn.q_layernorm"), ("attn_k_norm", "self_attn.k_layernorm")],
        keys: LAYER_NORM,
        flags: &[("use_qkv_bias", "self_attn.q_proj.bias"), ("qk_layernorm", "self_attn.q_layernorm.weight")],
        others: |source, config| {
            // The file has a key for it, which converters get wrong where configs leave it out.
            let has_norm = source.has("post_attention_layernorm.weight");
            config.insert("use_parallel_residual".into(), json!(!has_norm));
            base_of_stablelm(source)
        },
        ..LLAMA
    },
    Architecture {
        name: "starcoder2",
        model_type: "starcoder2",
        parts: &[("ffn_up", "mlp.c_fc"), ("ffn_down", "mlp.c_proj")],
        keys: &[
            required(number(LAYER_NORM_EPS, "norm_epsilon")),
            size("attention.sliding_window", "sliding_window"),
        ],
        flags: &[("use_bias", "self_attn.q_proj.bias")],
        // The three published models have this window, and llama.cpp none.
        common: &[("sliding_window", Constant::Size(4096))],
        ..LLAMA
    },
];

/// The multipliers of Granite.
pub(super) const MULTIPLIERS: &[Key] = &[
    required(RMS_NORM_EPS),
    number("attention.scale", "attention_multiplier"),
    number("embedding_scale", "embedding_multiplier"),
    number("residual_scale", "residual_multiplier"),
    required(number("logit_scale", "logits_scaling")),
];

/// What granites have beside [`MULTIPLIERS`].
pub(super) fn scale_of_granite(source: &Source, config: &mut Map) -> Result<()> {
    // The attention layers of hybrid models may have no positions.
    if source.flag("rope.scaling.finetuned")? == Some(false) {
        return Err(source.unsupported("rope.scaling.finetuned", "false, which is a model without positions"));
    }
    // Without a word of it the scale is the usual one.
    if !config.contains_key("attention_multiplier") {
        if let Some(head_dim) = config.get("head_dim").and_then(serde_json::Value::as_f64) {
            config.insert("attention_multiplier".into(), json!(head_dim.powf(-0.5)));
        }
    }
    Ok(())
}

/// The base of StableLM's rotary embedding, which the converter does not write: it is 10000 in all models of 4096 tokens,
/// and another one in some of 16384.
fn base_of_stablelm(source: &Source) -> Result<()> {
    const LARGEST: u32 = 4096;
    let is_short = source.size("context_length")?.is_none_or(|context| context <= LARGEST);
    match source.number("rope.freq_base")? {
        None if !is_short => Err(source.missing("rope.freq_base", "in a model of more than 4096 tokens")),
        _ => Ok(()),
    }
}
