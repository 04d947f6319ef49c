//! Models of candle-transformers, unchanged, on checkpoints whose names are others than theirs.

use crate::common::{distance, open, reference};
use crate::packed::bits;
use crate::ranks::written;
use crate::{fused, Tensors};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarMap;
use candle_quant::{Checkpoint, VarBuilder};
use candle_transformers::models::{
    deepseek2, granite, llama, mistral, mixtral, phi3, qwen2, qwen2_moe, qwen3_moe, stable_lm,
};
use serde::de::DeserializeOwned;
use serde_json::{json, Value};
use std::collections::HashMap;

type Forward = Box<dyn FnMut(&Tensor, usize) -> Result<Tensor>>;

/// `config` with other entries.
fn with(config: &Value, changes: Value) -> Value {
    let mut config = config.clone();
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    config
}

/// What candle's configs ask for and mlx-lm takes for granted.
fn candles<T: DeserializeOwned>(config: &Value) -> T {
    let taken_for_granted = json!({"attention_bias": false, "use_sliding_window": false, "max_window_layers": 2,
        "hidden_act": "silu", "use_flash_attn": false, "sliding_window": 512, "shared_expert_intermediate_size": 0});
    serde_json::from_value(with(&taken_for_granted, config.clone())).unwrap()
}

/// The logits after each token.
fn logits(mut forward: Forward, tokens: &Tensor) -> Tensor {
    let step =
        |offset| forward(&tokens.narrow(1, offset, 1).unwrap(), offset).unwrap().flatten_all().unwrap();
    let steps: Vec<_> = (0..tokens.dim(1).unwrap()).map(step).collect();
    Tensor::stack(&steps, 0).unwrap()
}

/// The fixtures of mlx-lm, whose experts are stacks, have mlx-lm's logits in candle-transformers' model.
#[test]
fn qwen3_moe_as_mlx_lm_writes_it() {
    for name in ["qwen3moe-affine-b4-g64", "qwen3moe-nvfp4-global_scale"] {
        let checkpoint = open(name);
        let vb = VarBuilder::from_checkpoint(&checkpoint, DType::F32, &Device::Cpu);
        let (tokens, expected) = reference(name);
        let distance = distance(&logits(qwen3_moe(checkpoint.config(), vb.dense()), &tokens), &expected);
        assert!(distance.max <= 3e-4 && distance.other_argmax == 0, "{name}: {distance:?}");
    }
}

fn qwen3_moe(config: &Value, vb: candle_nn::VarBuilder) -> Forward {
    let mut model = qwen3_moe::ModelForCausalLM::new(&candles(config), vb).unwrap();
    Box::new(move |token, offset| model.forward(token, offset))
}

fn qwen2_moe(config: &Value, vb: candle_nn::VarBuilder) -> Forward {
    let mut model = qwen2_moe::Model::new(&candles(config), vb).unwrap();
    Box::new(move |token, offset| model.forward(token, offset))
}

fn mixtral(config: &Value, vb: candle_nn::VarBuilder) -> Forward {
    let mut model = mixtral::Model::new(&candles(config), vb).unwrap();
    Box::new(move |token, offset| model.forward(token, offset))
}

fn deepseek2(config: &Value, vb: candle_nn::VarBuilder) -> Forward {
    let mut model = deepseek2::DeepSeekV2::new(&candles(config), vb).unwrap();
    Box::new(move |token, offset| model.forward(token, offset))
}

fn mistral(config: &Value, vb: candle_nn::VarBuilder) -> Forward {
    let mut model = mistral::Model::new(&candles(config), vb).unwrap();
    Box::new(move |token, offset| model.forward(token, offset))
}

fn stable_lm(config: &Value, vb: candle_nn::VarBuilder) -> Forward {
    let mut model = stable_lm::Model::new(&candles(config), vb).unwrap();
    Box::new(move |token, offset| model.forward(token, offset))
}

fn granite(config: &Value, vb: candle_nn::VarBuilder) -> Forward {
    let config = candles::<granite::GraniteConfig>(config).into_config(false);
    let mut cache = granite::Cache::new(true, DType::F32, &config, &Device::Cpu).unwrap();
    let model = granite::Granite::load(vb, &config).unwrap();
    Box::new(move |token, offset| model.forward(token, offset, &mut cache))
}

fn llama(config: &Value, vb: candle_nn::VarBuilder) -> Forward {
    let config = candles::<llama::LlamaConfig>(config).into_config(false);
    let mut cache = llama::Cache::new(true, DType::F32, &config, &Device::Cpu).unwrap();
    let model = llama::Llama::load(vb, &config).unwrap();
    Box::new(move |token, offset| model.forward(token, offset, &mut cache))
}

fn qwen2(config: &Value, vb: candle_nn::VarBuilder) -> Forward {
    let mut model = qwen2::ModelForCausalLM::new(&candles(config), vb).unwrap();
    Box::new(move |token, offset| model.forward(token, offset))
}

fn phi3(config: &Value, vb: candle_nn::VarBuilder) -> Forward {
    let mut model = phi3::Model::new(&candles(config), vb).unwrap();
    Box::new(move |token, offset| model.forward(token, offset))
}

fn small(changes: Value) -> Value {
    let config = json!({"vocab_size": 64, "hidden_size": 128, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "max_position_embeddings": 128, "hidden_act": "silu",
        "tie_word_embeddings": false});
    with(&config, changes)
}

/// A model of random weights has the same logits on a checkpoint of `stored`, which is made of these weights.
fn check(
    config: &Value,
    model: fn(&Value, candle_nn::VarBuilder) -> Forward,
    stored: impl Fn(Tensors) -> Tensors,
) -> Checkpoint {
    let varmap = VarMap::new();
    let random = || candle_nn::VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    drop(model(config, random()));
    if config["tie_word_embeddings"] == true {
        let weights = varmap.data().lock().unwrap();
        if let Some(head) = weights.get("lm_head.weight") {
            head.set(weights["model.embed_tokens.weight"].as_tensor()).unwrap();
        }
    }
    let tokens = Tensor::arange(0u32, 24, &Device::Cpu).unwrap().unsqueeze(0).unwrap();
    let expected = logits(model(config, random()), &tokens);

    let weights = varmap.data().lock().unwrap();
    let own = weights.iter().map(|(name, weight)| (name.clone(), weight.as_tensor().clone()));
    let own: Tensors = own.collect();
    let tensors = stored(own.clone());
    assert!(own.keys().any(|name| !tensors.contains_key(name)), "all names are stored");
    let (_dir, checkpoint) = written(&tensors, config);
    let vb = VarBuilder::from_checkpoint(&checkpoint, DType::F32, &Device::Cpu);
    let found = logits(model(config, vb.dense()), &tokens);
    assert!(bits(&found) == bits(&expected), "{:?}", distance(&found, &expected));
    checkpoint
}

/// Stacks of experts, as mlx-lm and this crate's `convert` write them.
fn stacked(mut tensors: Tensors) -> Tensors {
    let mut experts: HashMap<String, Vec<(usize, Tensor)>> = HashMap::new();
    let names: Vec<_> = tensors.keys().filter(|name| name.contains(".experts.")).cloned().collect();
    for name in names {
        let (block, rest) = name.split_once(".experts.").unwrap();
        let (expert, rest) = rest.split_once('.').unwrap();
        let rest = rest.replace("w1", "gate_proj").replace("w3", "up_proj").replace("w2", "down_proj");
        let stack = format!("{block}.switch_mlp.{rest}");
        experts.entry(stack).or_default().push((expert.parse().unwrap(), tensors.remove(&name).unwrap()));
    }
    for (stack, mut experts) in experts {
        experts.sort_by_key(|(expert, _)| *expert);
        let experts: Vec<_> = experts.into_iter().map(|(_, tensor)| tensor).collect();
        tensors.insert(stack, Tensor::stack(&experts, 0).unwrap());
    }
    tensors
}

#[test]
fn experts_are_found_in_stacks() {
    let moe = json!({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 32,
        "decoder_sparse_step": 1, "norm_topk_prob": true, "mlp_only_layers": []});
    check(&small(moe.clone()), qwen3_moe, stacked);
    check(&with(&small(moe), json!({"shared_expert_intermediate_size": 64})), qwen2_moe, stacked);
    check(&small(json!({"num_local_experts": 4, "num_experts_per_tok": 2})), mixtral, stacked);
    let deepseek = json!({"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48, "first_k_dense_replace": 1, "q_lora_rank": null, "kv_lora_rank": 32,
        "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32, "n_group": 1, "topk_group": 1});
    check(&small(deepseek), deepseek2, stacked);
}

fn without_head(mut tensors: Tensors) -> Tensors {
    tensors.remove("lm_head.weight").unwrap();
    tensors
}

#[test]
fn tied_heads_are_found_in_the_embedding() {
    let tied = |changes| with(&small(json!({"tie_word_embeddings": true})), changes);
    check(&tied(json!({})), mistral, without_head);
    check(&tied(json!({})), granite, without_head);
    let stable = json!({"partial_rotary_factor": 0.25, "layer_norm_eps": 1e-5, "use_cache": true});
    check(&tied(stable), stable_lm, without_head);
    check(
        &tied(json!({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1, "norm_topk_prob": true})),
        qwen2_moe,
        |tensors| without_head(stacked(tensors)),
    );
}

/// Takes the projections of Phi-3 apart.
fn split(mut tensors: Tensors) -> Tensors {
    for layer in 0..2 {
        for (whole, parts) in [
            (
                "self_attn.qkv_proj",
                &[("self_attn.q_proj", 128), ("self_attn.k_proj", 64), ("self_attn.v_proj", 64)][..],
            ),
            ("mlp.gate_up_proj", &[("mlp.gate_proj", 96), ("mlp.up_proj", 96)]),
        ] {
            let name = |module: &str| format!("model.layers.{layer}.{module}.weight");
            let whole = tensors.remove(&name(whole)).unwrap();
            let mut start = 0;
            for (part, rows) in parts {
                tensors.insert(name(part), whole.narrow(0, start, *rows).unwrap().contiguous().unwrap());
                start += rows;
            }
        }
    }
    tensors
}

#[test]
fn projections_are_found_fused_and_apart() {
    check(&small(json!({})), llama, fused);
    check(&small(json!({})), phi3, split);
    // With biases, and a model that asks whether there is a head: the embedding is not loaded twice.
    let checkpoint = check(&small(json!({"tie_word_embeddings": true})), qwen2, fused);
    let vb = VarBuilder::from_checkpoint(&checkpoint, DType::F32, &Device::Cpu).dense();
    assert!(checkpoint.contains("model.layers.0.self_attn.qkv_proj.bias"));
    assert!(!vb.contains_tensor("lm_head.weight"));
}
