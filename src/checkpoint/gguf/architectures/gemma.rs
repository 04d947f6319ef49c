//! Gemma, to the weights of whose norms the converter adds one.

use super::{number, required, Architecture, LLAMA, QKV_BIAS, RMS_NORM, RMS_NORM_EPS};
use crate::checkpoint::gguf::config::{Map, Source};
use crate::Result;
use serde_json::{json, Value};

/// Norms around both blocks.
const NORMS_AROUND: &[(&str, &str)] = &[
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

pub(super) const ARCHITECTURES: &[Architecture] = &[
    Architecture {
        name: "gemma",
        model_type: "gemma",
        keys: RMS_NORM,
        flags: &[QKV_BIAS],
        norms_are_sums: true,
        common: &[],
        ..LLAMA
    },
    Architecture {
        name: "gemma2",
        model_type: "gemma2",
        parts: NORMS_AROUND,
        keys: &[
            required(RMS_NORM_EPS),
            number("attn_logit_softcapping", "attn_logit_softcapping"),
            number("final_logit_softcapping", "final_logit_softcapping"),
        ],
        flags: &[QKV_BIAS],
        norms_are_sums: true,
        common: &[],
        others: |source, config| scores_of_gemma(source, config, 46),
        ..LLAMA
    },
    Architecture {
        name: "gemma3",
        model_type: "gemma3_text",
        parts: NORMS_AROUND,
        keys: &[
            required(RMS_NORM_EPS),
            required(number("rope.freq_base", "rope_theta")),
            number("final_logit_softcapping", "final_logit_softcapping"),
            number("rope.freq_base_swa", "rope_local_base_freq"),
        ],
        flags: &[QKV_BIAS],
        norms_are_sums: true,
        common: &[],
        others: |source, config| {
            source.refuse_keys(&["rope.global.freq_base", "rope.local.freq_base", "mm.tokens_per_image"])?;
            // Without a window there are no layers of another kind.
            if config.get("sliding_window").is_none_or(Value::is_null) {
                config.insert("layer_types".into(), source.layer_types(false)?);
            }
            scores_of_gemma(source, config, 62)
        },
        ..LLAMA
    },
];

/// By what the models of Gemma divide scores, of which files say nothing: llama.cpp tells the one that differs by its layers.
fn scores_of_gemma(source: &Source, config: &mut Map, layers_of_27b: u32) -> Result<()> {
    let (hidden, heads) = (source.size("embedding_length")?, source.heads()?);
    let scalar = match source.size("block_count")? {
        Some(layers) if layers == layers_of_27b => {
            json!(hidden.and_then(|hidden| hidden.checked_div(heads)))
        }
        _ => json!(config.get("head_dim")),
    };
    config.insert("query_pre_attn_scalar".into(), scalar);
    Ok(())
}
