//! A tokenizer that lies in the same files as the weights. It is returned as it is stored; text generation
//! builds it.

use crate::Error;
use candle_core::quantized::gguf_file;
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

/// What helps if it can't be built.
pub(super) const REMEDY: &str = "put the tokenizer.json of the original model beside the file";

/// A tokenizer as a checkpoint stores it.
#[derive(Debug)]
#[non_exhaustive]
pub struct StoredTokenizer {
    /// The file that it is in.
    pub path: PathBuf,
    /// The metadata of a GGUF file that describe it, checked: its tokens and what belongs to them, and the model's name.
    pub metadata: HashMap<String, gguf_file::Value>,
    /// Regular expressions that text is cut by before it is encoded, in place of what candle has for it: one after the other, each match
    /// is a piece, and so is what lies between. None of sentencepiece.
    pub patterns: &'static [&'static str],
    /// The tokens that have a purpose, by the names that Hugging Face has for it, such as `bos_token`.
    pub special_tokens: BTreeMap<String, String>,
}

impl StoredTokenizer {
    /// The error of a tokenizer that can't be built, and how to go on.
    pub fn error(&self, problem: impl Into<String>) -> Error {
        Error::file(&self.path, problem, REMEDY)
    }
}
