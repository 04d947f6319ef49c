//! Plans against layers, and what a model refuses.

#[cfg(feature = "cuda")]
mod on_device;
#[cfg(feature = "nccl")]
mod on_ranks;

use super::*;
use candle_quant::QuantFormat;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{json, Value};
use std::collections::HashMap;

fn tiny() -> Model {
    Model::load(&Checkpoint::open("assets/tiny").unwrap(), DType::F32, &Device::Cpu).unwrap()
}

fn random(changes: &Value) -> Model {
    random_on(&Device::Cpu, DType::F32, changes)
}

fn with_sizes(changes: &Value) -> Value {
    let mut config = json!({"model_type": "llama", "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "tie_word_embeddings": false});
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    config
}

/// A model of two layers with random weights, packed in 4 bits.
fn random_on(device: &Device, dtype: DType, changes: &Value) -> Model {
    random_with(device, dtype, changes, ModelOptions::default())
}

fn random_with(device: &Device, dtype: DType, changes: &Value, options: ModelOptions) -> Model {
    let config = Config::from_json(&with_sizes(changes)).unwrap();
    let vb = VarBuilder::from_tensors(random_tensors(&config), dtype, device);
    Model::with_options(&config, vb.quantize_to(QuantFormat::affine(4, 64).unwrap()), options).unwrap()
}

fn random_tensors(config: &Config) -> HashMap<String, Tensor> {
    let (expected, _) = config.inventory(["model.layers.0.", "model.layers.1."].into_iter());
    let mut random = StdRng::seed_from_u64(7);
    let tensors = expected.into_iter().map(|(name, tensor)| {
        let most =
            if tensor.dims.len() > 1 { (3. / tensor.dims[tensor.dims.len() - 1] as f32).sqrt() } else { 1. };
        let count = tensor.dims.iter().product();
        let values: Vec<f32> = (0..count).map(|_| random.random_range(-most..most)).collect();
        (name, Tensor::from_vec(values, tensor.dims, &Device::Cpu).unwrap())
    });
    tensors.collect()
}

/// What a plan has, in the families that have it: each field of a config that changes a block, a turn or an end.
fn planned_kinds() -> Vec<Value> {
    let factors = |factor: f64| vec![factor; 12];
    vec![
        json!({"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8., "low_freq_factor": 1.,
            "high_freq_factor": 4., "original_max_position_embeddings": 16}}),
        json!({"model_type": "mistral", "sliding_window": 6}),
        json!({"model_type": "qwen2"}),
        json!({"model_type": "qwen3"}),
        json!({"model_type": "cohere", "use_qk_norm": true, "logit_scale": 0.6}),
        json!({"model_type": "cohere2", "sliding_window": 6, "sliding_window_pattern": 2}),
        json!({"model_type": "exaone4", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}),
        json!({"model_type": "gemma2", "attn_logit_softcapping": 2., "final_logit_softcapping": 3.,
            "query_pre_attn_scalar": 24, "sliding_window": 6}),
        json!({"model_type": "gemma3_text", "rope_local_base_freq": 100., "sliding_window": 6, "sliding_window_pattern": 2}),
        json!({"model_type": "glm", "attention_bias": true, "partial_rotary_factor": 0.5}),
        json!({"model_type": "glm4", "attention_bias": true, "partial_rotary_factor": 0.5}),
        json!({"model_type": "granite", "attention_multiplier": 0.4, "embedding_multiplier": 4., "logits_scaling": 1.5,
            "residual_multiplier": 0.4}),
        json!({"model_type": "nemotron", "hidden_act": "relu2", "partial_rotary_factor": 0.5}),
        json!({"model_type": "olmo2"}),
        json!({"model_type": "phi", "hidden_act": "gelu_new", "partial_rotary_factor": 0.5}),
        json!({"model_type": "phi3", "max_position_embeddings": 64, "original_max_position_embeddings": 32,
            "partial_rotary_factor": 0.75, "rope_scaling":
                {"type": "longrope", "short_factor": factors(1.5), "long_factor": factors(3.)}}),
        json!({"model_type": "ernie4_5_moe", "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 64,
            "moe_num_shared_experts": 1, "moe_layer_start_index": 1}),
        json!({"model_type": "glm4_moe", "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
            "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
            "norm_topk_prob": true}),
        json!({"model_type": "gpt_oss", "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"]}),
        json!({"model_type": "granitemoe", "num_local_experts": 6, "num_experts_per_tok": 2, "residual_multiplier": 0.4}),
        json!({"model_type": "llama4_text", "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size_mlp": 256,
            "intermediate_size": 64, "interleave_moe_layer_step": 1, "attention_chunk_size": 6}),
        json!({"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2}),
        json!({"model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 2}),
        json!({"model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 128}),
        json!({"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}),
        json!({"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32, "num_experts": 6,
            "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 128}),
        json!({"model_type": "qwen3_5_text", "layer_types": ["full_attention", "linear_attention"], "linear_num_key_heads": 2,
            "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 64}),
        json!({"model_type": "smollm3", "no_rope_layers": [1, 0]}),
        json!({"model_type": "stablelm", "partial_rotary_factor": 0.25, "qk_layernorm": true,
            "use_parallel_residual": true}),
        json!({"model_type": "starcoder2", "sliding_window": 6, "use_bias": true}),
    ]
}

#[test]
fn a_plan_computes_what_the_layers_compute() {
    let mut problems = Vec::new();
    let tiny = [("tiny".to_string(), [tiny(), tiny()])];
    let kinds = planned_kinds();
    let kinds = kinds.iter().map(|kind| (kind["model_type"].to_string(), [random(kind), random(kind)]));
    for (name, [mut planned, mut layered]) in kinds.chain(tiny) {
        let plan = planned.plan.clone();
        if plan.is_none() {
            problems.push(format!("{name}: no plan"));
        }
        layered.plan = None;
        let has_states = name.contains("qwen3_5") || name.contains("qwen3_next");
        let ids: Vec<u32> = (0..60).map(|index| index * 7 % 96).collect();
        // Both halves of a plan, for few and for many tokens, for one text and for two; parts of both ways, on one cache.
        for way in [[true; 5], [true, false, true, false, true], [false, true, false, true, false]] {
            let mut first = 0;
            for model in [&mut planned, &mut layered] {
                model.clear_kv_cache();
                model.expect_tokens(44);
            }
            for ((batch, len), is_planned) in [(2, 1), (2, 20), (2, 1), (2, 3), (2, 19)].into_iter().zip(way)
            {
                let part: Vec<u32> = [&ids[first..first + len], &ids[60 - first - len..60 - first]].concat();
                let part = Tensor::from_vec(part, (batch, len), &Device::Cpu).unwrap();
                let run = |model: &mut Model| model.forward(&part, first).unwrap().flatten_all().unwrap();
                planned.plan = plan.clone().filter(|_| is_planned);
                let (found, expected) = (run(&mut planned), run(&mut layered));
                let (found, expected) = (found.to_vec1::<f32>().unwrap(), expected.to_vec1::<f32>().unwrap());
                let spread = expected.iter().map(|x| x * x).sum::<f32>() / expected.len() as f32;
                let worst = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0., f32::max);
                let what = format!("{name}, {len} tokens from {first} on, {way:?}");
                // What linear attention gives is normalized, however small it is.
                let bound = if has_states { 6e-5 } else { 2e-5 };
                if worst > bound * spread.sqrt() {
                    problems.push(format!("{what}: {worst} of {}", spread.sqrt()));
                }
                first += len;
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn what_a_plan_does_not_have_runs_layer_by_layer() {
    assert!(random(&json!({"hidden_act": "mish"})).plan.is_none());
}

#[test]
fn ids_that_do_not_fit_are_refused() {
    let mut model = tiny();
    let ids = |batch: usize| Tensor::ones((batch, 2), DType::U32, &Device::Cpu).unwrap();
    for (before, then) in [(2, 1), (1, 2)] {
        model.forward(&ids(before), 0).unwrap();
        let error = model.forward_last(&ids(then), 2).unwrap_err().to_string();
        assert!(error.contains("batch") && model.cached_tokens() == 0, "{error}");
    }
    let fractions = Tensor::new(&[[1.5f32]], &Device::Cpu).unwrap();
    assert!(model.forward(&fractions, 0).unwrap_err().to_string().contains("dtype U8, U32 or I64"));
    let outside = Tensor::new(&[[640u32]], &Device::Cpu).unwrap();
    assert!(model.forward(&outside, 0).unwrap_err().to_string().contains("each below 640"));
}
