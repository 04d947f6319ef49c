//! The tokenizer inside a GGUF file, from metadata that the reader has checked: candle builds those of bytes.

use super::caught::caught;
use super::sentencepiece::{self, NORMAL, USER_DEFINED};
use super::text::try_out;
use candle_core::quantized::gguf_file;
use candle_core::quantized::tokenizer::TokenizerFromGguf;
use candle_quant::{Checkpoint, Result};
use std::collections::HashMap;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::{AddedToken, SplitDelimiterBehavior, Tokenizer};

const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";

/// The tokenizer that lies in the same files as the weights, if there is one: GGUF files have one.
///
/// # Errors
/// If it is damaged, or of a kind that is not known to be built as it should be.
pub fn stored_tokenizer(checkpoint: &Checkpoint) -> Result<Option<Tokenizer>> {
    const MODEL: &str = "tokenizer.ggml.model";
    let Some(mut stored) = checkpoint.stored_tokenizer()? else {
        return Ok(None);
    };
    let content = gguf_file::Content {
        magic: gguf_file::VersionedMagic::GgufV3,
        metadata: std::mem::take(&mut stored.metadata),
        tensor_infos: HashMap::new(),
        tensor_data_offset: 0,
    };
    let damaged = |problem: String| stored.error(format!("the tokenizer in it is damaged: {problem}"));
    let built = caught(|| match content.metadata.get(MODEL) {
        Some(gguf_file::Value::String(model)) if model == "llama" => sentencepiece::build(&content.metadata),
        _ => byte_level(content, stored.patterns),
    });
    let tokenizer = built.map_err(damaged)?.map_err(|error| damaged(error.to_string()))?;
    try_out(&tokenizer).map_err(damaged)?;
    Ok(Some(tokenizer))
}

/// Candle's, which knows no patterns but its own, and takes tokens that a text may have for special ones, which are left out of texts:
/// `<think>` of Qwen 3 is one.
fn byte_level(mut content: gguf_file::Content, patterns: &[&str]) -> tokenizers::Result<Tokenizer> {
    let mut places = Vec::new();
    if let Some(gguf_file::Value::Array(types)) = content.metadata.get_mut(TYPES) {
        for (place, kind) in types.iter_mut().enumerate() {
            if matches!(kind, gguf_file::Value::U32(USER_DEFINED)) {
                *kind = gguf_file::Value::U32(NORMAL);
                places.push(place);
            }
        }
    }
    let mut added = Vec::new();
    if let Some(gguf_file::Value::Array(tokens)) = content.metadata.get(TOKENS) {
        for token in places.into_iter().filter_map(|place| tokens.get(place)) {
            added.push(AddedToken::from(token.to_string()?.clone(), false).normalized(false));
        }
    }
    let mut tokenizer = Tokenizer::from_gguf(&content)?;
    tokenizer.with_pre_tokenizer(Some(cutting(patterns)?));
    tokenizer.add_tokens(added)?;
    Ok(tokenizer)
}

/// Cuts text by patterns, one after the other, and makes letters of its bytes.
fn cutting(patterns: &[&str]) -> tokenizers::Result<Sequence> {
    let split = |pattern: &&str| {
        let split =
            Split::new(SplitPattern::Regex((*pattern).to_owned()), SplitDelimiterBehavior::Isolated, false);
        split.map(PreTokenizerWrapper::from)
    };
    let mut steps = patterns.iter().map(split).collect::<tokenizers::Result<Vec<_>>>()?;
    steps.push(ByteLevel::default().add_prefix_space(false).use_regex(false).into());
    Ok(Sequence::new(steps))
}
