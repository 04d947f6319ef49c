//! The files beside the weights: what a program that generates text would read of them.

use super::report::Finding;
use candle_quant::checkpoint::Checkpoint;
use candle_quant::Error;
use candle_quant_models::generate;

/// JSON files that belong to a model, beside its config and its tokenizer.
const FILES: [&str; 8] = [
    "adapter_config.json",
    "added_tokens.json",
    "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
];

/// Reads them as far as they are there, and tries the tokenizer out.
pub(super) fn check(checkpoint: &Checkpoint) -> Vec<Finding> {
    let mut errors: Vec<_> = FILES.iter().filter_map(|file| checkpoint.read_json(file).err()).collect();
    // What can't be read has been told.
    if errors.is_empty() {
        errors.extend(generate::stop_tokens(checkpoint).err());
    }
    errors.extend(tokenizer(checkpoint));
    errors.iter().map(|error| Finding::from_error(None, error)).collect()
}

/// What is wrong with the tokenizer, if there is one. That one in the file of the weights is of a kind that is not built
/// here is nothing wrong.
#[allow(clippy::wildcard_enum_match_arm, reason = "all other errors are of the tokenizer")]
fn tokenizer(checkpoint: &Checkpoint) -> Option<Error> {
    if checkpoint.tokenizer_file().is_some() {
        return generate::load_tokenizer(checkpoint).err();
    }
    match generate::stored_tokenizer(checkpoint) {
        Ok(_) | Err(Error::Unsupported { .. }) => None,
        Err(error) => Some(error),
    }
}
