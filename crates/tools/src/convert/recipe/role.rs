//! What a tensor is for, told by its name and shape.

use candle_quant::{Error, Result};
use serde::Serialize;
use std::fmt;
use std::str::FromStr;

/// What a tensor is for. A tensor may have more than one role: the value projection is `v` and `attn`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Role {
    /// The token embedding.
    Embed,
    /// The output head; the embedding too, if it is the head as well.
    LmHead,
    /// What chooses experts.
    Router,
    /// A projection of experts.
    Experts,
    /// A value projection.
    V,
    /// The projection out of a feed-forward block or expert.
    Down,
    /// A projection of an attention block.
    Attn,
    /// A projection of a feed-forward block.
    Mlp,
    /// A part of the vision encoder or of its projector.
    Vision,
    /// A part of the audio encoder or of its projector.
    Audio,
    /// A normalization.
    Norm,
    /// A convolution or another tensor of more than three dimensions.
    Conv,
    /// Anything of fewer than two dimensions, and the biases of experts.
    Vector,
    /// None of these.
    Other,
}

impl Role {
    /// All roles.
    pub const ALL: [Self; 14] = [
        Self::Embed,
        Self::LmHead,
        Self::Router,
        Self::Experts,
        Self::V,
        Self::Down,
        Self::Attn,
        Self::Mlp,
        Self::Vision,
        Self::Audio,
        Self::Norm,
        Self::Conv,
        Self::Vector,
        Self::Other,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Embed => "embed",
            Self::LmHead => "lm-head",
            Self::Router => "router",
            Self::Experts => "experts",
            Self::V => "v",
            Self::Down => "down",
            Self::Attn => "attn",
            Self::Mlp => "mlp",
            Self::Vision => "vision",
            Self::Audio => "audio",
            Self::Norm => "norm",
            Self::Conv => "conv",
            Self::Vector => "vector",
            Self::Other => "other",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Role {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|role| role.name() == text).ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|role| role.name()).collect();
            Error::mismatch("role", format!("one of {}", names.join(", ")), format!("`{text}`"))
        })
    }
}

/// The roles of a tensor, the one it is told by first. `tied` says that the embedding is the head too.
pub(in crate::convert) fn roles(name: &str, dims: &[usize], tied: bool) -> Vec<Role> {
    let module = name.strip_suffix(".weight").unwrap_or(name);
    let last = module.rsplit('.').next().unwrap_or_default();
    let any =
        |words: &[&str]| module.split('.').any(|segment| words.iter().any(|word| segment.contains(word)));
    let is = |words: &[&str]| words.contains(&last);
    let of_experts = module.split('.').any(|segment| matches!(segment, "experts" | "switch_mlp"));
    let block = || match (of_experts, any(&["attn", "attention"])) {
        (true, _) => Role::Experts,
        (_, true) => Role::Attn,
        _ if any(&["mlp", "ffn", "feed_forward", "moe", "shared_expert"]) => Role::Mlp,
        _ => Role::Other,
    };
    if any(&["vision", "visual", "multi_modal_projector", "mm_projector", "image_newline"]) {
        return vec![Role::Vision];
    }
    if any(&["audio"]) {
        return vec![Role::Audio];
    }
    match dims {
        [] | [_] => return vec![Role::Vector],
        _ if last.ends_with("bias") || name.ends_with(".bias") => return vec![Role::Vector],
        [_, _] => {}
        // What is none may be experts, under names that nothing here knows.
        [_, _, _] if !any(&["conv"]) => {}
        _ => return vec![Role::Conv],
    }
    if last.ends_with("norm") || last.starts_with("norm") || last.starts_with("ln_") {
        vec![Role::Norm]
    } else if is(&["embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in"]) {
        if tied {
            vec![Role::Embed, Role::LmHead]
        } else {
            vec![Role::Embed]
        }
    } else if is(&["lm_head", "embed_out"]) || module == "output" {
        vec![Role::LmHead]
    } else if !of_experts && (is(&["gate", "shared_expert_gate"]) || any(&["router"])) {
        vec![Role::Router]
    } else if is(&["v_proj", "v_a_proj", "v_b_proj"]) {
        vec![Role::V, block()]
    } else if is(&["down_proj", "w2", "down"]) {
        vec![Role::Down, block()]
    } else {
        vec![block()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_follow_names_and_shapes() {
        let matrix = &[8, 8][..];
        let cases: [(&str, &[usize], &[Role]); 19] = [
            ("model.embed_tokens.weight", matrix, &[Role::Embed]),
            ("lm_head.weight", matrix, &[Role::LmHead]),
            ("model.layers.0.self_attn.q_proj.weight", matrix, &[Role::Attn]),
            ("model.layers.0.self_attn.v_proj.weight", matrix, &[Role::V, Role::Attn]),
            ("model.layers.0.self_attn.v_proj.bias", &[8], &[Role::Vector]),
            ("model.layers.0.mlp.down_proj.weight", matrix, &[Role::Down, Role::Mlp]),
            ("model.layers.0.mlp.gate_proj.weight", matrix, &[Role::Mlp]),
            ("model.layers.0.mlp.gate.weight", matrix, &[Role::Router]),
            ("model.layers.0.mlp.router.weight", matrix, &[Role::Router]),
            ("model.layers.0.mlp.shared_expert_gate.weight", &[1, 8], &[Role::Router]),
            ("model.layers.0.mlp.experts.3.down_proj.weight", matrix, &[Role::Down, Role::Experts]),
            ("model.layers.0.mlp.switch_mlp.up_proj.weight", &[4, 8, 8], &[Role::Experts]),
            ("model.layers.0.conv1d.weight", &[8, 1, 4], &[Role::Conv]),
            ("model.layers.0.moe.input_linear.weight", &[4, 8, 8], &[Role::Mlp]),
            ("model.layers.0.self_attn.embed_q.weight", &[4, 8, 8], &[Role::Attn]),
            ("model.layers.0.mlp.experts.gate_proj.bias", matrix, &[Role::Vector]),
            ("model.visual.blocks.0.attn.qkv.weight", matrix, &[Role::Vision]),
            ("model.layers.0.input_layernorm.weight", &[8], &[Role::Vector]),
            ("model.layers.0.mamba.in_proj.weight", matrix, &[Role::Other]),
        ];
        for (name, dims, expected) in cases {
            assert_eq!(roles(name, dims, false), expected, "{name}");
        }
        assert_eq!(roles("model.embed_tokens.weight", matrix, true), [Role::Embed, Role::LmHead]);
    }

    #[test]
    fn every_role_has_its_name() {
        for role in Role::ALL {
            assert_eq!(role.to_string().parse::<Role>().unwrap(), role);
            assert_eq!(serde_json::to_value(role).unwrap(), role.to_string());
        }
        let error = "heads".parse::<Role>().unwrap_err().to_string();
        assert!(error.contains("lm-head") && error.contains("`heads`"), "{error}");
    }
}
