//! SHA-256 digests that a checkpoint states of its files.

use super::mapped::open_file;
use crate::{Error, Result};
use sha2::{Digest as _, Sha256};
use std::io::Read;
use std::path::{Path, PathBuf};

/// Bytes read at a time.
const CHUNK: usize = 1 << 20;

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

    /// Reads the file and compares.
    ///
    /// # Errors
    /// If the file has another digest, or can't be read.
    pub fn verify(&self) -> Result<()> {
        let mut file = open_file(&self.file)?;
        let (mut hasher, mut chunk) = (Sha256::new(), vec![0; CHUNK]);
        loop {
            let read = file.read(&mut chunk).map_err(|error| Error::Io { path: self.file.clone(), error })?;
            match chunk.get(..read) {
                None | Some([]) => break,
                Some(bytes) => hasher.update(bytes),
            }
        }
        let found: String = hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        if found.eq_ignore_ascii_case(&self.sha256) {
            return Ok(());
        }
        Err(Error::file(
            &self.file,
            format!("{} has the SHA-256 {found}, expected {}", self.name, self.sha256),
            "the file is damaged: fetch it again",
        ))
    }
}
