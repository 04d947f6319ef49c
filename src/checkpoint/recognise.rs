//! Which kind of checkpoint a path leads to. Data decides: magic numbers and tensors, not file names alone.

use super::container::Opened;
use super::file::{self, open_file, Reads, Tensors, Warnings};
use super::kind::CheckpointKind;
use super::sidecar::SidecarFiles;
use super::{gguf, hf, mlx, ollama, slm1, uqff};
use crate::{Error, Result};
use serde_json::Value;
use std::{
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
};

/// Opens whatever lies at `path`.
pub(super) fn open(path: &Path, reads: Reads, warnings: &Warnings) -> Result<Opened> {
    if let Some(files) = uqff::find(path, warnings)? {
        return uqff::open(files, reads, warnings);
    }
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) => return ollama::open_name(path, error, reads, warnings),
    };
    if let Some(opened) = ollama::open_path(path, reads, warnings)? {
        return Ok(opened);
    }
    let (dir, tensors) = if metadata.is_dir() {
        match gguf::in_directory(path)? {
            Some(file) => return gguf::open(&file, reads, warnings),
            None => (path, file::open_directory(path, reads, warnings)?),
        }
    } else {
        if begins_with(path, gguf::MAGIC)? {
            return gguf::open(path, reads, warnings);
        }
        if begins_with(path, slm1::MAGIC)? {
            return slm1::open_default(path, reads, warnings);
        }
        (path.parent().unwrap_or(Path::new("")), file::open(path, reads)?)
    };
    if metadata.is_file() && uqff::is_versioned(&tensors) {
        return uqff::open(uqff::Files::single(path), reads, warnings);
    }
    let sidecars = SidecarFiles::Directory(dir.to_owned());
    let config = sidecars.config()?;
    open_tensors(tensors, sidecars, config, warnings)
}

/// Opens these files if weights in them are quantized; `None` if they are dense.
pub(super) fn open_quantized(paths: &[PathBuf], warnings: &Warnings) -> Result<Option<Opened>> {
    let Some(first) = paths.first() else { return Ok(None) };
    if uqff::find(first, warnings)?.is_some()
        || begins_with(first, gguf::MAGIC)?
        || begins_with(first, slm1::MAGIC)?
    {
        return open(first, Reads::default(), warnings).map(Some);
    }
    let dir = first.parent().unwrap_or(Path::new(""));
    let sidecars = SidecarFiles::Directory(dir.to_owned());
    // The config of one folder says nothing of the files of another.
    let config = match paths.iter().all(|path| path.parent() == first.parent()) {
        true => sidecars.config()?,
        false => Value::Null,
    };
    let says_so = ["quantization", "quantization_config"].iter().any(|key| config.get(key).is_some());
    let tensors = match file::open_all(paths, Reads::default()) {
        Ok(tensors) => tensors,
        Err(error) if says_so => return Err(error),
        // Whoever reads dense files says what is wrong with them.
        Err(_) => return Ok(None),
    };
    let opened = open_tensors(tensors, sidecars, config, warnings)?;
    Ok(Some(opened).filter(|opened| opened.kind != CheckpointKind::Dense))
}

/// The checkpoint of these safetensors, packed by MLX or by a tool that the config names.
fn open_tensors(
    tensors: Tensors,
    sidecars: SidecarFiles,
    config: Value,
    warnings: &Warnings,
) -> Result<Opened> {
    match hf::find_method(&config, &sidecars)? {
        Some(method) => hf::open(tensors, method, sidecars, config, warnings),
        None => mlx::open(tensors, sidecars, config, warnings),
    }
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
