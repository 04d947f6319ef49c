//! The names of tensors in GGUF files, and what models call them.

use super::architectures::{self, Architecture, LinearOrder};
use crate::{Error, Result};

/// What a tensor of a file is in a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
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
/// Those of LongRoPE, in texts beyond the context of pre-training and in others.
pub(super) const ROPE_LONG: &str = "rope_factors_long.weight";
pub(super) const ROPE_SHORT: &str = "rope_factors_short.weight";

/// What tensors of a layer are called in most architectures.
const PARTS: &[(&str, &str)] = &[
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_qkv", "self_attn.qkv_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("attn_sinks", "self_attn.sinks"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("ffn_gate_inp", "mlp.gate"),
    ("ffn_gate_exps", "mlp.experts.gate_proj"),
    ("ffn_up_exps", "mlp.experts.up_proj"),
    ("ffn_down_exps", "mlp.experts.down_proj"),
    ("ffn_gate_up_exps", "mlp.experts.gate_up_proj"),
];

/// Parameters of their own, not ones of a module.
const PARAMETERS: [&str; 4] = [".sinks", ".e_score_correction_bias", ".A_log", ".dt_bias"];

/// The shape of a tensor in models. Older converters made vectors of matrices of one row, and all leave out that
/// convolutions are of one channel each.
pub(super) fn dims_of(name: &Name, dims: Vec<usize>) -> Vec<usize> {
    let Name::Tensor(name) = name else { return dims };
    match *dims {
        [k] if name.ends_with(".shared_expert_gate.weight") => vec![1, k],
        [channels, kernel] if name.ends_with(".linear_attn.conv1d.weight") => vec![channels, 1, kernel],
        _ => dims,
    }
}

/// The two projections of which llama.cpp's converter leaves the rows in one.
pub(super) fn unfused(name: Name) -> Vec<Name> {
    const FUSED: &str = ".linear_attn.in_proj_ba";
    const PARTS: [&str; 2] = [".linear_attn.in_proj_b", ".linear_attn.in_proj_a"];
    let each =
        |name: &str, make: fn(String) -> Name| PARTS.map(|part| make(name.replace(FUSED, part))).to_vec();
    match &name {
        Name::Tensor(tensor) if tensor.ends_with(".linear_attn.in_proj_ba.weight") => {
            each(tensor, Name::Tensor)
        }
        Name::GlobalScale(module) if module.ends_with(FUSED) => each(module, Name::GlobalScale),
        Name::Tensor(_) | Name::GlobalScale(_) | Name::Unused => vec![name],
    }
}

/// What a tensor of a model is. A name that is not known stays as it is.
pub(super) fn translate(name: &str, architecture: &Architecture) -> Name {
    if [ROPE_FREQS, ROPE_LONG, ROPE_SHORT].contains(&name) {
        return Name::Unused;
    }
    let stays = || Name::Tensor(name.to_owned());
    let (path, suffix) = match name.rsplit_once('.') {
        Some((path, suffix @ ("weight" | "bias" | "scale" | "input_scale"))) => (path, suffix),
        _ => (name, ""),
    };
    let Some(module) = module(path, architecture) else {
        return stays();
    };
    match suffix {
        "scale" => Name::GlobalScale(module),
        "input_scale" => Name::Unused,
        _ if PARAMETERS.iter().any(|parameter| module.ends_with(parameter)) => Name::Tensor(module),
        "" => stays(),
        _ => Name::Tensor(format!("{module}.{suffix}")),
    }
}

/// What a model of this type calls the module of a weight of this name, if it is one of its own: what it is given lies in
/// the order that the published model has.
///
/// # Errors
/// If the names that files of such models have are not known.
pub fn module_of_gguf(model_type: &str, name: &str) -> Result<Option<String>> {
    let Some(architecture) = architectures::of_type(model_type) else {
        return Err(Error::Unsupported {
            what: format!("names of GGUF files of a model of type `{model_type}`"),
            remedy: "use a model of a type that GGUF files are read of".into(),
        });
    };
    let path = name.strip_suffix(".weight").unwrap_or(name);
    // Files have the heads of what it is given in another order.
    let is_tiled = |module: &String| {
        architecture.linear == Some(LinearOrder::Tiled) && module.ends_with(".linear_attn.out_proj")
    };
    Ok(module(path, architecture).filter(|module| !is_tiled(module)))
}

fn module(path: &str, architecture: &Architecture) -> Option<String> {
    match path {
        "token_embd" => return Some("model.embed_tokens".to_owned()),
        "output_norm" => return Some(architecture.final_norm.to_owned()),
        "output" => return Some("lm_head".to_owned()),
        _ => {}
    }
    let (layer, part) = path.strip_prefix("blk.")?.split_once('.')?;
    if layer.is_empty() || !layer.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    // Some files of early converters.
    let part = if part == "attn_out" { "attn_output" } else { part };
    let (_, name) = architecture.parts.iter().chain(PARTS).find(|(known, _)| *known == part)?;
    Some(format!("model.layers.{layer}.{name}"))
}

/// What a tensor of a model is called in files: what [`translate`] undoes. `None` if it has no such name.
pub(super) fn written(name: &str, architecture: &Architecture) -> Option<String> {
    let parameter = PARAMETERS.iter().any(|parameter| name.ends_with(parameter));
    let (module, suffix) = match parameter {
        // Biases of routers are called so, the others weights.
        true if name.ends_with(".e_score_correction_bias") => (name, "bias"),
        true => (name, "weight"),
        false => name.rsplit_once('.').filter(|(_, suffix)| matches!(*suffix, "weight" | "bias"))?,
    };
    let path = match module {
        "model.embed_tokens" => "token_embd".to_owned(),
        "lm_head" => "output".to_owned(),
        _ if module == architecture.final_norm => "output_norm".to_owned(),
        _ => {
            let (layer, part) = module.strip_prefix("model.layers.")?.split_once('.')?;
            let (known, _) = architecture.parts.iter().chain(PARTS).find(|(_, name)| *name == part)?;
            format!("blk.{layer}.{known}")
        }
    };
    Some(format!("{path}.{suffix}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_type(model_type: &str) -> &'static Architecture {
        architectures::of_type(model_type).unwrap()
    }

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
            assert_eq!(translate(gguf, of_type("qwen3_moe")), Name::Tensor(name.to_owned()), "{gguf}");
        }
        let router = Name::Tensor("model.layers.1.mlp.router.bias".to_owned());
        assert_eq!(translate("blk.1.ffn_gate_inp.bias", of_type("gpt_oss")), router);
        for (gguf, name) in [("gate_inp", "gate"), ("down_exps", "experts.down_proj")] {
            let name = Name::Tensor(format!("model.layers.3.block_sparse_moe.{name}.weight"));
            assert_eq!(translate(&format!("blk.3.ffn_{gguf}.weight"), of_type("mixtral")), name);
        }
    }

    #[test]
    fn architectures_have_names_of_their_own() {
        for (model_type, gguf, name) in [
            ("cohere", "blk.0.attn_q_norm.weight", "model.layers.0.self_attn.q_norm.weight"),
            ("deepseek_v3", "blk.3.attn_k_b.weight", "model.layers.3.self_attn.embed_q.weight"),
            ("deepseek_v3", "blk.3.attn_kv_b.weight", "model.layers.3.self_attn.kv_b_proj.weight"),
            ("deepseek_v3", "blk.3.exp_probs_b.bias", "model.layers.3.mlp.gate.e_score_correction_bias"),
            ("deepseek_v2", "blk.3.ffn_up_shexp.weight", "model.layers.3.mlp.shared_experts.up_proj.weight"),
            (
                "ernie4_5_moe",
                "blk.3.exp_probs_b.bias",
                "model.layers.3.mlp.moe_statics.e_score_correction_bias",
            ),
            ("gemma2", "blk.0.ffn_norm.weight", "model.layers.0.pre_feedforward_layernorm.weight"),
            ("gemma3_text", "blk.0.post_ffw_norm.weight", "model.layers.0.post_feedforward_layernorm.weight"),
            ("glm", "blk.0.attn_qkv.bias", "model.layers.0.self_attn.qkv_proj.bias"),
            ("glm4", "blk.0.ffn_up.weight", "model.layers.0.mlp.gate_up_proj.weight"),
            ("glm4", "blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
            ("glm4", "blk.0.post_attention_norm.weight", "model.layers.0.post_self_attn_layernorm.weight"),
            (
                "glm4_moe",
                "blk.0.post_attention_norm.weight",
                "model.layers.0.post_attention_layernorm.weight",
            ),
            (
                "granitemoe",
                "blk.0.ffn_gate_inp.weight",
                "model.layers.0.block_sparse_moe.router.layer.weight",
            ),
            ("hunyuan_v1_dense", "blk.0.attn_k_norm.weight", "model.layers.0.self_attn.key_layernorm.weight"),
            ("olmo3", "blk.0.post_attention_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
            ("phi", "output_norm.bias", "model.final_layernorm.bias"),
            ("phi", "output.bias", "lm_head.bias"),
            ("phi", "blk.0.attn_output.bias", "model.layers.0.self_attn.dense.bias"),
            ("qwen2_moe", "blk.0.ffn_gate_inp_shexp.weight", "model.layers.0.mlp.shared_expert_gate.weight"),
            ("qwen3_next", "blk.0.ssm_a", "model.layers.0.linear_attn.A_log"),
            ("qwen3_5_text", "blk.0.ssm_dt.bias", "model.layers.0.linear_attn.dt_bias"),
            ("qwen3_5_text", "blk.0.attn_qkv.weight", "model.layers.0.linear_attn.in_proj_qkv.weight"),
            ("llama4_text", "blk.1.ffn_gate_inp.weight", "model.layers.1.feed_forward.router.weight"),
            ("llama4_text", "blk.0.ffn_up.weight", "model.layers.0.feed_forward.up_proj.weight"),
            ("stablelm", "blk.0.attn_q_norm.weight", "model.layers.0.self_attn.q_layernorm.weight"),
            ("starcoder2", "blk.0.ffn_down.bias", "model.layers.0.mlp.c_proj.bias"),
            ("llama", "blk.0.post_ffw_norm.weight", "blk.0.post_ffw_norm.weight"),
        ] {
            let expected = Name::Tensor(name.to_owned());
            assert_eq!(translate(gguf, of_type(model_type)), expected, "{model_type} {gguf}");
            if !name.starts_with("blk.") && !gguf.contains(".ssm_") {
                assert_eq!(written(name, of_type(model_type)).as_deref(), Some(gguf), "{model_type} {name}");
            }
        }
        let gate = translate("blk.0.ffn_gate_inp_shexp.weight", of_type("qwen2_moe"));
        assert_eq!(dims_of(&gate, vec![8]), [1, 8]);
        assert_eq!(dims_of(&translate("blk.0.ffn_gate.weight", of_type("qwen2_moe")), vec![8]), [8]);
        let convolution = translate("blk.0.ssm_conv1d.weight", of_type("qwen3_next"));
        assert_eq!(dims_of(&convolution, vec![8, 4]), [8, 1, 4]);
        for name in [ROPE_LONG, ROPE_SHORT] {
            assert_eq!(translate(name, of_type("phi3")), Name::Unused);
        }
    }

    #[test]
    fn scales_belong_to_their_modules() {
        let scale = Name::GlobalScale("model.layers.2.mlp.experts.down_proj".to_owned());
        assert_eq!(translate("blk.2.ffn_down_exps.scale", of_type("llama")), scale);
        assert_eq!(translate("output.scale", of_type("llama")), Name::GlobalScale("lm_head".to_owned()));
        assert_eq!(translate("blk.2.ffn_down.input_scale", of_type("llama")), Name::Unused);
        assert_eq!(translate(ROPE_FREQS, of_type("llama")), Name::Unused);
    }

    #[test]
    fn modules_of_other_files_have_the_names_of_the_model() {
        let of = |model_type, name| module_of_gguf(model_type, name).unwrap();
        let named = |name: &str| Some(name.to_owned());
        assert_eq!(of("qwen3", "blk.2.attn_q.weight"), named("model.layers.2.self_attn.q_proj"));
        assert_eq!(of("qwen3", "output.weight"), named("lm_head"));
        assert_eq!(
            of("mixtral", "blk.0.ffn_up_exps.weight"),
            named("model.layers.0.block_sparse_moe.experts.up_proj")
        );
        assert_eq!(of("qwen3", "rope_freqs.weight"), None);
        assert_eq!(of("qwen3_5_text", "blk.0.ssm_out.weight"), None);
        assert!(of("qwen3_next", "blk.0.ssm_out.weight").is_some());
        assert!(module_of_gguf("none", "output.weight").unwrap_err().to_string().contains("`none`"));
    }
}
