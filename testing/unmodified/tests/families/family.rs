//! What a family is, and what its models are given.

use candle::{Device, Result, Tensor};
use serde_json::{json, Map, Value};

/// A model, and what it is asked in each step.
pub type Run = Box<dyn FnMut(usize) -> Result<Tensor>>;

/// How many steps there are: a prompt, and tokens one by one.
pub const STEPS: usize = 3;

/// A family of models, for one of the crates that have it.
pub struct Family<V> {
    /// config.json, without what says how weights are quantized.
    pub config: Value,
    pub build: fn(&Value, V) -> Result<Run>,
    /// Tensors that the model asks for only if they exist.
    pub optional: &'static [&'static str],
    /// Ends of the names of packed weights that it reads as dense tensors, and why.
    pub read_dense: &'static [(&'static str, &'static str)],
    /// Ends of the names of packed weights whose layer it asks for a tensor to compute with, and why.
    pub copied: &'static [(&'static str, &'static str)],
}

impl<V> Family<V> {
    /// `config` is on top of a small one that serves most decoders.
    pub fn new(config: Value, build: fn(&Value, V) -> Result<Run>) -> Self {
        let mut whole = small();
        let Value::Object(config) = config else { panic!("not an object: {config}") };
        whole.extend(config);
        Self { config: whole.into(), build, optional: &[], read_dense: &[], copied: &[] }
    }

    pub fn with_optional(self, optional: &'static [&'static str]) -> Self {
        Self { optional, ..self }
    }

    pub fn with_read_dense(self, read_dense: &'static [(&'static str, &'static str)]) -> Self {
        Self { read_dense, ..self }
    }

    pub fn with_copied(self, copied: &'static [(&'static str, &'static str)]) -> Self {
        Self { copied, ..self }
    }
}

fn small() -> Map<String, Value> {
    let config = json!({
        "hidden_size": 64, "intermediate_size": 128, "vocab_size": 101, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu",
        "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 64, "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5, "layer_norm_eps": 1e-5, "norm_epsilon": 1e-5, "attention_bias": false,
        "tie_word_embeddings": false, "use_sliding_window": false, "sliding_window": 64, "max_window_layers": 2,
    });
    let Value::Object(config) = config else { unreachable!() };
    config
}

/// The config as the type that a family has for it.
pub fn parse<T: serde::de::DeserializeOwned>(config: &Value) -> Result<T> {
    serde_json::from_value(config.clone()).map_err(candle::Error::wrap)
}

/// A decoder: ids `[1, T]` and the position of the first of them in, logits out.
pub fn decoder(mut forward: impl FnMut(&Tensor, usize) -> Result<Tensor> + 'static) -> Result<Run> {
    Ok(Box::new(move |step| {
        let (ids, position) = match step {
            0 => (tokens(0..7)?, 0),
            _ => (tokens(6 + step..7 + step)?, 6 + step),
        };
        forward(&ids, position)
    }))
}

/// Some tokens of a text, `[1, T]`.
pub fn tokens(range: std::ops::Range<usize>) -> Result<Tensor> {
    let ids: Vec<u32> = range.map(|index| (index * index * 7 + index * 13 + 1) as u32 % 101).collect();
    Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)
}

/// An input that is no tokens.
pub fn input(dims: &[usize], step: usize) -> Tensor {
    crate::reference::tensor(dims, 1 + step as u64)
}
