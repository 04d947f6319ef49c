//! The chat templates in a GGUF file's metadata, and the tokens that they name.

use super::metadata::{Metadata, Value};
use crate::checkpoint::chat::StoredChatTemplates;
use crate::Result;
use std::collections::BTreeMap;

const TEMPLATE: &str = "tokenizer.chat_template";

/// Special tokens by the names that templates use, and the names that the file uses.
const SPECIAL_TOKENS: [(&str, &str); 4] =
    [("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"), ("unk_token", "unknown")];

/// The templates of `metadata`; `None` if it has none.
///
/// # Errors
/// If one is no text.
pub(super) fn read(metadata: &Metadata) -> Result<Option<StoredChatTemplates>> {
    let mut stored = StoredChatTemplates {
        path: metadata.path.to_path_buf(),
        templates: Default::default(),
        special_tokens: Default::default(),
    };
    for key in metadata.values.keys() {
        let name = match key.strip_prefix(TEMPLATE) {
            Some("") => "default",
            Some(rest) => match rest.strip_prefix('.') {
                Some(name) => name,
                None => continue,
            },
            None => continue,
        };
        if let Some(template) = metadata.text(key)? {
            stored.templates.insert(name.to_owned(), template.to_owned());
        }
    }
    if stored.templates.is_empty() {
        return Ok(None);
    }
    stored.special_tokens = special_tokens(metadata)?;
    Ok(Some(stored))
}

/// The special tokens of `metadata`, by the names that templates use.
///
/// # Errors
/// If an id is no whole number.
pub(super) fn special_tokens(metadata: &Metadata) -> Result<BTreeMap<String, String>> {
    let tokens = match metadata.get("tokenizer.ggml.tokens") {
        Some(Value::Array(tokens)) => tokens.texts().unwrap_or_default(),
        _ => Vec::new(),
    };
    let mut special = BTreeMap::new();
    for (name, key) in SPECIAL_TOKENS {
        let id = metadata.size(&format!("tokenizer.ggml.{key}_token_id"))?;
        let token = id.and_then(|id| tokens.get(usize::try_from(id).ok()?));
        special.extend(token.map(|token| (name.to_owned(), (*token).to_owned())));
    }
    Ok(special)
}
