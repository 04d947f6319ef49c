//! The numbers of a model that an SLM1 file states.

use serde_json::{json, Value};

/// The only model type with known tensors: a decoder of the llama family.
pub(super) const DECODER: u32 = 1;

/// The flag of a head that is the embedding.
pub(super) const TIED: u32 = 1;

/// What an SLM1 file says of a decoder of the llama family.
#[derive(Clone, Debug, PartialEq)]
pub struct Slm1Model {
    /// Whether the embedding is the head.
    pub is_tied: bool,
    /// Rows of the embedding.
    pub vocab_size: u32,
    /// Columns of the embedding.
    pub hidden_size: u32,
    /// Layers.
    pub layer_count: u32,
    /// Heads of queries.
    pub head_count: u32,
    /// Heads of keys and values.
    pub kv_head_count: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// Rows of the gate.
    pub ffn_size: u32,
    /// The most tokens that it was made for.
    pub max_context: u32,
    /// The base of the rotary embedding.
    pub rope_theta: f32,
    /// What norms add to the mean square.
    pub rms_norm_epsilon: f32,
}

/// The tokenizer of an SLM1 file, as it stands there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Slm1Tokenizer {
    /// Its section; empty if there is none.
    pub section: Vec<u8>,
    /// How many special tokens the header says that there are.
    pub special_tokens: u32,
}

impl Slm1Model {
    /// What a `config.json` would say; `tokens` are those that begin and end a text, if they are known.
    pub fn config(&self, tokens: Option<(u32, u32)>) -> Value {
        // The decimal that was written, not the binary fraction that it became: 1e-5 stays 1e-5.
        let decimal = |number: f32| number.to_string().parse::<f64>().ok();
        json!({
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.ffn_size,
            "num_hidden_layers": self.layer_count,
            "num_attention_heads": self.head_count,
            "num_key_value_heads": self.kv_head_count,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_context,
            "rms_norm_eps": decimal(self.rms_norm_epsilon),
            "rope_theta": decimal(self.rope_theta),
            "hidden_act": "silu",
            "tie_word_embeddings": self.is_tied,
            "bos_token_id": tokens.map(|(bos, _)| bos),
            "eos_token_id": tokens.map(|(_, eos)| eos),
        })
    }
}
