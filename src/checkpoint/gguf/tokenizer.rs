//! The tokenizer inside a GGUF file: its metadata, checked, for text generation to build it from.

use super::chat::special_tokens;
use super::metadata::{Metadata, Value};
use super::pre_tokenizer::PreTokenizer;
use crate::checkpoint::tokenizer::{StoredTokenizer, REMEDY};
use crate::{Error, Result};
use candle_core::quantized::gguf_file;
use std::collections::HashMap;

/// The keys that a tokenizer is built from.
const KEYS: [&str; 16] = [
    "model",
    "tokens",
    "merges",
    "scores",
    "token_type",
    "add_space_prefix",
    "byte_fallback",
    "ignore_merges",
    "add_bos_token",
    "add_eos_token",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "sep_token_id",
    "unk_token_id",
    "unknown_token_id",
];

/// More tokens, their types and merges than this are refused. The largest vocabularies have half as many.
const MAX_ELEMENTS: usize = 1 << 21;

/// The tokenizer that `metadata` describes; `None` if it has none.
///
/// # Errors
/// If it is of a kind that is not known to be built as it should be.
pub(super) fn read(metadata: &Metadata) -> Result<Option<StoredTokenizer>> {
    let Some(model) = metadata.text("tokenizer.ggml.model")? else {
        return Ok(None);
    };
    let pre = match (model, metadata.text("tokenizer.ggml.pre")?) {
        ("gpt2", Some(name)) => PreTokenizer::of(name)
            .ok_or_else(|| unsupported(metadata, &format!("the pre-tokenizer `{name}`")))?,
        ("gpt2", None) => return Err(unsupported(metadata, "a tokenizer without a named pre-tokenizer")),
        ("llama", _) => PreTokenizer::SENTENCEPIECE,
        _ => return Err(unsupported(metadata, &format!("a tokenizer of model `{model}`"))),
    };
    let mut values = HashMap::new();
    let mut elements = 0;
    for key in KEYS.map(|key| format!("tokenizer.ggml.{key}")) {
        if let Some(value) = metadata.get(&key) {
            if let Value::Array(array) = value {
                elements += array.len;
            }
            if elements > MAX_ELEMENTS {
                return Err(unsupported(
                    metadata,
                    &format!("a tokenizer of more than {MAX_ELEMENTS} tokens and merges"),
                ));
            }
            let value = convert(value).ok_or_else(|| {
                unsupported(metadata, &format!("a tokenizer whose `{key}` is of another type"))
            })?;
            values.insert(key, value);
        }
    }
    values.insert("tokenizer.ggml.pre".into(), gguf_file::Value::String(pre.pipeline().into()));
    for key in pre.assumed {
        values.entry(format!("tokenizer.ggml.{key}")).or_insert(gguf_file::Value::Bool(true));
    }
    if let Some(name) = metadata.text("general.name")? {
        values.insert("general.name".into(), gguf_file::Value::String(name.into()));
    }
    Ok(Some(StoredTokenizer {
        path: metadata.path.to_path_buf(),
        metadata: values,
        patterns: pre.patterns,
        special_tokens: special_tokens(metadata)?,
    }))
}

fn unsupported(metadata: &Metadata, what: &str) -> Error {
    Error::Unsupported { what: format!("{}: {what}", metadata.path.display()), remedy: REMEDY.into() }
}

fn convert(value: &Value) -> Option<gguf_file::Value> {
    use gguf_file::Value as Candle;
    let id = |number: i128| u32::try_from(number).ok().map(Candle::U32);
    Some(match value {
        Value::Integer(number) => id(*number)?,
        Value::Bool(value) => Candle::Bool(*value),
        Value::Text(text) => Candle::String(text.clone()),
        Value::Float(_) => return None,
        Value::Array(array) => Candle::Array(match (array.texts(), array.floats()) {
            (Some(texts), _) => texts.into_iter().map(|text| Candle::String(text.to_owned())).collect(),
            (None, Some(numbers)) => numbers.map(Candle::F32).collect(),
            (None, None) => array.integers()?.map(id).collect::<Option<_>>()?,
        }),
    })
}
