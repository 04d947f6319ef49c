//! What a reader of one kind of checkpoint provides.

use super::chat::StoredChatTemplates;
use super::file::Digest;
use super::gguf::GgufValue;
use super::kind::CheckpointKind;
use super::sidecar::SidecarFiles;
use super::slm1::Slm1Tokenizer;
use super::tokenizer::StoredTokenizer;
use super::weight::{DenseTensor, Weight};
use crate::format::UqffType;
use crate::{Error, Result};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The tensors of an open checkpoint, by the names that models use.
pub(super) trait Container: Send + Sync {
    /// The names of all tensors, sorted. A quantized weight counts as one: its parts have no names.
    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_>;

    /// Whether [`names`](Container::names) has this one.
    fn contains(&self, name: &str) -> bool;

    /// The weight of a module, by the path without `.weight`; `None` if there is none. `in_features` is K as
    /// the model knows it.
    fn weight(&self, module: &str, in_features: Option<usize>) -> Result<Option<Weight>>;

    /// A tensor that is not quantized, by its full name; `None` if there is none.
    fn dense(&self, name: &str) -> Result<Option<DenseTensor>>;

    /// The file that holds a tensor, or a part of it.
    fn file_of(&self, name: &str) -> Option<&Path>;

    /// The tokenizer that lies in the same files as the weights, if there is one.
    fn tokenizer(&self) -> Result<Option<StoredTokenizer>> {
        Ok(None)
    }

    /// Text that the files of the weights say of themselves, if it is known already.
    fn metadata(&self) -> Option<BTreeMap<String, String>> {
        None
    }

    /// The metadata of a GGUF file, to be written again.
    fn gguf_values(&self) -> Option<BTreeMap<String, GgufValue>> {
        None
    }

    /// What an SLM1 file has of a tokenizer, to be written again.
    fn slm1_tokenizer(&self) -> Option<&Slm1Tokenizer> {
        None
    }

    /// The entries of a layer of UQFF files in a type of mistral.rs that is made of a whole matrix; `None` if it is no such layer.
    fn uqff_entries(&self, _module: &str) -> Result<Option<(UqffType, Vec<DenseTensor>)>> {
        Ok(None)
    }

    /// The chat templates that lie in the same files as the weights, if there are any.
    fn chat_templates(&self) -> Result<Option<StoredChatTemplates>> {
        Ok(None)
    }
}

/// Refuses a matrix, or a stack of them, whose rows do not have the length that the model knows.
pub(super) fn check_in_features(
    path: &Path,
    name: &str,
    dims: &[usize],
    in_features: Option<usize>,
) -> Result<()> {
    match (in_features, dims) {
        (Some(expected), [_, .., k]) if *k != expected => Err(Error::tensor(
            path,
            name,
            format!("{expected} input features"),
            format!("{k}, shape {dims:?}"),
            "check that config.json belongs to these weights",
        )),
        _ => Ok(()),
    }
}

/// A checkpoint as its reader returns it.
pub(super) struct Opened {
    pub kind: CheckpointKind,
    /// The content of `config.json`, or what stands for it; null if there is nothing.
    pub config: Value,
    pub sidecars: SidecarFiles,
    /// What it states of the content of its files, if anything.
    pub digests: Vec<Digest>,
    /// Files of an Ollama model that are neither weights nor JSON files of the source, by the last part of their media
    /// type: `template`, `params`, `system`.
    pub ollama_layers: BTreeMap<String, PathBuf>,
    pub container: Box<dyn Container>,
}

impl Opened {
    /// One that states no digests, and is none of Ollama's.
    pub fn new(
        kind: CheckpointKind,
        config: Value,
        sidecars: SidecarFiles,
        container: impl Container + 'static,
    ) -> Self {
        let (digests, ollama_layers) = Default::default();
        Self { kind, config, sidecars, digests, ollama_layers, container: Box::new(container) }
    }
}
