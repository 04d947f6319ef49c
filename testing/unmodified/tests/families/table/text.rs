//! Decoders of text.

use super::transformers::models::*;
use super::Family;
use crate::{decoder, parse};
use candle::{DType, Device};
use serde_json::json;

/// A family with the usual constructor and the usual `forward`; what the constructor takes before its config may follow.
macro_rules! usual {
    ($model:ty, $config:tt $(, $first:expr)*) => {
        Family::new(json!($config), |config, vb| {
            let mut model = <$model>::new($($first,)* &parse(config)?, vb)?;
            decoder(move |ids, position| model.forward(ids, position))
        })
    };
}

pub fn llama() -> Family {
    Family::new(json!({}), |config, vb| {
        let config = parse::<llama::LlamaConfig>(config)?.into_config(false);
        let mut cache = llama::Cache::new(true, DType::F32, &config, &Device::Cpu)?;
        let model = llama::Llama::load(vb, &config)?;
        decoder(move |ids, position| model.forward(ids, position, &mut cache))
    })
}

pub fn mistral() -> Family {
    usual!(mistral::Model, {})
}

/// The output layer is the embedding, as in the small ones of this family.
pub fn qwen2() -> Family {
    usual!(qwen2::ModelForCausalLM, { "tie_word_embeddings": true })
}

pub fn qwen3() -> Family {
    usual!(qwen3::ModelForCausalLM, { "tie_word_embeddings": true, "head_dim": 32 })
}

pub fn gemma() -> Family {
    usual!(gemma::Model, { "hidden_act": null }, false)
}

pub fn gemma2() -> Family {
    usual!(gemma2::Model, {
        "query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0
    }, false)
}

/// Every other layer sees four tokens. On a CPU, candle's caches take one head of keys and values, as the 1B model has.
pub fn gemma3() -> Family {
    usual!(gemma3::Model, {
        "num_key_value_heads": 1, "query_pre_attn_scalar": 16, "sliding_window": 4, "sliding_window_pattern": 2, "rope_local_base_freq": 1000.0
    }, false)
}

/// A layer that sees four tokens, and one that sees all, with larger heads.
pub fn gemma4() -> Family {
    usual!(gemma4::text::TextModel, {
        "tie_word_embeddings": true, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"],
        "num_key_value_heads": 1, "global_head_dim": 32, "final_logit_softcapping": 30.0
    })
}

pub fn phi() -> Family {
    let config = json!({ "hidden_act": "gelu_new", "partial_rotary_factor": 0.5, "qk_layernorm": false });
    Family::new(config, |config, vb| {
        let mut model = phi::Model::new(&parse(config)?, vb)?;
        decoder(move |ids, _| model.forward(ids))
    })
}

pub fn phi3() -> Family {
    usual!(phi3::Model, {})
}

pub fn olmo() -> Family {
    usual!(olmo::Model, { "clip_qkv": 8.0 })
}

pub fn olmo2() -> Family {
    usual!(olmo2::Model, {})
}

pub fn starcoder2() -> Family {
    usual!(starcoder2::Model, { "use_bias": true, "hidden_act": "gelu_pytorch_tanh" })
}

pub fn stable_lm() -> Family {
    usual!(stable_lm::Model, { "partial_rotary_factor": 0.5, "use_cache": true, "use_qkv_bias": true })
}

pub fn helium() -> Family {
    usual!(helium::Model, { "mlp_bias": false, "bos_token_id": 1, "eos_token_id": 2 })
}

pub fn granite() -> Family {
    Family::new(json!({}), |config, vb| {
        let config = parse::<granite::GraniteConfig>(config)?.into_config(false);
        let mut cache = granite::Cache::new(true, DType::F32, &config, &Device::Cpu)?;
        let model = granite::Granite::load(vb, &config)?;
        decoder(move |ids, position| model.forward(ids, position, &mut cache))
    })
}

pub fn glm4() -> Family {
    let config = json!({
        "num_layers": 2, "padded_vocab_size": 101, "ffn_hidden_size": 128, "kv_channels": 16, "seq_length": 64,
        "layernorm_epsilon": 1e-5, "rmsnorm": true, "apply_residual_connection_post_layernorm": false,
        "post_layer_norm": true, "add_bias_linear": false, "add_qkv_bias": true, "bias_dropout_fusion": true,
        "multi_query_attention": true, "multi_query_group_num": 2, "apply_query_key_layer_scaling": true,
        "attention_softmax_in_fp32": true, "fp32_residual_connection": false,
    });
    Family::new(config, |config, vb| {
        let mut model = glm4::Model::new(&parse(config)?, vb)?;
        decoder(move |ids, _| model.forward(ids))
    })
}

pub fn glm4_new() -> Family {
    usual!(glm4_new::ModelForCausalLM, { "partial_rotary_factor": 0.5, "attention_bias": true })
}

/// The second layer has no positions.
pub fn smollm3() -> Family {
    usual!(smol::smollm3::ModelForCausalLM, { "tie_word_embeddings": true, "no_rope_layers": [1, 0] })
}

pub fn falcon() -> Family {
    let config = json!({
        "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "use_cache": true, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "n_head_kv": null, "alibi": false,
        "new_decoder_architecture": false, "multi_query": true, "parallel_attn": true, "bias": false,
    });
    Family::new(config, |config, vb| {
        let mut model = falcon::Falcon::load(vb, parse(config)?)?;
        decoder(move |ids, _| model.forward(ids))
    })
}

pub fn bigcode() -> Family {
    Family::new(json!({}), |_, vb| {
        let config = bigcode::Config {
            vocab_size: 101,
            max_position_embeddings: 64,
            num_hidden_layers: 2,
            hidden_size: 64,
            layer_norm_epsilon: 1e-5,
            n_inner: Some(128),
            num_attention_heads: 4,
            multi_query: true,
            use_cache: true,
        };
        let mut model = bigcode::GPTBigCode::load(vb, config)?;
        decoder(move |ids, position| model.forward(ids, position))
    })
}

pub fn granitemoehybrid() -> Family {
    let config = json!({
        "layer_types": ["attention", "attention"], "shared_intermediate_size": 128, "attention_multiplier": 0.25,
        "embedding_multiplier": 12.0, "residual_multiplier": 0.5, "logits_scaling": 3.0,
    });
    Family::new(config, |config, vb| {
        use granitemoehybrid::*;
        let config = parse::<GraniteMoeHybridConfig>(config)?.into_config(false);
        let mut cache = GraniteMoeHybridCache::new(true, DType::F32, &config, &Device::Cpu)?;
        let model = GraniteMoeHybrid::load(vb, &config)?;
        decoder(move |ids, position| model.forward(ids, position, &mut cache))
    })
    .with_copied(&[("embed_tokens.weight", "multiplied by the model itself, for logits")])
}
