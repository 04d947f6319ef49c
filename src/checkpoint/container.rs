//! What a reader of one kind of checkpoint provides, and the files that lie beside the weights.

use super::{CheckpointKind, DenseTensor, Digest, Weight};
use crate::{Error, Result};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tokenizers::Tokenizer;

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
    fn tokenizer(&self) -> Result<Option<Tokenizer>> {
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
    pub companions: Companions,
    /// What it states of the content of its files, if anything.
    pub digests: Vec<Digest>,
    pub container: Box<dyn Container>,
}

/// Where the files that belong to the weights are: config, tokenizer and the like.
#[derive(Debug)]
pub(crate) enum Companions {
    /// In a directory, under their names.
    Directory(PathBuf),
    /// In files of other names.
    Files(BTreeMap<String, PathBuf>),
}

impl Companions {
    /// All of them by name; of a directory every file in it.
    pub(crate) fn all(&self) -> Result<BTreeMap<String, PathBuf>> {
        let dir = match self {
            Self::Files(files) => return Ok(files.clone()),
            Self::Directory(dir) if dir.as_os_str().is_empty() => Path::new("."),
            Self::Directory(dir) => dir,
        };
        let failed = |error| Error::Io { path: dir.to_owned(), error };
        let mut files = BTreeMap::new();
        for entry in std::fs::read_dir(dir).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            // Asked of the path, not of the entry: files of the Hugging Face cache are links.
            if let (Ok(name), true) = (entry.file_name().into_string(), entry.path().is_file()) {
                files.insert(name, entry.path());
            }
        }
        Ok(files)
    }

    /// Where the file called `name` is, if there is one.
    pub(crate) fn path(&self, name: &str) -> Option<PathBuf> {
        match self {
            Self::Directory(dir) => Some(dir.join(name)).filter(|path| path.is_file()),
            Self::Files(files) => files.get(name).cloned(),
        }
    }

    /// The content of the JSON file called `name`; `None` if there is none.
    pub(super) fn json(&self, name: &str) -> Result<Option<Value>> {
        match self.path(name) {
            Some(path) => super::shards::read_json(&path),
            None => Ok(None),
        }
    }

    /// `config.json`; null if there is none.
    ///
    /// # Errors
    /// If it is not a JSON object.
    pub(super) fn config(&self) -> Result<Value> {
        let config = self.json("config.json")?.unwrap_or_default();
        match (&config, self.path("config.json")) {
            (Value::Object(_) | Value::Null, _) | (_, None) => Ok(config),
            (_, Some(path)) => Err(Error::File {
                path,
                problem: "not a JSON object".into(),
                remedy: "fetch it again".into(),
            }),
        }
    }
}
