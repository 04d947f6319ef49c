//! How mlx-lm 0.32.2 keeps the families that it does not keep like all others: which modules it quantizes in another way,
//! what experts are called, and what it leaves out.
//!
//! It is told for families too that nothing else here knows, since checkpoints of them are converted as well.

use super::find;
use candle_quant::checkpoint::FusedExperts;
use serde_json::Value;

/// How mlx-lm keeps a family of models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MlxLm {
    /// What configs call the family, or the text part of its models.
    model_types: &'static [&'static str],
    /// Modules that get 8 bits in groups of 64, whatever the others get, by the ends of their paths.
    eight_bits: &'static [&'static str],
    /// Modules that are not quantized, by the ends of their paths.
    dense: &'static [&'static str],
    /// The module of experts within their block.
    pub stack: &'static str,
    /// How tensors have gate and up projections of all experts together, where a checkpoint has such; `None` of families that
    /// nothing is known of.
    pub fused: Option<FusedExperts>,
    /// Whether it is one of our own families, or of such parts.
    is_known: bool,
    /// What mlx-lm calls the model of which the config's text is a part, where it has no model of that text alone.
    pub larger: Option<&'static str>,
    /// Whether `kv_b_proj` is two stacks, `embed_q` and `unembed_out`.
    pub splits_latents: bool,
    /// Whether queries, keys and values are one projection, `qkv_proj`.
    pub fuses_qkv: bool,
    /// Whether the norms of queries and keys are a module for each head, where each has its own.
    pub norms_of_heads: bool,
    /// Whether norms are stored as what they multiply by, one more than the weights of others.
    pub adds_to_norms: bool,
}

/// What mlx-lm makes of the weight of a module when it quantizes a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MlxWeight {
    /// What is asked for.
    AsAsked,
    /// Affine, 8 bits in groups of 64.
    EightBits,
    /// Numbers.
    Dense,
}

/// A family that is like all others.
const USUAL: MlxLm = MlxLm {
    model_types: &[],
    eight_bits: &[],
    dense: &[],
    stack: "switch_mlp",
    fused: None,
    is_known: false,
    larger: None,
    splits_latents: false,
    fuses_qkv: false,
    norms_of_heads: false,
    adds_to_norms: false,
};

/// One of our own families that is.
const KNOWN: MlxLm = MlxLm { is_known: true, ..USUAL };

/// The families that are not, by mlx-lm's classes.
const FAMILIES: &[MlxLm] = &[
    // What chooses experts is a parameter of a block and no layer.
    MlxLm {
        model_types: &["deepseek", "deepseek_v2", "dots1", "exaone_moe", "glm4_moe"],
        dense: &["mlp.gate"],
        ..KNOWN
    },
    MlxLm {
        model_types: &["deepseek_v3", "deepseek_v32", "glm4_moe_lite", "joyai_llm_flash", "kimi_k2"],
        dense: &["mlp.gate"],
        splits_latents: true,
        ..KNOWN
    },
    MlxLm { model_types: &["gpt_oss"], eight_bits: &["router"], stack: "experts", ..KNOWN },
    MlxLm {
        model_types: &["granite"],
        eight_bits: &["self_attn.o_proj", "mlp.down_proj", "lm_head"],
        ..KNOWN
    },
    MlxLm {
        model_types: &["granitemoe"],
        eight_bits: &["block_sparse_moe.router.layer", "self_attn.o_proj", "mlp.down_proj", "lm_head"],
        ..KNOWN
    },
    MlxLm { model_types: &["granitemoehybrid"], eight_bits: &["router.layer"], dense: &["conv1d"], ..KNOWN },
    MlxLm { model_types: &["llama4", "llama4_text"], stack: "experts", larger: Some("llama4"), ..KNOWN },
    MlxLm { model_types: &["phi3"], fuses_qkv: true, ..KNOWN },
    MlxLm { model_types: &["stablelm"], norms_of_heads: true, ..KNOWN },
    MlxLm { model_types: &["minimax", "minimax_m2"], eight_bits: &["block_sparse_moe.gate"], ..USUAL },
    MlxLm {
        model_types: &["Klear", "mellum", "qwen3_moe", "qwen3_vl_moe", "qwen3_vl_moe_text"],
        eight_bits: &["mlp.gate"],
        ..KNOWN
    },
    MlxLm {
        model_types: &["qwen3_5", "qwen3_5_text"],
        dense: &["conv1d"],
        larger: Some("qwen3_5"),
        adds_to_norms: true,
        ..KNOWN
    },
    MlxLm {
        model_types: &["qwen3_5_moe", "qwen3_5_moe_text"],
        larger: Some("qwen3_5_moe"),
        ..LINEAR_WITH_EXPERTS
    },
    MlxLm { model_types: &["qwen3_next"], ..LINEAR_WITH_EXPERTS },
];

const LINEAR_WITH_EXPERTS: MlxLm = MlxLm {
    eight_bits: &["mlp.gate", "shared_expert_gate"],
    dense: &["conv1d"],
    adds_to_norms: true,
    ..KNOWN
};

impl MlxLm {
    /// How the model of a `config.json` is kept.
    pub fn of(config: &Value) -> Self {
        let named = |config: &Value| config.get("model_type").and_then(Value::as_str).map(str::to_owned);
        let names: Vec<_> =
            [named(config), config.get("text_config").and_then(named)].into_iter().flatten().collect();
        let is_one = |family: &&Self| names.iter().any(|name| family.model_types.contains(&name.as_str()));
        let family = match FAMILIES.iter().find(is_one) {
            Some(family) => *family,
            None if names.iter().any(|name| find(name).is_some()) => KNOWN,
            None => USUAL,
        };
        let rows = family.is_known.then_some(FusedExperts::Rows);
        Self {
            fused: FusedExperts::of(config).or(rows),
            larger: family.larger.filter(|_| is_text_alone(config)),
            ..family
        }
    }

    /// Whether text is a part of mlx-lm's model, one of more parts, so that its tensors have the names that
    /// [`name_in_mlx_lm`](crate::name_in_mlx_lm) says.
    pub fn is_within_larger(&self, config: &Value) -> bool {
        self.larger.is_some() || self.is_known && config.get("text_config").is_some_and(Value::is_object)
    }

    /// What becomes of the weight of a module.
    pub fn weight(&self, module: &str) -> MlxWeight {
        let is_one = |ends: &[&str]| ends.iter().any(|end| module.ends_with(end));
        match (is_one(self.dense), is_one(self.eight_bits)) {
            (true, _) => MlxWeight::Dense,
            (_, true) => MlxWeight::EightBits,
            _ => MlxWeight::AsAsked,
        }
    }

    /// Whether a module has a matrix for each expert, or head.
    pub fn is_stack(&self, module: &str) -> bool {
        let parent = module.rsplit_once('.').map_or("", |(parent, _)| parent);
        parent.rsplit('.').next() == Some(self.stack)
            || self.splits_latents && [".embed_q", ".unembed_out"].iter().any(|end| module.ends_with(end))
    }

    /// Whether a tensor is of layers that predict further tokens, which models have beside their own and mlx-lm does not
    /// read. `layers` is how many are their own.
    pub fn leaves_out(&self, tensor: &str, layers: usize) -> bool {
        self.is_known
            && (tensor.starts_with("mtp.") || crate::layer_of(tensor).is_some_and(|layer| layer >= layers))
    }
}

/// Whether the config is of a text that mlx-lm knows in larger models only. Llama 4's without experts is a model of its own.
fn is_text_alone(config: &Value) -> bool {
    let is = |model_type: &str| config.get("model_type").and_then(Value::as_str) == Some(model_type);
    let stated = |key: &str| config.get(key).filter(|value| !value.is_null());
    let has_experts =
        match (stated("moe_layers").and_then(Value::as_array), stated("interleave_moe_layer_step")) {
            (Some(layers), _) => !layers.is_empty(),
            (None, step) => step.and_then(Value::as_u64) != Some(0),
        };
    is("qwen3_5_text") || is("qwen3_5_moe_text") || is("llama4_text") && has_experts
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_family_is_told_by_the_model_or_its_text() {
        let of = |config: Value| MlxLm::of(&config);
        assert_eq!(of(json!({"model_type": "gpt_oss"})).stack, "experts");
        let nested = json!({"model_type": "other", "text_config": {"model_type": "llama4_text"}});
        assert_eq!(of(nested).fused, Some(FusedExperts::Columns));
        let llama = of(json!({"model_type": "llama"}));
        assert_eq!(llama, MlxLm { fused: Some(FusedExperts::Rows), ..KNOWN });
        assert_eq!(of(json!({"model_type": "unheard_of"})), USUAL);
        assert_eq!(of(json!({})), USUAL);
    }

    #[test]
    fn text_is_a_part_where_mlx_lm_has_no_model_of_it_alone() {
        let of = |config: Value| (MlxLm::of(&config).larger, MlxLm::of(&config).is_within_larger(&config));
        assert_eq!(of(json!({"model_type": "qwen3_5_moe_text"})), (Some("qwen3_5_moe"), true));
        let nested = json!({"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}});
        assert_eq!(of(nested), (None, true));
        assert_eq!(of(json!({"model_type": "llama4_text"})), (Some("llama4"), true));
        assert_eq!(of(json!({"model_type": "llama4_text", "moe_layers": []})), (None, false));
        assert_eq!(of(json!({"model_type": "gemma3_text"})), (None, false));
        let unknown = json!({"model_type": "unheard_of", "text_config": {"model_type": "unheard_of_text"}});
        assert_eq!(of(unknown), (None, false));
    }

    #[test]
    fn weights_are_told_by_the_ends_of_paths() {
        let granite = MlxLm::of(&json!({"model_type": "granitemoe"}));
        let down = "model.layers.0.block_sparse_moe.switch_mlp.down_proj";
        assert_eq!(granite.weight(down), MlxWeight::EightBits);
        assert_eq!(granite.weight("model.layers.0.self_attn.q_proj"), MlxWeight::AsAsked);
        assert!(granite.is_stack(down) && !granite.is_stack("model.layers.0.mlp.down_proj"));
        let deepseek = MlxLm::of(&json!({"model_type": "deepseek_v3"}));
        assert_eq!(deepseek.weight("model.layers.3.mlp.gate"), MlxWeight::Dense);
        assert!(deepseek.is_stack("model.layers.0.self_attn.embed_q"));
        assert!(deepseek.leaves_out("model.layers.61.eh_proj.weight", 61));
        assert!(!deepseek.leaves_out("model.layers.60.mlp.gate.weight", 61));
    }

    #[test]
    fn families_are_listed_once() {
        let names: Vec<_> = FAMILIES.iter().flat_map(|family| family.model_types).collect();
        let distinct: std::collections::BTreeSet<_> = names.iter().collect();
        assert_eq!(names.len(), distinct.len());
    }
}
