//! Fields of configs under the names that models are published with. transformers 5 writes others, which mlx-lm 0.32.2 does
//! not read, or not of all families: it fails or, worse, takes its defaults.

use serde_json::{json, Map, Value};

/// What a config of transformers 5 says under other names: the fields that it lacks.
pub fn published_fields(config: &Value) -> Map<String, Value> {
    let mut fields = Map::new();
    let stated = |key: &str| config.get(key).filter(|value| !value.is_null());
    let mut add = |key: &str, value: Option<&Value>| {
        if let (None, Some(value)) = (stated(key), value.filter(|value| !value.is_null())) {
            fields.insert(key.to_owned(), value.clone());
        }
    };
    let model_type = stated("model_type").and_then(Value::as_str).unwrap_or_default();
    if model_type.starts_with("qwen") {
        add("num_experts", stated("num_local_experts"));
    }
    // What files of other containers leave out means the same in transformers. mlx-lm demands it, or takes another default.
    let defaults = match model_type {
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
        "qwen3_next" => add("full_attention_interval", pattern.as_ref()),
        _ => {}
    }
    if !fields.contains_key("rope_scaling") && stated("rope_scaling").is_none() {
        // Some of mlx-lm's models demand it, be it null.
        fields.insert("rope_scaling".to_owned(), scaling(rope, kind));
    }
    fields
}

/// The scaling among the parameters of a rope: null if there is none.
fn scaling(rope: &Map<String, Value>, kind: Option<&Value>) -> Value {
    let Some(kind) = kind.filter(|kind| kind.as_str() != Some("default")) else { return Value::Null };
    let beside = ["rope_theta", "partial_rotary_factor"];
    let mut scaling: Map<_, _> = rope
        .iter()
        .filter(|(key, _)| !beside.contains(&key.as_str()))
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect();
    // Both names are read, each by some.
    for key in ["rope_type", "type"] {
        scaling.entry(key).or_insert_with(|| kind.clone());
    }
    scaling.into()
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
