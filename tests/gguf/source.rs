//! Models as GGUF files of candle's writer, and as safetensors.

use crate::common::bundled;
use crate::packed::numbers;
use candle_core::quantized::{gguf_file, GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use candle_quant::Checkpoint;
use gguf_file::Value as Stored;
use serde_json::{json, Value};
use std::collections::{BTreeMap, HashMap};
use std::fs;
use tempfile::TempDir;

type Tensors = BTreeMap<String, Tensor>;

/// A model: what stands in its `config.json`, and its tensors.
pub struct Source {
    pub config: Value,
    pub tensors: Tensors,
}

/// A llama of random weights that F16 can hold.
pub fn llama(rope_scaling: Value) -> Source {
    Source::random(json!({
        "model_type": "llama", "vocab_size": 96, "hidden_size": 128, "intermediate_size": 192,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "rope_scaling": rope_scaling, "tie_word_embeddings": false, "eos_token_id": [7, 9],
    }))
}

/// A model with 6 experts of random weights: `mixtral`, `qwen3_moe` or `gpt_oss`.
pub fn sparse(model_type: &str, hidden: usize, inner: usize) -> Source {
    let mut config = llama(Value::Null).config;
    for (key, value) in [
        ("hidden_size", hidden),
        ("intermediate_size", inner),
        ("num_experts", 6),
        ("num_local_experts", 6),
        ("num_experts_per_tok", 2),
    ] {
        config[key] = value.into();
    }
    config["model_type"] = model_type.into();
    match model_type {
        "qwen3_moe" => {
            config["moe_intermediate_size"] = inner.into();
            config["norm_topk_prob"] = true.into();
        }
        "gpt_oss" => {
            config["sliding_window"] = 16.into();
            config["rope_scaling"] = json!({"rope_type": "yarn", "factor": 32.0, "truncate": false,
                "original_max_position_embeddings": 64});
        }
        _ => {}
    }
    Source::random(config)
}

/// The bundled model, a qwen3.
pub fn tiny() -> Source {
    let checkpoint = bundled("tiny-bf16");
    let load = |name: &str| checkpoint.dense(name).unwrap().load(DType::F32, &Device::Cpu).unwrap();
    let tensors = checkpoint.tensor_names().map(|name| (name.to_owned(), load(name))).collect();
    Source { config: checkpoint.config().clone(), tensors }
}

pub fn gguf_name(name: &str, architecture: &str) -> String {
    let before_mlp = if architecture == "gpt-oss" { "post_attention_norm" } else { "ffn_norm" };
    [
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers", "blk"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", before_mlp),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.sinks", "attn_sinks.weight"),
        ("block_sparse_moe", "mlp"),
        ("mlp.router", "ffn_gate_inp"),
        ("mlp.gate.", "ffn_gate_inp."),
        ("mlp.experts.gate_proj", "ffn_gate_exps"),
        ("mlp.experts.up_proj", "ffn_up_exps"),
        ("mlp.experts.down_proj", "ffn_down_exps"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ]
    .iter()
    .fold(name.to_owned(), |name, (from, to)| name.replace(from, to))
}

/// What llama.cpp's converter does to queries and keys of the architecture llama.
fn permuted(weight: &Tensor, heads: usize) -> Tensor {
    let (n, k) = weight.dims2().unwrap();
    let split = weight.reshape((heads, 2, n / heads / 2, k)).unwrap();
    split.transpose(1, 2).unwrap().contiguous().unwrap().reshape((n, k)).unwrap()
}

impl Source {
    /// Random weights that F16 can hold, for a config.
    fn random(config: Value) -> Self {
        let mut source = Self { config, tensors: Tensors::new() };
        let size = |key: &str| source.config[key].as_u64().map(|size| size as usize);
        let [vocab, hidden, inner, heads, keys] =
            ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"]
                .map(|key| size(key).unwrap());
        let experts = size("num_experts");
        let model_type = source.config["model_type"].as_str().unwrap().to_owned();
        let (gpt_oss, queries, keys) = (model_type == "gpt_oss", heads * 32, keys * 32);
        let mut tensors = Tensors::new();
        let mut add = |name: String, dims: &[usize]| {
            let (scale, offset) = match dims.len() {
                1 if name.ends_with("weight") => (0.1, 1.),
                _ => (0.09, 0.),
            };
            let values = numbers(dims.iter().product(), tensors.len() as u64 + 11);
            let values = values.into_iter().map(|x| half::f16::from_f32(x * scale + offset).to_f32());
            let tensor = Tensor::from_iter(values, &Device::Cpu).unwrap().reshape(dims).unwrap();
            tensors.insert(name, tensor);
        };
        add("model.embed_tokens.weight".into(), &[vocab, hidden]);
        add("model.norm.weight".into(), &[hidden]);
        add("lm_head.weight".into(), &[vocab, hidden]);
        for layer in 0..2 {
            let at = |name: &str| format!("model.layers.{layer}.{name}");
            for norm in ["input_layernorm", "post_attention_layernorm"] {
                add(at(&format!("{norm}.weight")), &[hidden]);
            }
            if model_type == "qwen3_moe" {
                add(at("self_attn.q_norm.weight"), &[32]);
                add(at("self_attn.k_norm.weight"), &[32]);
            }
            if gpt_oss {
                add(at("self_attn.sinks"), &[heads]);
            }
            let mut linear = |name: &str, dims: &[usize]| {
                add(at(&format!("{name}.weight")), dims);
                if gpt_oss {
                    add(at(&format!("{name}.bias")), &dims[..dims.len() - 1]);
                }
            };
            linear("self_attn.q_proj", &[queries, hidden]);
            linear("self_attn.k_proj", &[keys, hidden]);
            linear("self_attn.v_proj", &[keys, hidden]);
            linear("self_attn.o_proj", &[hidden, queries]);
            let Some(experts) = experts else {
                linear("mlp.gate_proj", &[inner, hidden]);
                linear("mlp.up_proj", &[inner, hidden]);
                linear("mlp.down_proj", &[hidden, inner]);
                continue;
            };
            let (block, router) = match model_type.as_str() {
                "mixtral" => ("block_sparse_moe", "gate"),
                "gpt_oss" => ("mlp", "router"),
                _ => ("mlp", "gate"),
            };
            linear(&format!("{block}.{router}"), &[experts, hidden]);
            linear(&format!("{block}.experts.gate_proj"), &[experts, inner, hidden]);
            linear(&format!("{block}.experts.up_proj"), &[experts, inner, hidden]);
            linear(&format!("{block}.experts.down_proj"), &[experts, hidden, inner]);
        }
        source.tensors = tensors;
        source
    }

    /// What the architecture is called in GGUF.
    fn architecture(&self) -> &str {
        match self.config["model_type"].as_str().unwrap() {
            "mixtral" => "llama",
            "qwen3_moe" => "qwen3moe",
            "gpt_oss" => "gpt-oss",
            same => same,
        }
    }

    fn size(&self, key: &str) -> usize {
        self.config[key].as_u64().unwrap() as usize
    }

    pub fn metadata(&self) -> Vec<(String, Stored)> {
        let architecture = self.architecture();
        let mut values = vec![("general.architecture".to_owned(), Stored::String(architecture.to_owned()))];
        for (key, name) in [
            ("embedding_length", "hidden_size"),
            ("feed_forward_length", "intermediate_size"),
            ("block_count", "num_hidden_layers"),
            ("attention.head_count", "num_attention_heads"),
            ("attention.head_count_kv", "num_key_value_heads"),
            ("attention.key_length", "head_dim"),
            ("attention.value_length", "head_dim"),
            ("attention.sliding_window", "sliding_window"),
            ("rope.dimension_count", "head_dim"),
            ("context_length", "max_position_embeddings"),
            ("expert_count", "num_experts"),
            ("expert_used_count", "num_experts_per_tok"),
            ("expert_feed_forward_length", "moe_intermediate_size"),
        ] {
            if let Some(size) = self.config[name].as_u64() {
                values.push((format!("{architecture}.{key}"), Stored::U32(size as u32)));
            }
        }
        for (key, number) in [
            ("attention.layer_norm_rms_epsilon", &self.config["rms_norm_eps"]),
            ("rope.freq_base", &self.config["rope_theta"]),
        ] {
            let number = number.as_f64().unwrap() as f32;
            values.push((format!("{architecture}.{key}"), Stored::F32(number)));
        }
        let scaling = &self.config["rope_scaling"];
        if scaling["rope_type"] == "yarn" {
            let key = |key: &str| format!("{architecture}.rope.scaling.{key}");
            values.push((key("type"), Stored::String("yarn".into())));
            values.push((key("factor"), Stored::F32(scaling["factor"].as_f64().unwrap() as f32)));
            let original = scaling["original_max_position_embeddings"].as_u64().unwrap();
            values.push((key("original_context_length"), Stored::U32(original as u32)));
        }
        let eos = &self.config["eos_token_id"];
        let first = eos.as_u64().or_else(|| eos[0].as_u64()).unwrap() as u32;
        values.push(("tokenizer.ggml.eos_token_id".into(), Stored::U32(first)));
        if let Some(second) = eos.get(1) {
            values.push(("tokenizer.ggml.eot_token_id".into(), Stored::U32(second.as_u64().unwrap() as u32)));
        }
        values
    }

    /// The model as a GGUF file of candle's writer: matrices of type `dtype`, vectors F32.
    pub fn gguf(&self, dtype: GgmlDType, extra: &[(&str, Tensor)]) -> (TempDir, Checkpoint) {
        self.gguf_of(|_| dtype, extra)
    }

    /// As [`gguf`](Source::gguf), with stacks of experts of another type than matrices.
    pub fn gguf_of(
        &self,
        dtype: impl Fn(&Tensor) -> GgmlDType,
        extra: &[(&str, Tensor)],
    ) -> (TempDir, Checkpoint) {
        let mut tensors = Vec::new();
        for (name, tensor) in &self.tensors {
            let heads = match name {
                _ if self.architecture() != "llama" => None,
                name if name.contains("q_proj") => Some(self.size("num_attention_heads")),
                name if name.contains("k_proj") => Some(self.size("num_key_value_heads")),
                _ => None,
            };
            let tensor = heads.map_or_else(|| tensor.clone(), |heads| permuted(tensor, heads));
            let is_vector = tensor.rank() == 1 || name.ends_with("bias");
            let dtype = if is_vector { GgmlDType::F32 } else { dtype(&tensor) };
            tensors.push((gguf_name(name, self.architecture()), QTensor::quantize(&tensor, dtype).unwrap()));
        }
        for (name, tensor) in extra {
            tensors.push((name.to_string(), QTensor::quantize(tensor, GgmlDType::F32).unwrap()));
        }
        let metadata = self.metadata();
        let metadata: Vec<_> = metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
        let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        let dir = tempfile::tempdir().unwrap();
        let mut file = fs::File::create(dir.path().join("model.gguf")).unwrap();
        gguf_file::write(&mut file, &metadata, &tensors).unwrap();
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        (dir, checkpoint)
    }

    pub fn safetensors(&self) -> (TempDir, Checkpoint) {
        let dir = tempfile::tempdir().unwrap();
        let tensors: HashMap<_, _> = self.tensors.clone().into_iter().collect();
        candle_core::safetensors::save(&tensors, dir.path().join("model.safetensors")).unwrap();
        fs::write(dir.path().join("config.json"), self.config.to_string()).unwrap();
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        (dir, checkpoint)
    }
}
