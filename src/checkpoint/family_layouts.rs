//! In which order families of models keep what one tensor holds together: all that readers know of families by name.
//!
//! A checkpoint is opened before there is a model, and layers of one's own are loaded without one. What the table of
//! architectures of candle-quant-models says of this, it takes from here.

use serde_json::Value;

/// How a tensor has the gate and up projections of all experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FusedExperts {
    /// `[E, 2 inner, hidden]`: gates, then ups. Down projections are `[E, hidden, inner]`.
    Rows,
    /// `[E, hidden, 2 inner]`: the same in columns. Down projections are `[E, inner, hidden]`.
    Columns,
    /// As columns, gates and ups alternating. Where a tool has rows for these columns, they alternate as well.
    AlternatingColumns,
}

/// The families that have no rows one after another: their models multiply from the other side (modeling_llama4.py and
/// modeling_gpt_oss.py of transformers).
const EXPERTS: [(&str, FusedExperts); 3] = [
    ("gpt_oss", FusedExperts::AlternatingColumns),
    ("llama4", FusedExperts::Columns),
    ("llama4_text", FusedExperts::Columns),
];

/// Beginnings of the names of families whose fused queries, keys and values are not one part after another: Hunyuan has
/// those of one key-value head after another (mlx_lm/models/hunyuan.py), CodeGen those of one of four parts
/// (modeling_codegen.py of transformers).
const HEADS_IN_TURN: [&str; 2] = ["codegen", "hunyuan"];

impl FusedExperts {
    /// That of the model of a `config.json`, or of its text; `None` if nothing else than rows is known of it.
    pub fn of(config: &Value) -> Option<Self> {
        let found = |name| EXPERTS.iter().find(|(known, _)| *known == name).map(|(_, experts)| *experts);
        model_types(config).find_map(found)
    }

    /// Whether what are rows of other families are columns.
    pub fn has_columns(self) -> bool {
        matches!(self, Self::Columns | Self::AlternatingColumns)
    }

    /// Whether gates and ups are in turn.
    pub fn alternates(self) -> bool {
        self == Self::AlternatingColumns
    }
}

/// The model of a `config.json`, if queries, keys and values in one tensor are not one part after another.
pub(super) fn with_heads_in_turn(config: &Value) -> Option<&str> {
    model_types(config).find(|name| HEADS_IN_TURN.iter().any(|start| name.starts_with(start)))
}

/// Whether a tensor is the weight of a norm that multiplies by one more than it says, of a family that has such norms: those
/// around blocks, of queries and keys and the last one, but not the one inside of linear attention.
///
/// Published checkpoints have the weights. mlx-lm and llama.cpp's converter have the sums of some families, and all readers
/// and writers of these ask here which tensors they are.
pub fn is_one_plus_norm(tensor: &str) -> bool {
    let Some((path, norm)) = tensor.strip_suffix(".weight").and_then(|module| module.rsplit_once('.')) else {
        return false;
    };
    norm.ends_with("_layernorm")
        || matches!(norm, "q_norm" | "k_norm")
        || norm == "norm" && path.ends_with("model")
}

/// What a config calls its text, and the model.
fn model_types(config: &Value) -> impl Iterator<Item = &str> {
    let text = config.get("text_config").and_then(|text| text.get("model_type"));
    [text, config.get("model_type")].into_iter().flatten().filter_map(Value::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_model_is_told_by_its_name_or_that_of_its_text() {
        let of = |config: Value| FusedExperts::of(&config);
        assert_eq!(of(json!({"model_type": "gpt_oss"})), Some(FusedExperts::AlternatingColumns));
        let nested = json!({"model_type": "other", "text_config": {"model_type": "llama4_text"}});
        assert_eq!(of(nested), Some(FusedExperts::Columns));
        assert_eq!(of(json!({"model_type": "llama4", "text_config": 1})), Some(FusedExperts::Columns));
        for config in [json!({"model_type": "llama"}), json!({"model_type": 4}), json!({}), Value::Null] {
            assert_eq!(of(config), None);
        }
        let in_turn = json!({"model_type": "hunyuan_v1_dense"});
        assert_eq!(with_heads_in_turn(&in_turn), Some("hunyuan_v1_dense"));
        assert_eq!(with_heads_in_turn(&json!({"model_type": "llama"})), None);
    }

    #[test]
    fn norms_that_multiply_by_one_more() {
        for name in [
            "model.norm",
            "language_model.model.norm",
            "model.language_model.norm",
            "model.layers.0.input_layernorm",
            "model.layers.0.post_attention_layernorm",
            "model.layers.0.pre_feedforward_layernorm",
            "model.layers.0.self_attn.q_norm",
            "model.layers.0.self_attn.k_norm",
        ] {
            assert!(is_one_plus_norm(&format!("{name}.weight")), "{name}");
            assert!(!is_one_plus_norm(&format!("{name}.bias")), "{name}");
        }
        let others =
            ["model.layers.0.linear_attn.norm", "visual.merger.norm", "model.layers.0.mlp.gate", "norm"];
        for name in others {
            assert!(!is_one_plus_norm(&format!("{name}.weight")), "{name}");
        }
    }
}
