//! The tokenizer inside a GGUF file, which candle builds from metadata that the reader has checked.

use super::caught::caught;
use super::text::try_out;
use candle_core::quantized::gguf_file;
use candle_core::quantized::tokenizer::TokenizerFromGguf;
use candle_quant::{Checkpoint, Result};
use std::collections::HashMap;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::Tokenizer;

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
    if stored.without_prefix_space {
        // candle's has a space put before the text.
        tokenizer.with_pre_tokenizer(Some(ByteLevel::default().add_prefix_space(false)));
    }
    try_out(&tokenizer).map_err(damaged)?;
    Ok(Some(tokenizer))
}
