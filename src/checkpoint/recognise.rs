//! Which kind of checkpoint a path leads to. Data decides: magic numbers and tensors, not file names alone.

use super::container::{Companions, Opened};
use super::warnings::Warnings;
use super::{mapped, mlx, ollama, shards, uqff};
use crate::{Error, Result};
use std::{fs, path::Path};

/// Opens whatever lies at `path`.
pub(super) fn open(path: &Path, warnings: &Warnings) -> Result<Opened> {
    if let Some(files) = uqff::find(path, warnings)? {
        return uqff::open(files, warnings);
    }
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) => return ollama::open_name(path, error, warnings),
    };
    if let Some(opened) = ollama::open_path(path, warnings)? {
        return Ok(opened);
    }
    let (dir, tensors) = if metadata.is_dir() {
        (path, shards::open_directory(path, warnings)?)
    } else {
        (path.parent().unwrap_or(Path::new("")), mapped::open(path)?)
    };
    if metadata.is_file() && uqff::is_versioned(&tensors) {
        return uqff::open(uqff::Files::single(path), warnings);
    }
    let companions = Companions::Directory(dir.to_owned());
    let config = companions.config()?;
    mlx::open(tensors, companions, config, warnings)
}

/// Opens the GGUF file at `path`, whatever it is called: an Ollama store has models in such files too.
pub(super) fn open_gguf(path: &Path, _warnings: &Warnings) -> Result<Opened> {
    Err(Error::Unsupported {
        what: format!("the GGUF file {}", path.display()),
        remedy: "use a safetensors version of the model".into(),
    })
}
