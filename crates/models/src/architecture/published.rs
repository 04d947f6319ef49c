//! Fields of configs under the names that models are published with. transformers 5 writes others, which mlx-lm 0.32.2 does
//! not read, or not of all families: it fails or, worse, takes its defaults.

use crate::Config;
use serde_json::{json, Map, Value};

/// What a config of transformers 5 says under other names: the fields that it lacks.
pub fn published_fields(config: &Value) -> Map<String, Value> {
    let mut fields = other_names(config);
    // What is null already stays so.
    fields.retain(|key, value| config.get(key) != Some(value));
    fields
}

fn other_names(config: &Value) -> Map<String, Value> {
    let stated = |key: &str| config.get(key).filter(|value| !value.is_null());
    let model_type = stated("model_type").and_then(Value::as_str).unwrap_or_default();
    let mut fields = demanded(config, model_type);
    let mut add = |key: &str, value: Option<&Value>| {
        if let (None, Some(value)) = (stated(key), value.filter(|value| !value.is_null())) {
            fields.insert(key.to_owned(), value.clone());
        }
    };
    if model_type.starts_with("qwen") {
        add("num_experts", stated("num_local_experts"));
    }
    // What files of other containers leave out means the same in transformers. mlx-lm demands it, or takes another default.
    let defaults = match model_type {
        "llama4_text" => json!({"attention_bias": false, "attention_chunk_size": 8192}),
        "nemotron" => json!({"hidden_act": "relu2"}),
        "qwen3_moe" => json!({"decoder_sparse_step": 1, "mlp_only_layers": []}),
        "qwen3_next" => json!({"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": true}),
        _ => Value::Null,
    };
    for (key, value) in defaults.as_object().into_iter().flatten() {
        add(key, Some(value));
    }
    // The only family of which mlx-lm reads nothing but these.
    if model_type.starts_with("qwen3_5") && stated("rope_parameters").is_none() {
        if let Some(theta) = stated("rope_theta") {
            let share = stated("partial_rotary_factor").cloned().unwrap_or_else(|| 0.25.into());
            let rope = json!({"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": share});
            add("rope_parameters", Some(&rope));
        }
    }
    let Some(Value::Object(parameters)) = stated("rope_parameters") else { return fields };
    // Of families whose layers differ, those of full attention; each layer that slides has the plain rope.
    let (rope, sliding) = match parameters.get("full_attention") {
        Some(Value::Object(full)) => (full, parameters.get("sliding_attention")),
        _ => (parameters, None),
    };
    add("rope_theta", rope.get("rope_theta"));
    add("partial_rotary_factor", rope.get("partial_rotary_factor"));
    let kind = rope.get("rope_type").or_else(|| rope.get("type"));
    if model_type.starts_with("gemma3") {
        add("rope_local_base_freq", sliding.and_then(|sliding| sliding.get("rope_theta")));
    }
    if kind.and_then(Value::as_str) == Some("longrope") {
        add("original_max_position_embeddings", rope.get("original_max_position_embeddings"));
    }
    let pattern = stated("layer_types").and_then(pattern);
    match model_type {
        "cohere2" | "gemma3_text" => add("sliding_window_pattern", pattern.as_ref()),
        "qwen3_next" | "qwen3_5_text" | "qwen3_5_moe_text" => {
            add("full_attention_interval", pattern.as_ref())
        }
        _ => {}
    }
    if stated("rope_scaling").is_none() {
        fields.insert("rope_scaling".to_owned(), scaling(rope, kind));
    }
    fields
}

/// What mlx-lm does not do without, be it null.
fn demanded(config: &Value, model_type: &str) -> Map<String, Value> {
    let mut fields = Map::new();
    let mut add = |key: &str, value: Value| drop(fields.insert(key.to_owned(), value));
    let scaling = config.get("rope_scaling");
    let has_no_parameters = || config.get("rope_parameters").is_none_or(Value::is_null);
    match scaling {
        None | Some(Value::Null) if model_type == "gpt_oss" && has_no_parameters() => {
            add(
                "rope_scaling",
                json!({"rope_type": "yarn", "type": "yarn", "factor": 32.0, "beta_fast": 32.0,
                "beta_slow": 1.0, "truncate": false, "original_max_position_embeddings": 4096}),
            );
        }
        None if NULL_SCALING.contains(&model_type) => add("rope_scaling", Value::Null),
        Some(Value::Object(scaling)) if model_type == "phi3" && !scaling.contains_key("type") => {
            add("rope_scaling", with_both_kinds(scaling.clone()).into());
        }
        _ => {}
    }
    let has_letters = || config.get("sliding_window_pattern").is_some_and(Value::is_string);
    if let ("exaone4", false, Ok(config)) = (model_type, has_letters(), Config::from_json(config)) {
        add("sliding_window_pattern", letters(&config).into());
    }
    fields
}

/// Families whose models in mlx-lm are not read without a scaling.
const NULL_SCALING: [&str; 3] = ["exaone4", "glm4_moe", "llama4_text"];

/// What the kind of a scaling is called, in newer configs and in older ones.
const KINDS: [&str; 2] = ["rope_type", "type"];

fn with_both_kinds(mut scaling: Map<String, Value>) -> Map<String, Value> {
    if let Some(kind) = KINDS.iter().find_map(|key| scaling.get(*key)).cloned() {
        for key in KINDS {
            scaling.entry(key).or_insert_with(|| kind.clone());
        }
    }
    scaling
}

/// For each layer `L` if it slides and `G` if not, as far as they do not repeat; nothing for a model without windows.
fn letters(config: &Config) -> Option<String> {
    config.sliding_window?;
    let layers = &config.sliding_layers;
    let repeats = |period: usize| layers.iter().zip(layers.iter().skip(period)).all(|(a, b)| a == b);
    let period = (1..layers.len()).find(|period| repeats(*period)).unwrap_or(layers.len());
    Some(layers.iter().take(period).map(|slides| if *slides { 'L' } else { 'G' }).collect())
}

/// The scaling among the parameters of a rope: null if there is none.
fn scaling(rope: &Map<String, Value>, kind: Option<&Value>) -> Value {
    if kind.is_none_or(|kind| kind.as_str() == Some("default")) {
        return Value::Null;
    }
    let beside = ["rope_theta", "partial_rotary_factor"];
    let fields = rope.iter().filter(|(key, _)| !beside.contains(&key.as_str()));
    with_both_kinds(fields.map(|(key, value)| (key.clone(), value.clone())).collect()).into()
}

/// How many layers each one with full attention ends, if all do alike.
fn pattern(layer_types: &Value) -> Option<Value> {
    let full: Vec<bool> =
        layer_types.as_array()?.iter().map(|kind| kind.as_str() == Some("full_attention")).collect();
    let pattern = full.iter().position(|full| *full)? + 1;
    let is_regular =
        full.iter().enumerate().all(|(layer, full)| (layer + 1).is_multiple_of(pattern) == *full);
    is_regular.then(|| pattern.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(config: &Value) -> Value {
        published_fields(config).into()
    }

    #[test]
    fn what_is_published_already_stays() {
        assert_eq!(of(&json!({"model_type": "llama", "rope_theta": 1e4})), json!({}));
        let both = json!({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}});
        assert_eq!(of(&both), json!({}));
        let null = json!({"rope_theta": 1e4, "rope_scaling": null,
            "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}});
        assert_eq!(of(&null), json!({}));
    }

    #[test]
    fn experts_are_counted_under_the_name_of_the_family() {
        assert_eq!(
            of(&json!({"model_type": "qwen3_moe", "num_local_experts": 8})),
            json!({"num_experts": 8, "decoder_sparse_step": 1, "mlp_only_layers": []})
        );
        let stated = json!({"model_type": "qwen3_next", "decoder_sparse_step": 2, "mlp_only_layers": [1]});
        assert_eq!(of(&stated), json!({"norm_topk_prob": true}));
        assert_eq!(of(&json!({"model_type": "nemotron"})), json!({"hidden_act": "relu2"}));
        let linear = json!({"model_type": "qwen3_5_text", "rope_theta": 1e7, "partial_rotary_factor": 0.5});
        let rope = json!({"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5});
        assert_eq!(of(&linear), json!({"rope_parameters": rope}));
        assert_eq!(of(&json!({"model_type": "mixtral", "num_local_experts": 8})), json!({}));
    }

    /// As LGAI-EXAONE/EXAONE-4.0-32B and microsoft/Phi-3.5-mini-instruct say it.
    #[test]
    fn what_mlx_lm_demands_is_stated() {
        let sizes = json!({"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 8,
            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64});
        let with = |fields: Value| {
            let mut config = sizes.clone();
            config.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            of(&config)
        };
        let windows = with(json!({"model_type": "exaone4", "rope_theta": 1e6, "sliding_window": 6}));
        assert_eq!(windows, json!({"sliding_window_pattern": "LLLG", "rope_scaling": null}));
        let none = with(
            json!({"model_type": "exaone4", "rope_theta": 1e6, "rope_scaling": null, "sliding_window": null}),
        );
        assert_eq!(none, json!({"sliding_window_pattern": null}));
        let stated = json!({"model_type": "exaone4", "rope_scaling": null, "sliding_window_pattern": "LG"});
        assert_eq!(of(&stated), json!({}));
        let scaling = json!({"rope_type": "longrope", "long_factor": [1.0]});
        let both = json!({"rope_type": "longrope", "long_factor": [1.0], "type": "longrope"});
        assert_eq!(
            of(&json!({"model_type": "phi3", "rope_scaling": scaling})),
            json!({"rope_scaling": both})
        );
        assert_eq!(of(&json!({"model_type": "phi3", "rope_scaling": both})), json!({}));
        let llama = of(&json!({"model_type": "llama4_text", "attention_bias": true}));
        assert_eq!(llama, json!({"attention_chunk_size": 8192, "rope_scaling": null}));
    }

    #[test]
    fn parameters_of_a_rope_stand_beside_it() {
        let plain = json!({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 0.5}});
        assert_eq!(
            of(&plain),
            json!({"rope_theta": 1e6, "partial_rotary_factor": 0.5, "rope_scaling": null})
        );
        let yarn = json!({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0}});
        let scaling = json!({"rope_type": "yarn", "type": "yarn", "factor": 4.0});
        assert_eq!(of(&yarn), json!({"rope_theta": 1e6, "rope_scaling": scaling}));
    }

    #[test]
    fn layers_that_differ_have_fields_of_their_own() {
        let gemma = json!({"model_type": "gemma3_text",
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {"full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}}});
        let scaling = json!({"rope_type": "linear", "type": "linear", "factor": 8.0});
        let expected = json!({"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": scaling, "sliding_window_pattern": 2});
        assert_eq!(of(&gemma), expected);
        let irregular = json!(["full_attention", "sliding_attention"]);
        assert_eq!(pattern(&irregular), None);
    }
}
