//! A byte-level BPE tokenizer learned from the stories.

use anyhow::{anyhow, ensure, Context, Result};
use std::path::Path;
use tokenizers::models::bpe::{BpeTrainerBuilder, BPE};
use tokenizers::models::TrainerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer};

/// Ends a story and, in training, stands before its first word.
pub const END_OF_TEXT: &str = "<|endoftext|>";

/// Learns `vocab_size` tokens: the end-of-text token (id 0), the 256 bytes, then the most frequent merges.
pub fn train(stories: &[String], vocab_size: usize) -> Result<Tokenizer> {
    let mut tokenizer = Tokenizer::new(BPE::default());
    tokenizer
        .with_pre_tokenizer(Some(ByteLevel::new(false, true, true)))
        .with_post_processor(Some(ByteLevel::new(false, false, true)))
        .with_decoder(Some(ByteLevel::default()));
    let mut trainer: TrainerWrapper = BpeTrainerBuilder::new()
        .show_progress(false)
        .vocab_size(vocab_size)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .special_tokens(vec![AddedToken::from(END_OF_TEXT, true)])
        .build()
        .into();
    tokenizer.train(&mut trainer, stories.iter()).map_err(|e| anyhow!("training the tokenizer: {e}"))?;
    let found = tokenizer.get_vocab_size(true);
    ensure!(
        found == vocab_size,
        "the tokenizer has {found} tokens, expected {vocab_size}: give it more text"
    );
    Ok(tokenizer)
}

/// The id of [`END_OF_TEXT`].
pub fn end_of_text(tokenizer: &Tokenizer) -> Result<u32> {
    tokenizer.token_to_id(END_OF_TEXT).context("the tokenizer has no end-of-text token")
}

pub fn encode(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>> {
    let encoding = tokenizer.encode(text, false).map_err(|e| anyhow!("tokenizing {text:?}: {e}"))?;
    Ok(encoding.get_ids().to_vec())
}

pub fn decode(tokenizer: &Tokenizer, ids: &[u32]) -> Result<String> {
    tokenizer.decode(ids, true).map_err(|e| anyhow!("decoding tokens: {e}"))
}

/// Writes `tokenizer.json` and the `tokenizer_config.json` that transformers and mlx-lm read.
pub fn save(tokenizer: &Tokenizer, folder: &Path, context: usize) -> Result<()> {
    tokenizer
        .save(folder.join("tokenizer.json"), true)
        .map_err(|e| anyhow!("writing tokenizer.json: {e}"))?;
    let config = serde_json::json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "add_bos_token": false,
        "add_prefix_space": false,
        "clean_up_tokenization_spaces": false,
        "model_max_length": context,
    });
    crate::export::write_json(&folder.join("tokenizer_config.json"), &config)
}
