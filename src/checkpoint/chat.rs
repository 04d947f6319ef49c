//! Chat templates that lie in the same files as the weights. They are returned as they are stored; text generation
//! renders them.

use std::collections::BTreeMap;
use std::path::PathBuf;

/// Chat templates as a checkpoint stores them.
#[derive(Debug)]
#[non_exhaustive]
pub struct StoredChatTemplates {
    /// The file that they are in.
    pub path: PathBuf,
    /// Jinja templates by their names: `default`, and others such as `tool_use`.
    pub templates: BTreeMap<String, String>,
    /// The special tokens that templates may name, such as `bos_token`.
    pub special_tokens: BTreeMap<String, String>,
}
