//! SHA-256 digests that a checkpoint states of its files. Nothing is computed here.

use std::path::{Path, PathBuf};

/// The SHA-256 that a checkpoint states of one of its files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Digest {
    name: String,
    file: PathBuf,
    sha256: String,
}

impl Digest {
    pub(in crate::checkpoint) fn new(name: &str, file: &Path, sha256: &str) -> Self {
        Self { name: name.to_owned(), file: file.to_owned(), sha256: sha256.to_owned() }
    }

    /// What the file is called in the checkpoint, for example ``layer `config.json` of model `qwen3:4b` ``.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The file.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// The digest that is stated, in hexadecimal.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }
}
