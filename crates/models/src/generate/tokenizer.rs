//! The tokenizer inside a GGUF file, which candle builds from metadata that the reader has checked.

use super::caught::caught;
use super::text::try_out;
use candle_core::quantized::gguf_file;
use candle_core::quantized::tokenizer::TokenizerFromGguf;
use candle_quant::{Checkpoint, Result};
use std::collections::HashMap;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::{SplitDelimiterBehavior, Tokenizer};

/// The tokenizer that lies in the same files as the weights, if there is one: GGUF files have one.
///
/// # Errors
/// If it is damaged, or of a kind that is not known to be built as it should be.
pub fn stored_tokenizer(checkpoint: &Checkpoint) -> Result<Option<Tokenizer>> {
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
    let built = caught(|| Tokenizer::from_gguf(&content)).map_err(damaged)?;
    let mut tokenizer = built.map_err(|error| damaged(error.to_string()))?;
    tokenizer.with_pre_tokenizer(Some(cutting(stored.patterns).map_err(|error| damaged(error.to_string()))?));
    try_out(&tokenizer).map_err(damaged)?;
    Ok(Some(tokenizer))
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
