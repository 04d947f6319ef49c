//! What distinguishes one decoder-only model from another.

use super::fields::{is_positive, Fields, POSITIVE};
use super::moe::MoeConfig;
use super::rope::{Rope, RopeScaling};
use candle_nn::Activation;
use candle_quant::{Checkpoint, Error, Result};
use serde::Deserialize;
use serde_json::Value;

/// The shape of a decoder-only model. Read from a checkpoint's `config.json`, or made by hand.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Rows of the embedding and of the output head.
    pub vocab_size: usize,
    /// Elements of a token's hidden state.
    pub hidden_size: usize,
    /// Elements inside the feed-forward block.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; divides the number of query heads.
    pub num_key_value_heads: usize,
    /// Elements of a head; even.
    pub head_dim: usize,
    /// The context the model was made for, in tokens, before it is stretched: see [`context`](Config::context).
    pub max_position_embeddings: usize,
    /// Added to the mean square in every norm.
    pub rms_norm_eps: f64,
    /// Rotary position embedding.
    pub rope: Rope,
    /// Whether query, key and value projections have biases.
    pub qkv_bias: bool,
    /// Whether the attention's output projection has a bias.
    pub output_bias: bool,
    /// Whether the feed-forward projections have biases.
    pub mlp_bias: bool,
    /// Whether queries and keys are normalized, head by head.
    pub qk_norm: bool,
    /// The feed-forward block's non-linearity.
    pub hidden_act: Activation,
    /// Tokens a query of a sliding layer sees, its own included.
    pub sliding_window: Option<usize>,
    /// For each layer, whether the sliding window applies to it.
    pub sliding_layers: Vec<bool>,
    /// Whether every query head has a logit of its own beside those of the keys.
    pub attention_sinks: bool,
    /// The experts, if there are any.
    pub moe: Option<MoeConfig>,
    /// Whether the head shares the embedding's weight; `None`: if the checkpoint has no head.
    pub tie_word_embeddings: Option<bool>,
}

impl Config {
    /// Reads the config of a checkpoint.
    ///
    /// # Errors
    /// As those of [`from_json`](Config::from_json), with the path of the file.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Self> {
        let (config, path) = (checkpoint.config(), checkpoint.config_file());
        if config.is_null() {
            let problem = if path.is_file() { "no config in it" } else { "no such file" };
            return Err(Error::file(&path, problem, "put the model's beside the weights"));
        }
        Self::read(config).map_err(|error| match error {
            Error::Mismatch { what, expected, found } => Error::file(
                &path,
                format!("{what}: expected {expected}, found {found}"),
                "fetch it again, or correct it",
            ),
            Error::Unsupported { what, remedy } => {
                Error::Unsupported { what: format!("{what} ({})", path.display()), remedy }
            }
            other => other,
        })
    }

    /// Reads a `config.json`. Of one that belongs to an open checkpoint, [`from_checkpoint`](Config::from_checkpoint)
    /// tells more if something is wrong.
    ///
    /// # Errors
    /// If the architecture is not one of this module's, or a value is missing or senseless.
    pub fn from_json(config: &Value) -> Result<Self> {
        if config.is_null() {
            return Err(Error::mismatch("config.json", "the model's, beside the weights", "no such file"));
        }
        Self::read(config).map_err(|error| match error {
            Error::Mismatch { what, expected, found } => {
                Error::Mismatch { what: format!("config.json: {what}"), expected, found }
            }
            other => other,
        })
    }

    /// Errors don't name the file.
    fn read(config: &Value) -> Result<Self> {
        let fields = Fields::new(config);
        let model_type = fields
            .text("model_type")?
            .ok_or_else(|| Error::mismatch("`model_type`", "a string", "nothing"))?;
        const KNOWN: [&str; 7] = ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gpt_oss"];
        if !KNOWN.contains(&model_type) {
            return Err(Error::Unsupported {
                what: format!("model type `{model_type}`"),
                remedy: format!("supported are {}", KNOWN.join(", ")),
            });
        }
        let hidden_size = fields.required_size("hidden_size")?;
        let num_attention_heads = fields.required_size("num_attention_heads")?;
        let num_hidden_layers = fields.required_size("num_hidden_layers")?;
        let head_dim = match (fields.size("head_dim")?, model_type) {
            (Some(head_dim), _) => head_dim,
            (None, "qwen3" | "qwen3_moe") => 128,
            (None, "gpt_oss") => 64,
            (None, _) => hidden_size / num_attention_heads,
        };
        let (sliding_window, sliding_layers) = sliding(fields, model_type, num_hidden_layers)?;
        let attention_bias = fields.flag("attention_bias")?.unwrap_or(model_type == "gpt_oss");
        let hidden_act = activation(fields)?;
        let config = Self {
            vocab_size: fields.required_size("vocab_size")?,
            hidden_size,
            intermediate_size: fields.required_size("intermediate_size")?,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads: fields.size("num_key_value_heads")?.unwrap_or(num_attention_heads),
            head_dim,
            max_position_embeddings: fields.size("max_position_embeddings")?.unwrap_or(match model_type {
                "mistral" | "mixtral" | "gpt_oss" => 131_072,
                "qwen2" | "qwen3" | "qwen3_moe" => 32_768,
                _ => 2048,
            }),
            rms_norm_eps: fields.positive("rms_norm_eps")?.unwrap_or(match model_type {
                "mixtral" | "gpt_oss" => 1e-5,
                _ => 1e-6,
            }),
            rope: Rope::from_json(config)?,
            qkv_bias: attention_bias || model_type == "qwen2",
            output_bias: attention_bias && model_type != "qwen2",
            mlp_bias: fields.flag("mlp_bias")?.unwrap_or(false),
            qk_norm: matches!(model_type, "qwen3" | "qwen3_moe"),
            attention_sinks: model_type == "gpt_oss",
            moe: MoeConfig::from_fields(fields, model_type, num_hidden_layers, hidden_act)?,
            hidden_act,
            sliding_window,
            sliding_layers,
            tie_word_embeddings: fields.flag("tie_word_embeddings")?,
        };
        config.validate()?;
        Ok(config)
    }

    /// Checks how the values relate to each other.
    ///
    /// # Errors
    /// If a size is zero, heads don't divide, a number is not finite, and the like.
    pub fn validate(&self) -> Result<()> {
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim),
            ("sliding_window", self.sliding_window.unwrap_or(1)),
        ];
        for (name, size) in sizes {
            if size == 0 {
                return Err(Error::mismatch(format!("`{name}`"), "at least 1", "0"));
            }
        }
        if !self.num_attention_heads.is_multiple_of(self.num_key_value_heads) {
            return Err(Error::mismatch(
                "`num_key_value_heads`",
                format!("a divisor of the {} attention heads", self.num_attention_heads),
                self.num_key_value_heads.to_string(),
            ));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(Error::mismatch("`head_dim`", "an even number", self.head_dim.to_string()));
        }
        if self.num_attention_heads.checked_mul(self.head_dim).is_none() {
            return Err(Error::mismatch(
                "`num_attention_heads` times `head_dim`",
                "a number that fits the address space",
                format!("{} times {}", self.num_attention_heads, self.head_dim),
            ));
        }
        if !is_positive(self.rms_norm_eps) {
            return Err(Error::mismatch("`rms_norm_eps`", POSITIVE, self.rms_norm_eps.to_string()));
        }
        if self.sliding_layers.len() != self.num_hidden_layers {
            return Err(Error::mismatch(
                "`sliding_layers`",
                format!("one entry for each of {} layers", self.num_hidden_layers),
                self.sliding_layers.len().to_string(),
            ));
        }
        if let Some(moe) = &self.moe {
            moe.validate(self.num_hidden_layers)?;
        }
        self.rope.validate()
    }

    /// The tokens of the longest text that the model is made for: `max_position_embeddings`, or more where `rope` stretches
    /// what it was trained with. Llama 3's scaling is in `max_position_embeddings` already.
    pub fn context(&self) -> usize {
        let stretched = match self.rope.scaling {
            RopeScaling::None | RopeScaling::Llama3 { .. } => 0.,
            RopeScaling::Linear { factor } => self.max_position_embeddings as f64 * factor,
            RopeScaling::Yarn { factor, original_max_position_embeddings, .. } => {
                original_max_position_embeddings as f64 * factor
            }
        };
        self.max_position_embeddings.max(stretched as usize)
    }

    /// The K of a linear or embedding module by its path, `model.layers.0.mlp.down_proj` for example;
    /// `None` if the model has no such module. Tells formats apart where shapes alone don't.
    pub fn in_features(&self, module: &str) -> Option<usize> {
        let of_expert = || module.contains("experts.") || module.contains("switch_mlp.");
        match (module.rsplit('.').next()?, &self.moe) {
            ("embed_tokens" | "lm_head" | "q_proj" | "k_proj" | "v_proj" | "gate_proj" | "up_proj", _) => {
                Some(self.hidden_size)
            }
            ("o_proj", _) => self.num_attention_heads.checked_mul(self.head_dim),
            ("down_proj" | "w2", Some(moe)) if of_expert() => Some(moe.intermediate_size),
            ("gate_up_proj" | "w1" | "w3", Some(_)) if of_expert() => Some(self.hidden_size),
            ("gate" | "router", Some(_)) => Some(self.hidden_size),
            ("down_proj", _) => Some(self.intermediate_size),
            _ => None,
        }
    }

    /// Whether the sliding window, if there is one, applies to layer `index`.
    pub(super) fn slides(&self, index: usize) -> bool {
        self.sliding_layers.get(index).copied().unwrap_or(false)
    }
}

/// The window and which layers have it. Absent values mean what they mean in transformers.
fn sliding(fields: Fields, model_type: &str, num_hidden_layers: usize) -> Result<(Option<usize>, Vec<bool>)> {
    const DEFAULT_WINDOW: usize = 4096;
    let everywhere = |on: bool| vec![on; num_hidden_layers];
    let window = fields.size("sliding_window")?;
    match model_type {
        // An explicit null switches Mistral's window off, a missing key does not.
        "mistral" => {
            let window = match fields.has("sliding_window") {
                true => window,
                false => Some(DEFAULT_WINDOW),
            };
            Ok((window, everywhere(true)))
        }
        "qwen2" | "qwen3" | "qwen3_moe" if fields.flag("use_sliding_window")?.unwrap_or(false) => {
            let first = fields.index("max_window_layers")?.unwrap_or(28);
            let layers = match layer_types(fields, num_hidden_layers)? {
                Some(layers) => layers,
                None => (0..num_hidden_layers).map(|layer| layer >= first).collect(),
            };
            Ok((Some(window.unwrap_or(DEFAULT_WINDOW)), layers))
        }
        "mixtral" => Ok((window, everywhere(true))),
        "gpt_oss" => {
            let alternating = || (0..num_hidden_layers).map(|layer| layer % 2 == 0).collect();
            let layers = layer_types(fields, num_hidden_layers)?.unwrap_or_else(alternating);
            Ok((Some(window.unwrap_or(128)), layers))
        }
        "llama" => {
            let layers = layer_types(fields, num_hidden_layers)?;
            Ok((window, layers.unwrap_or_else(|| everywhere(false))))
        }
        _ => Ok((None, everywhere(false))),
    }
}

/// `layer_types`, if present: for each layer, whether it is a sliding one.
fn layer_types(fields: Fields, num_hidden_layers: usize) -> Result<Option<Vec<bool>>> {
    let Some(value) = fields.get("layer_types") else { return Ok(None) };
    let layers = value.as_array().and_then(|layers| {
        layers
            .iter()
            .map(|layer| match layer.as_str() {
                Some("sliding_attention") => Some(true),
                Some("full_attention") => Some(false),
                _ => None,
            })
            .collect::<Option<Vec<_>>>()
    });
    match layers {
        Some(layers) if layers.len() == num_hidden_layers => Ok(Some(layers)),
        _ => Err(fields.error(
            "layer_types",
            format!("{num_hidden_layers} times `full_attention` or `sliding_attention`"),
            value,
        )),
    }
}

fn activation(fields: Fields) -> Result<Activation> {
    match fields.get("hidden_act") {
        None => Ok(Activation::Silu),
        Some(value) => Activation::deserialize(value)
            .map_err(|_| fields.error("hidden_act", "a known activation, such as silu", value)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Model;
    use candle_core::{DType, Device};
    use serde_json::json;

    fn base() -> Value {
        json!({"model_type": "llama", "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256,
            "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2})
    }

    /// The window of a layer.
    fn window(config: &Config, layer: usize) -> Option<usize> {
        config.sliding_window.filter(|_| config.slides(layer))
    }

    fn with(changes: Value) -> Result<Config> {
        let mut config = base();
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        Config::from_json(&config)
    }

    #[test]
    fn the_families_differ_where_they_should() {
        let llama = with(json!({})).unwrap();
        assert_eq!((llama.head_dim, llama.qkv_bias, llama.qk_norm), (32, false, false));
        assert_eq!(window(&llama, 0), None);
        let mistral = with(json!({"model_type": "mistral"})).unwrap();
        assert_eq!(window(&mistral, 2), Some(4096));
        let mistral = with(json!({"model_type": "mistral", "sliding_window": null})).unwrap();
        assert_eq!(window(&mistral, 2), None);
        let qwen2 = with(json!({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": true,
            "max_window_layers": 1}))
        .unwrap();
        assert_eq!((qwen2.qkv_bias, qwen2.output_bias), (true, false));
        assert_eq!([0, 1, 2].map(|layer| window(&qwen2, layer)), [None, Some(8), Some(8)]);
        let qwen3 = with(json!({"model_type": "qwen3", "sliding_window": 8})).unwrap();
        assert_eq!((qwen3.qk_norm, qwen3.head_dim, window(&qwen3, 2)), (true, 128, None));
    }

    #[test]
    fn senseless_values_are_refused_by_name() {
        for (changes, name) in [
            (json!({"hidden_size": 0}), "hidden_size"),
            (json!({"hidden_size": -128}), "hidden_size"),
            (json!({"hidden_size": 1e300}), "hidden_size"),
            (json!({"vocab_size": u64::MAX}), "vocab_size"),
            (json!({"num_hidden_layers": null}), "num_hidden_layers"),
            (json!({"num_key_value_heads": 3}), "num_key_value_heads"),
            (json!({"head_dim": 31}), "head_dim"),
            (json!({"rms_norm_eps": "1e-6"}), "rms_norm_eps"),
            (json!({"rms_norm_eps": -1.0}), "rms_norm_eps"),
            (json!({"rms_norm_eps": 0.0}), "rms_norm_eps"),
            // Infinite and zero as f32.
            (json!({"rms_norm_eps": 1e300}), "`rms_norm_eps`: expected a finite number above zero"),
            (json!({"rms_norm_eps": 5e-324}), "rms_norm_eps"),
            (json!({"rope_theta": 0}), "rope_theta"),
            (json!({"rope_theta": 1e300}), "rope_theta"),
            (json!({"rope_theta": 5e-324}), "`rope_theta`: expected a finite number above zero"),
            (json!({"rope_scaling": {"rope_type": "linear", "factor": 1e39}}), "rope_scaling: `factor`"),
            (json!({"hidden_act": "sharp"}), "hidden_act"),
            (json!({"attention_bias": 1}), "attention_bias"),
            (json!({"layer_types": ["full_attention"]}), "layer_types"),
            (json!({"model_type": "mamba"}), "mamba"),
            (json!({"model_type": null}), "model_type"),
            (json!({"rope_scaling": {"rope_type": "llama3"}}), "factor"),
        ] {
            let error = with(changes.clone()).unwrap_err().to_string();
            assert!(error.contains(name), "{changes}: {error}");
        }
    }

    #[test]
    fn hand_made_numbers_have_to_be_numbers_as_f32() {
        let config = with(json!({})).unwrap();
        for number in [0., -1., f64::NAN, f64::INFINITY, 1e300, 5e-324] {
            let error = Config { rms_norm_eps: number, ..config.clone() }.validate().unwrap_err().to_string();
            assert!(error.contains("`rms_norm_eps`: expected a finite number above zero"), "{error}");
            let rope = Rope { theta: number, ..config.rope.clone() };
            let error = Config { rope, ..config.clone() }.validate().unwrap_err().to_string();
            assert!(error.contains("`rope_theta`: expected a finite number above zero"), "{error}");
        }
    }

    /// What is missing, of the wrong type, contradictory or not supported, in the file or an object in it.
    #[test]
    fn errors_of_a_checkpoint_name_its_config_file() {
        let load = |config: Option<&Value>| {
            let dir = tempfile::tempdir().unwrap();
            std::fs::copy("assets/tiny/model.safetensors", dir.path().join("model.safetensors")).unwrap();
            let file = dir.path().join("config.json");
            if let Some(config) = config {
                std::fs::write(&file, config.to_string()).unwrap();
            }
            let checkpoint = Checkpoint::open(dir.path()).unwrap();
            let message = Config::from_checkpoint(&checkpoint).unwrap_err().to_string();
            let loading = Model::load(&checkpoint, DType::F32, &Device::Cpu).unwrap_err().to_string();
            assert!(loading.starts_with(&message), "{loading}");
            (file.display().to_string(), message)
        };
        let again = "fetch it again, or correct it";
        for (changes, message) in [
            (json!({"hidden_size": -1}), "`hidden_size`: expected an integer from 1 to 16777216, found -1"),
            (json!({"vocab_size": null}), "`vocab_size`: expected an integer, found nothing"),
            (json!({"head_dim": 31}), "`head_dim`: expected an even number, found 31"),
            (
                json!({"rope_scaling": {"rope_type": "linear", "factor": 0}}),
                "rope_scaling: `factor`: expected a finite number above zero, in f32, found 0",
            ),
        ] {
            let mut config = base();
            config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
            let (file, found) = load(Some(&config));
            assert_eq!(found, format!("{file}: {message}; {again}"));
        }
        let (file, found) = load(Some(&json!({"model_type": "mamba"})));
        assert!(found.starts_with(&format!("model type `mamba` ({file}) is not supported; ")), "{found}");
        let (file, found) = load(None);
        assert_eq!(found, format!("{file}: no such file; put the model's beside the weights"));
        let (file, found) = load(Some(&Value::Null));
        assert_eq!(found, format!("{file}: no config in it; put the model's beside the weights"));
    }

    #[test]
    fn the_context_is_what_the_scaling_makes_of_it() {
        for (changes, context) in [
            (json!({}), 2048),
            (json!({"model_type": "qwen3"}), 32_768),
            (json!({"model_type": "mistral"}), 131_072),
            (json!({"max_position_embeddings": 300}), 300),
            (
                json!({"max_position_embeddings": 131_072, "rope_scaling": {"rope_type": "llama3", "factor": 32.,
                    "original_max_position_embeddings": 8192}}),
                131_072,
            ),
            (json!({"max_position_embeddings": 300, "rope_scaling": {"type": "linear", "factor": 2.5}}), 750),
            (json!({"max_position_embeddings": 300, "rope_scaling": {"type": "linear", "factor": 0.5}}), 300),
            (
                json!({"max_position_embeddings": 32_768, "rope_scaling": {"type": "yarn", "factor": 4.,
                    "original_max_position_embeddings": 32_768}}),
                131_072,
            ),
            (
                json!({"max_position_embeddings": 131_072, "rope_scaling": {"type": "yarn", "factor": 32.,
                    "original_max_position_embeddings": 4096}}),
                131_072,
            ),
            (
                json!({"max_position_embeddings": 4, "rope_scaling": {"type": "linear", "factor": 1e38}}),
                usize::MAX,
            ),
        ] {
            assert_eq!(with(changes.clone()).unwrap().context(), context, "{changes}");
        }
    }

    #[test]
    fn a_missing_file_is_told() {
        let error = Config::from_json(&Value::Null).unwrap_err().to_string();
        assert!(error.contains("config.json") && error.contains("no such file"), "{error}");
    }

    #[test]
    fn in_features_follow_the_module() {
        let config = with(json!({"head_dim": 64})).unwrap();
        let k = |module| config.in_features(module);
        assert_eq!(k("model.layers.0.self_attn.o_proj"), Some(256));
        assert_eq!(k("model.layers.0.mlp.down_proj"), Some(256));
        assert_eq!(k("lm_head"), Some(128));
        assert_eq!(k("model.norm"), None);
    }
}
