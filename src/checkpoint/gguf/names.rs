//! The names of tensors in GGUF files, and what models call them.

/// What a tensor of a file is in a checkpoint.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Name {
    /// A tensor of this name.
    Tensor(String),
    /// The global scale of the weight of this module.
    GlobalScale(String),
    /// The scales of quantized activations, and factors that the config takes up.
    Unused,
}

/// The frequencies of the rotary embedding by which those of llama 3 are divided.
pub(super) const ROPE_FREQS: &str = "rope_freqs.weight";

/// What a tensor of a model of this type is. A name that is not known stays as it is.
pub(super) fn translate(name: &str, model_type: &str) -> Name {
    if name == ROPE_FREQS {
        return Name::Unused;
    }
    let stays = || Name::Tensor(name.to_owned());
    let (path, suffix) = match name.rsplit_once('.') {
        Some((path, suffix @ ("weight" | "bias" | "scale" | "input_scale"))) => (path, suffix),
        _ => (name, ""),
    };
    let Some(module) = module(path, model_type) else {
        return stays();
    };
    match suffix {
        "scale" => Name::GlobalScale(module),
        "input_scale" => Name::Unused,
        // A parameter of its own, not one of a module.
        _ if module.ends_with(".sinks") => Name::Tensor(module),
        "" => stays(),
        _ => Name::Tensor(format!("{module}.{suffix}")),
    }
}

fn module(path: &str, model_type: &str) -> Option<String> {
    match path {
        "token_embd" => return Some("model.embed_tokens".to_owned()),
        "output_norm" => return Some("model.norm".to_owned()),
        "output" => return Some("lm_head".to_owned()),
        _ => {}
    }
    let (layer, part) = path.strip_prefix("blk.")?.split_once('.')?;
    if layer.is_empty() || !layer.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let part = match part {
        "attn_norm" => "input_layernorm",
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_output" | "attn_out" => "self_attn.o_proj",
        "attn_q_norm" => "self_attn.q_norm",
        "attn_k_norm" => "self_attn.k_norm",
        "attn_sinks" => "self_attn.sinks",
        "ffn_norm" => "post_attention_layernorm",
        "post_attention_norm" if model_type == "gpt_oss" => "post_attention_layernorm",
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        other => return of_experts(layer, other, model_type),
    };
    Some(format!("model.layers.{layer}.{part}"))
}

fn of_experts(layer: &str, part: &str, model_type: &str) -> Option<String> {
    let part = match part {
        "ffn_gate_inp" if model_type == "gpt_oss" => "router",
        "ffn_gate_inp" => "gate",
        "ffn_gate_exps" => "experts.gate_proj",
        "ffn_up_exps" => "experts.up_proj",
        "ffn_down_exps" => "experts.down_proj",
        "ffn_gate_up_exps" => "experts.gate_up_proj",
        _ => return None,
    };
    let block = if model_type == "mixtral" { "block_sparse_moe" } else { "mlp" };
    Some(format!("model.layers.{layer}.{block}.{part}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_models_ask_for() {
        for (gguf, name) in [
            ("token_embd.weight", "model.embed_tokens.weight"),
            ("output_norm.weight", "model.norm.weight"),
            ("output.weight", "lm_head.weight"),
            ("blk.0.attn_norm.weight", "model.layers.0.input_layernorm.weight"),
            ("blk.17.attn_q.bias", "model.layers.17.self_attn.q_proj.bias"),
            ("blk.1.attn_k_norm.weight", "model.layers.1.self_attn.k_norm.weight"),
            ("blk.1.attn_output.weight", "model.layers.1.self_attn.o_proj.weight"),
            ("blk.1.ffn_norm.weight", "model.layers.1.post_attention_layernorm.weight"),
            ("blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight"),
            ("blk.1.ffn_gate_inp.weight", "model.layers.1.mlp.gate.weight"),
            ("blk.1.ffn_up_exps.weight", "model.layers.1.mlp.experts.up_proj.weight"),
            ("blk.1.attn_sinks.weight", "model.layers.1.self_attn.sinks"),
            ("blk.1.attn_sinks", "model.layers.1.self_attn.sinks"),
            ("blk.1.other.weight", "blk.1.other.weight"),
            ("blk.x.attn_q.weight", "blk.x.attn_q.weight"),
            ("blk.attn_q.weight", "blk.attn_q.weight"),
            ("output", "output"),
            ("", ""),
        ] {
            assert_eq!(translate(gguf, "qwen3_moe"), Name::Tensor(name.to_owned()), "{gguf}");
        }
        let router = Name::Tensor("model.layers.1.mlp.router.bias".to_owned());
        assert_eq!(translate("blk.1.ffn_gate_inp.bias", "gpt_oss"), router);
        for (gguf, name) in [("gate_inp", "gate"), ("down_exps", "experts.down_proj")] {
            let name = Name::Tensor(format!("model.layers.3.block_sparse_moe.{name}.weight"));
            assert_eq!(translate(&format!("blk.3.ffn_{gguf}.weight"), "mixtral"), name);
        }
    }

    #[test]
    fn scales_belong_to_their_modules() {
        let scale = Name::GlobalScale("model.layers.2.mlp.experts.down_proj".to_owned());
        assert_eq!(translate("blk.2.ffn_down_exps.scale", "llama"), scale);
        assert_eq!(translate("output.scale", "llama"), Name::GlobalScale("lm_head".to_owned()));
        assert_eq!(translate("blk.2.ffn_down.input_scale", "llama"), Name::Unused);
        assert_eq!(translate(ROPE_FREQS, "llama"), Name::Unused);
    }
}
