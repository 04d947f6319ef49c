//! What a GGUF file says of a model beside its weights: metadata, tokenizer, factors of the rotary embedding, by the tables of
//! the reader.

mod metadata;
mod rope;
mod same;
mod tokenizer;

use candle_quant::checkpoint::{Checkpoint, GgufForm, GgufValue, HeadRows};
use candle_quant::{Error, Result};
use candle_quant_models::Config;
use serde_json::Value;
use std::collections::BTreeMap;

pub(in crate::convert) use same::difference as difference_of_models;

/// Tensors by the names that models have, and their shapes.
pub(in crate::convert) type Shapes = BTreeMap<String, Vec<usize>>;

/// A model as GGUF files have it.
#[derive(Clone, Debug)]
pub(in crate::convert) struct GgufModel {
    form: GgufForm,
    config: Config,
}

/// What a file says of it.
pub(in crate::convert) struct Description {
    pub values: BTreeMap<String, GgufValue>,
    /// Factors of the rotary embedding, by the names of their tensors.
    pub factors: BTreeMap<&'static str, Vec<f32>>,
}

impl GgufModel {
    /// The model of a checkpoint.
    ///
    /// # Errors
    /// If its family has no form that is written here.
    pub(in crate::convert) fn of(source: &Checkpoint) -> Result<Self> {
        let config = Config::from_json(source.config())?;
        let kind = text_of(source).get("model_type").and_then(Value::as_str).unwrap_or_default();
        let form = GgufForm::of_type(kind).filter(|form| form.is_writable());
        match form {
            Some(form) => Ok(Self { form, config }),
            None => Err(Error::Unsupported {
                what: format!("{}: a model of type `{kind}` in a GGUF file", source.path().display()),
                remedy: "convert to another kind, or with llama.cpp's converter".into(),
            }),
        }
    }

    /// What a tensor is called in a file.
    pub(in crate::convert) fn name_of(&self, tensor: &str) -> Option<String> {
        self.form.name_of(tensor)
    }

    /// Whether a file has one more than each number of a tensor.
    pub(in crate::convert) fn is_sum(&self, tensor: &str) -> bool {
        self.form.is_sum(tensor)
    }

    /// The heads whose rows a file has in the order of adjacent pairs.
    pub(in crate::convert) fn paired_heads(&self, tensor: &str) -> Option<usize> {
        Some(match self.form.paired_rows(tensor)? {
            HeadRows::Queries => self.config.num_attention_heads,
            HeadRows::Keys | _ => self.config.num_key_value_heads,
        })
    }

    /// What a file of these tensors says, which a reader takes for the same model.
    ///
    /// # Errors
    /// If no file says it.
    pub(in crate::convert) fn describe(&self, source: &Checkpoint, tensors: &Shapes) -> Result<Description> {
        let mut factors = BTreeMap::new();
        let mut values = metadata::of(source, &self.config, self.form);
        rope::describe(&self.config, self.form.architecture(), &mut values, &mut factors);
        values.extend(tokenizer::of(source, tensors)?.values);
        values.extend(metadata::sampling(source)?);
        match source.gguf_values() {
            // A file has more than a config: what its converter said of it stays.
            Some(stored) => {
                let is_of_file = |key: &str| key.starts_with("split.") || OF_A_FILE.contains(&key);
                values.extend(stored.into_iter().filter(|(key, _)| !is_of_file(key)));
            }
            None => {
                let name = source.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
                values.insert("general.name".into(), GgufValue::Text(name));
            }
        }
        let mut refused = None;
        for window in metadata::windows(&self.config, self.form) {
            let mut attempt = values.clone();
            for (key, value) in window {
                attempt.entry(key).or_insert(value);
            }
            let read = GgufForm::config_of(source.path(), &attempt, tensors, &factors);
            match read.and_then(|read| Config::from_json(&read)) {
                Err(error) => refused = refused.or(Some(error)),
                Ok(read) => match same::difference(&self.config, &read) {
                    None => return Ok(Description { values: attempt, factors }),
                    Some(found) => refused = refused.or(Some(self.other(source, &found))),
                },
            }
        }
        Err(refused.unwrap_or_else(|| self.other(source, &Default::default())))
    }

    fn other(&self, source: &Checkpoint, (ours, theirs): &(String, String)) -> Error {
        Error::Unsupported {
            what: format!(
                "{}: a model of `{ours}` in a GGUF file of the architecture `{}`, which has no key for it and means `{theirs}`,",
                source.path().display(),
                self.form.architecture()
            ),
            remedy: "convert to another kind".into(),
        }
    }
}

/// What a file says of itself, not of the model.
const OF_A_FILE: [&str; 3] = ["general.alignment", "general.file_type", "general.quantization_version"];

/// What is odd about a model's tokenizer.
pub(in crate::convert) fn notes(source: &Checkpoint) -> Vec<String> {
    if source.gguf_values().is_some() {
        return Vec::new();
    }
    tokenizer::of(source, &Shapes::new()).map(|tokenizer| tokenizer.note).into_iter().flatten().collect()
}

/// What the config says of the text.
fn text_of(source: &Checkpoint) -> &Value {
    let config = source.config();
    config.get("text_config").unwrap_or(config)
}
