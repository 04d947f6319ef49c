//! The keys of an architecture: what all have, and those of its table.

use super::text_of;
use candle_quant::checkpoint::{Checkpoint, GgufForm, GgufKind, GgufValue};
use candle_quant::Result;
use candle_quant_models::generate::SAMPLING_KEYS;
use candle_quant_models::Config;
use std::collections::BTreeMap;

/// What a number of the router's scores says that no other key does.
const SIGMOID: u32 = 2;

fn size(number: usize) -> GgufValue {
    GgufValue::U32(u32::try_from(number).unwrap_or(u32::MAX))
}

/// What a file says of the model, but for rotary embedding, windows and tokenizer.
pub(super) fn of(source: &Checkpoint, config: &Config, form: GgufForm) -> BTreeMap<String, GgufValue> {
    let name = form.architecture();
    let mut values = BTreeMap::from([
        ("general.architecture".to_owned(), GgufValue::Text(name.to_owned())),
        ("general.type".to_owned(), GgufValue::Text("model".to_owned())),
    ]);
    let mut set = |key: &str, value| values.insert(format!("{name}.{key}"), value);
    for (key, number) in [
        ("vocab_size", config.vocab_size),
        ("context_length", config.max_position_embeddings),
        ("embedding_length", config.hidden_size),
        ("block_count", config.num_hidden_layers),
        ("feed_forward_length", config.intermediate_size),
        ("attention.head_count", config.num_attention_heads),
        ("attention.head_count_kv", config.num_key_value_heads),
        ("attention.key_length", config.head_dim),
        ("attention.value_length", config.head_dim),
        ("rope.dimension_count", config.rope.rotary_dim),
    ] {
        set(key, size(number));
    }
    set("rope.freq_base", GgufValue::F32(config.rope.theta as f32));
    let text = text_of(source);
    for key in form.keys() {
        let number = field(key.field, config).or_else(|| {
            let stated = text.get(key.field)?;
            stated.as_f64().or_else(|| stated.as_bool().map(|is| f64::from(u8::from(is))))
        });
        let Some(number) = number else { continue };
        set(
            key.key,
            match key.kind {
                GgufKind::Size => size(number as usize),
                GgufKind::Flag => GgufValue::Bool(number != 0.),
                GgufKind::Number | _ => GgufValue::F32(number as f32),
            },
        );
    }
    if let Some(moe) = &config.moe {
        set("expert_count", size(moe.experts));
        set("expert_used_count", size(moe.top_k));
        set("expert_feed_forward_length", size(moe.intermediate_size));
    }
    // How queries grow with their positions, and what makes up for YaRN's growth.
    let parameters = text.get("rope_parameters");
    for (key, field) in [
        ("attention.temperature_scale", "llama_4_scaling_beta"),
        ("rope.scaling.yarn_log_multiplier", "mscale_all_dim"),
    ] {
        if let Some(number) = parameters.and_then(|parameters| parameters.get(field)?.as_f64()) {
            set(key, GgufValue::F32(number as f32));
        }
    }
    if form.scores() == Some(SIGMOID) {
        set("expert_gating_func", GgufValue::U32(SIGMOID));
    }
    values
}

/// How text is sampled, as `generation_config.json` says.
pub(super) fn sampling(source: &Checkpoint) -> Result<Vec<(String, GgufValue)>> {
    let stated = source.read_json("generation_config.json")?.unwrap_or_default();
    let value = |name: &str| {
        let number = stated.get(name).filter(|_| stated["do_sample"] != false)?.as_f64()?;
        Some(if name == "top_k" { size(number as usize) } else { GgufValue::F32(number as f32) })
    };
    let values = SAMPLING_KEYS.iter().filter_map(|(key, name)| Some(((*key).to_owned(), value(name)?)));
    Ok(values.collect())
}

/// What a config says, where one does that was read with all that its family leaves out.
fn field(field: &str, config: &Config) -> Option<f64> {
    let (moe, size) = (config.moe.as_ref(), |size: usize| size as f64);
    match field {
        "rms_norm_eps" | "layer_norm_eps" | "norm_epsilon" | "norm_eps" => Some(config.norm_eps),
        "rope_theta" => Some(config.rope.theta),
        "rope_local_base_freq" => config.local_rope.as_ref().map(|rope| rope.theta),
        "attn_logit_softcapping" => config.attention_softcap,
        "final_logit_softcapping" => config.logit_softcap,
        "sliding_window" => config.sliding_window.map(size),
        "num_experts" | "num_local_experts" | "n_routed_experts" | "moe_num_experts" => {
            moe.map(|moe| size(moe.experts))
        }
        "num_experts_per_tok" | "moe_k" => moe.map(|moe| size(moe.top_k)),
        "moe_intermediate_size" => moe.map(|moe| size(moe.intermediate_size)),
        "shared_expert_intermediate_size" => moe?.shared.map(|shared| size(shared.intermediate_size)),
        _ => None,
    }
}

/// What may be said of windows, of which the first is taken that a reader takes for what it is: architectures have patterns of
/// their own, or one number, or a yes or no for each layer.
pub(super) fn windows(config: &Config, form: GgufForm) -> Vec<Vec<(String, GgufValue)>> {
    const PATTERN: &str = "attention.sliding_window_pattern";
    let name = form.architecture();
    let window = config.sliding_window.map_or(0, |window| window);
    let window = (format!("{name}.attention.sliding_window"), size(window));
    let mut attempts = Vec::new();
    if config.sliding_window.is_none() {
        // Some architectures ask for a zero.
        attempts.push(Vec::new());
    }
    attempts.push(vec![window.clone()]);
    let last = config.sliding_layers.iter().position(|slides| !slides).map(|last| last + 1);
    let patterns = [last.map(size), Some(GgufValue::flags(&config.sliding_layers))];
    let with = |pattern| vec![window.clone(), (format!("{name}.{PATTERN}"), pattern)];
    attempts.extend(patterns.into_iter().flatten().map(with));
    attempts
}
