//! How long the rows of a weight usually are, by its name and the model's config.

use serde_json::Value;

/// K of the weight of `module`. Architectures differ, so this is evidence, not knowledge: only the model
/// itself knows.
pub(super) fn usual_in_features(config: &Value, module: &str) -> Option<usize> {
    if ["vision", "visual", "audio"].iter().any(|tower| module.contains(tower)) {
        return None;
    }
    let text = config.get("text_config").filter(|text| text.is_object()).unwrap_or(config);
    let size = |key: &str| usize::try_from(text.get(key)?.as_u64()?).ok();
    match module.rsplit('.').next()? {
        "embed_tokens" | "lm_head" | "q_proj" | "k_proj" | "v_proj" | "gate_proj" | "up_proj"
        | "gate_up_proj" => size("hidden_size"),
        "o_proj" => {
            let heads = size("num_attention_heads")?;
            match size("head_dim") {
                Some(head_dim) => heads.checked_mul(head_dim),
                None => size("hidden_size"),
            }
        }
        "down_proj" if module.contains("shared_expert") => size("shared_expert_intermediate_size")
            .or_else(|| size("moe_intermediate_size")?.checked_mul(size("n_shared_experts").unwrap_or(1))),
        "down_proj" if [".experts", ".switch_mlp", ".moe."].iter().any(|group| module.contains(group)) => {
            size("moe_intermediate_size").or_else(|| size("intermediate_size"))
        }
        "down_proj" => size("intermediate_size"),
        _ => None,
    }
}
