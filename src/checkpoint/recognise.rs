//! Which kind of checkpoint a path leads to. Data decides: magic numbers and tensors, not file names alone.

use super::container::Opened;
use super::file::{self, open_file, Warnings};
use super::sidecar::SidecarFiles;
use super::{gguf, hf, mlx, ollama, slm1, uqff};
use crate::{Error, Result};
use std::{
    fs,
    io::{self, Read},
    path::Path,
};

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
        match gguf::in_directory(path)? {
            Some(file) => return gguf::open(&file, warnings),
            None => (path, file::open_directory(path, warnings)?),
        }
    } else {
        if begins_with(path, gguf::MAGIC)? {
            return gguf::open(path, warnings);
        }
        if begins_with(path, slm1::MAGIC)? {
            return slm1::open_default(path, warnings);
        }
        (path.parent().unwrap_or(Path::new("")), file::open(path)?)
    };
    if metadata.is_file() && uqff::is_versioned(&tensors) {
        return uqff::open(uqff::Files::single(path), warnings);
    }
    let sidecars = SidecarFiles::Directory(dir.to_owned());
    let config = sidecars.config()?;
    if let Some(method) = hf::find_method(&config, &sidecars)? {
        return hf::open(tensors, method, sidecars, config, warnings);
    }
    mlx::open(tensors, sidecars, config, warnings)
}

/// Whether the first bytes of a file are these.
fn begins_with<const N: usize>(path: &Path, magic: &[u8; N]) -> Result<bool> {
    let mut first = [0; N];
    match open_file(path)?.read_exact(&mut first) {
        Ok(()) => Ok(first == *magic),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(Error::Io { path: path.to_owned(), error }),
    }
}
