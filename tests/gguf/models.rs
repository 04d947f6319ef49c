//! Whole models: what a GGUF file computes is what the same model computes from safetensors.

use crate::common::{bundled, distance};
use crate::files::rejected;
use crate::packed::numbers;
use candle_core::quantized::{gguf_file, GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use candle_quant::generate::stop_tokens;
use candle_quant::models::{Config, Model};
use candle_quant::parallel::run;
use candle_quant::{Checkpoint, VarBuilder};
use gguf_file::Value as Stored;
use serde_json::{json, Value};
use std::collections::{BTreeMap, HashMap};
use std::fs;
use tempfile::TempDir;

type Tensors = BTreeMap<String, Tensor>;

/// A model: what stands in its `config.json`, and its tensors.
struct Source {
    config: Value,
    tensors: Tensors,
}

/// A llama of random weights that F16 can hold.
fn llama(rope_scaling: Value) -> Source {
    let config = json!({
        "model_type": "llama", "vocab_size": 96, "hidden_size": 128, "intermediate_size": 192,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "rope_scaling": rope_scaling, "tie_word_embeddings": false, "eos_token_id": [7, 9],
    });
    let mut tensors = Tensors::new();
    let mut add = |name: String, dims: &[usize]| {
        let scale = if dims.len() == 1 { 0.1 } else { 0.09 };
        let offset = if dims.len() == 1 { 1. } else { 0. };
        let values = numbers(dims.iter().product(), tensors.len() as u64 + 11);
        let values = values.into_iter().map(|x| half::f16::from_f32(x * scale + offset).to_f32());
        let tensor = Tensor::from_iter(values, &Device::Cpu).unwrap().reshape(dims).unwrap();
        tensors.insert(format!("{name}.weight"), tensor);
    };
    add("model.embed_tokens".into(), &[96, 128]);
    add("model.norm".into(), &[128]);
    add("lm_head".into(), &[96, 128]);
    for layer in 0..2 {
        let at = |name: &str| format!("model.layers.{layer}.{name}");
        add(at("input_layernorm"), &[128]);
        add(at("post_attention_layernorm"), &[128]);
        for (name, n, k) in [
            ("self_attn.q_proj", 128, 128),
            ("self_attn.k_proj", 64, 128),
            ("self_attn.v_proj", 64, 128),
            ("self_attn.o_proj", 128, 128),
            ("mlp.gate_proj", 192, 128),
            ("mlp.up_proj", 192, 128),
            ("mlp.down_proj", 128, 192),
        ] {
            add(at(name), &[n, k]);
        }
    }
    Source { config, tensors }
}

/// The bundled model, a qwen3.
fn tiny() -> Source {
    let checkpoint = bundled("tiny-bf16");
    let load = |name: &str| checkpoint.dense(name).unwrap().load(DType::F32, &Device::Cpu).unwrap();
    let tensors = checkpoint.tensor_names().map(|name| (name.to_owned(), load(name))).collect();
    Source { config: checkpoint.config().clone(), tensors }
}

fn gguf_name(name: &str) -> String {
    [
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers", "blk"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
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
    fn size(&self, key: &str) -> usize {
        self.config[key].as_u64().unwrap() as usize
    }

    fn metadata(&self) -> Vec<(String, Stored)> {
        let architecture = self.config["model_type"].as_str().unwrap();
        let mut values = vec![("general.architecture".to_owned(), Stored::String(architecture.to_owned()))];
        for (key, name) in [
            ("embedding_length", "hidden_size"),
            ("feed_forward_length", "intermediate_size"),
            ("block_count", "num_hidden_layers"),
            ("attention.head_count", "num_attention_heads"),
            ("attention.head_count_kv", "num_key_value_heads"),
            ("attention.key_length", "head_dim"),
            ("attention.value_length", "head_dim"),
            ("rope.dimension_count", "head_dim"),
            ("context_length", "max_position_embeddings"),
        ] {
            values.push((format!("{architecture}.{key}"), Stored::U32(self.size(name) as u32)));
        }
        for (key, name) in
            [("attention.layer_norm_rms_epsilon", "rms_norm_eps"), ("rope.freq_base", "rope_theta")]
        {
            let number = self.config[name].as_f64().unwrap() as f32;
            values.push((format!("{architecture}.{key}"), Stored::F32(number)));
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
    fn gguf(&self, dtype: GgmlDType, extra: &[(&str, Tensor)]) -> (TempDir, Checkpoint) {
        let mut tensors = Vec::new();
        for (name, tensor) in &self.tensors {
            let heads = match name {
                _ if self.config["model_type"] != "llama" => None,
                name if name.contains("q_proj") => Some(self.size("num_attention_heads")),
                name if name.contains("k_proj") => Some(self.size("num_key_value_heads")),
                _ => None,
            };
            let tensor = heads.map_or_else(|| tensor.clone(), |heads| permuted(tensor, heads));
            let dtype = if tensor.rank() == 1 { GgmlDType::F32 } else { dtype };
            tensors.push((gguf_name(name), QTensor::quantize(&tensor, dtype).unwrap()));
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

    fn safetensors(&self) -> (TempDir, Checkpoint) {
        let dir = tempfile::tempdir().unwrap();
        let tensors: HashMap<_, _> = self.tensors.clone().into_iter().collect();
        candle_core::safetensors::save(&tensors, dir.path().join("model.safetensors")).unwrap();
        fs::write(dir.path().join("config.json"), self.config.to_string()).unwrap();
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        (dir, checkpoint)
    }
}

fn logits(checkpoint: &Checkpoint) -> Tensor {
    let ids: Vec<u32> = (0..48).map(|i| i * 7 % 96).collect();
    let ids = Tensor::new(ids, &Device::Cpu).unwrap().unsqueeze(0).unwrap();
    let mut model = Model::load(checkpoint, DType::F32, &Device::Cpu).unwrap();
    model.forward(&ids, 0).unwrap().squeeze(0).unwrap()
}

/// The logits of a model over several ranks.
fn logits_over(checkpoint: &Checkpoint, ranks: usize) -> Tensor {
    let ids: Vec<u32> = (0..48).map(|i| i * 7 % 96).collect();
    let checkpoint = checkpoint.clone();
    let logits = run(&vec![Device::Cpu; ranks], move |rank| {
        let config = Config::from_json(checkpoint.config())?;
        let mut model = Model::new(&config, VarBuilder::sharded(&checkpoint, &rank, DType::F32))?;
        let ids = Tensor::new(ids.as_slice(), rank.device())?.unsqueeze(0)?;
        Ok(model.forward(&ids, 0)?.squeeze(0)?)
    });
    logits.unwrap().remove(0)
}

/// Rows of queries and keys, which the file has in another order, are sliced in that of the model.
#[test]
fn ranks_compute_what_one_does() {
    for source in [llama(Value::Null), tiny()] {
        let (_dir, gguf) = source.gguf(GgmlDType::F16, &[]);
        for ranks in [2, 3, 4] {
            let distance = distance(&logits_over(&gguf, ranks), &logits(&gguf));
            assert!(distance.max < 3e-4, "{ranks}: {distance:?}");
        }
        let (_dir, gguf) = source.gguf(GgmlDType::Q8_0, &[]);
        for ranks in [2, 3, 4] {
            let distance = distance(&logits_over(&gguf, ranks), &logits(&gguf));
            assert!(distance.rms < 0.04 && distance.max < 0.3, "{ranks}: {distance:?}");
        }
    }
}

fn config(checkpoint: &Checkpoint) -> Config {
    Config::from_json(checkpoint.config()).unwrap()
}

#[test]
fn plain_models_compute_what_safetensors_do() {
    use GgmlDType::{BF16, F16, F32};
    for (source, dtypes) in [(llama(Value::Null), [F32, F16]), (tiny(), [F32, BF16])] {
        let (_dir, expected) = source.safetensors();
        for dtype in dtypes {
            let (_dir, gguf) = source.gguf(dtype, &[]);
            assert!(gguf.warnings().is_empty());
            assert_eq!(config(&gguf), config(&expected));
            assert_eq!(stop_tokens(&gguf).unwrap(), stop_tokens(&expected).unwrap());
            let names = |checkpoint: &Checkpoint| -> Vec<_> {
                checkpoint.tensor_names().map(str::to_owned).collect()
            };
            assert_eq!(names(&gguf), names(&expected));
            let distance = distance(&logits(&gguf), &logits(&expected));
            assert!(distance.max < 3e-4, "{dtype:?}: {distance:?}");
        }
    }
}

/// Against the same weights as plain numbers. The product of a GGML type is candle's, which rounds activations to
/// 8 bits, one scale for 32 (K types: 256) of them: an error of up to 1/254 of the largest one in each product. Measured here: 0.023 to 0.029
/// standard deviations (root mean square), 0.21 at most.
#[test]
fn quantized_models_differ_by_the_rounding_of_activations_alone() {
    use GgmlDType::{Q4K, Q4_0, Q6K, Q8_0};
    let source = tiny();
    for dtype in [Q4_0, Q8_0, Q4K, Q6K] {
        let (_dir, gguf) = source.gguf(dtype, &[]);
        let rounded = |tensor: &Tensor| match tensor.rank() {
            1 => tensor.clone(),
            _ => QTensor::quantize(tensor, dtype).unwrap().dequantize(&Device::Cpu).unwrap(),
        };
        let tensors = source.tensors.iter().map(|(name, tensor)| (name.clone(), rounded(tensor))).collect();
        let (_dir, expected) = Source { config: source.config.clone(), tensors }.safetensors();
        let distance = distance(&logits(&gguf), &logits(&expected));
        assert!(distance.rms < 0.04 && distance.max < 0.3, "{dtype:?}: {distance:?}");
    }
}

/// The divisors that llama.cpp's converter writes for llama 3.1, by its own rule.
fn divisors(factor: f64, theta: f64, head_dim: usize) -> Vec<f32> {
    let (low, high, original) = (1., 4., 8192.);
    let divisor = |pair: usize| {
        let wavelength = std::f64::consts::TAU * theta.powf(2. * pair as f64 / head_dim as f64);
        if wavelength < original / high {
            1.
        } else if wavelength > original / low {
            factor
        } else {
            let smooth = (original / wavelength - low) / (high - low);
            1. / ((1. - smooth) / factor + smooth)
        }
    };
    (0..head_dim / 2).map(|pair| divisor(pair) as f32).collect()
}

#[test]
fn divisors_of_frequencies_are_the_scaling_of_llama_3() {
    for factor in [8., 32.] {
        let scaling = json!({"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192});
        let source = llama(scaling.clone());
        let divisors = Tensor::new(divisors(factor, 500_000., 32), &Device::Cpu).unwrap();
        let (_dir, gguf) = source.gguf(GgmlDType::F32, &[("rope_freqs.weight", divisors)]);
        assert_eq!(gguf.config()["rope_scaling"], scaling);
        let (_dir, expected) = source.safetensors();
        assert_eq!(config(&gguf), config(&expected));
        assert!(gguf.tensor_names().all(|name| !name.contains("rope")));
        let distance = distance(&logits(&gguf), &logits(&expected));
        assert!(distance.max < 3e-4, "{distance:?}");
    }
    // Without a division there is no scaling.
    let ones = Tensor::ones(16, DType::F32, &Device::Cpu).unwrap();
    let (_dir, gguf) = llama(Value::Null).gguf(GgmlDType::F32, &[("rope_freqs.weight", ones)]);
    assert_eq!(gguf.config()["rope_scaling"], Value::Null);
}

#[test]
fn divisors_of_no_known_scaling_are_refused() {
    let mut odd = divisors(8., 500_000., 32);
    odd[9] *= 1.01;
    for divisors in [odd, vec![1.; 15], vec![f32::NAN; 16]] {
        let divisors = Tensor::new(divisors, &Device::Cpu).unwrap();
        let source = llama(Value::Null);
        let dir = tempfile::tempdir().unwrap();
        let tensor = QTensor::quantize(&divisors, GgmlDType::F32).unwrap();
        let metadata = source.metadata();
        let metadata: Vec<_> = metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
        let mut file = fs::File::create(dir.path().join("model.gguf")).unwrap();
        gguf_file::write(&mut file, &metadata, &[("rope_freqs.weight", &tensor)]).unwrap();
        rejected(Checkpoint::open(dir.path()), &["model.gguf", "`rope_freqs.weight`", "llama 3's scaling"]);
    }
}
