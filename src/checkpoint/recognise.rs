//! Which kind of checkpoint a path leads to. Data decides: magic numbers and tensors, not file names alone.

use super::container::Opened;
use super::file::{self, open_file, Opening, Tensors};
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
pub(super) fn open(path: &Path, opening: &Opening) -> Result<Opened> {
    if let Some(files) = uqff::find(path, opening)? {
        return uqff::open(files, opening);
    }
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) => return ollama::open_name(path, error, opening),
    };
    if let Some(opened) = ollama::open_path(path, opening)? {
        return Ok(opened);
    }
    let (dir, tensors) = if metadata.is_dir() {
        if let Some(file) = only_model(path, "GGUF", gguf::is_model)? {
            return gguf::open(&file, opening);
        }
        if let Some(file) = only_model(path, "SLM1", |name| name.ends_with(".slm"))? {
            return slm1::open_default(&file, opening);
        }
        (path, file::open_directory(path, opening)?)
    } else {
        if begins_with(path, gguf::MAGIC)? {
            return gguf::open(path, opening);
        }
        if begins_with(path, slm1::MAGIC)? {
            return slm1::open_default(path, opening);
        }
        (path.parent().unwrap_or(Path::new("")), file::open(path, opening)?)
    };
    if metadata.is_file() && uqff::is_versioned(&tensors) {
        return uqff::open(uqff::Files::single(path), opening);
    }
    let sidecars = SidecarFiles::Directory(dir.to_owned());
    let config = sidecars.config(opening)?;
    open_tensors(tensors, sidecars, config, opening)
}

/// Opens these files if weights in them are quantized; `None` if they are dense.
pub(super) fn open_quantized(paths: &[PathBuf], opening: &Opening) -> Result<Option<Opened>> {
    let Some(first) = paths.first() else { return Ok(None) };
    if let Some(files) = uqff::find(first, opening)? {
        return uqff::open(files, opening).map(Some);
    }
    if begins_with(first, gguf::MAGIC)? || begins_with(first, slm1::MAGIC)? {
        return open(first, opening).map(Some);
    }
    let dir = first.parent().unwrap_or(Path::new(""));
    let sidecars = SidecarFiles::Directory(dir.to_owned());
    // The config of one folder says nothing of the files of another.
    let config = match paths.iter().all(|path| path.parent() == first.parent()) {
        true => sidecars.config(opening)?,
        false => Value::Null,
    };
    let says_so = ["quantization", "quantization_config"].iter().any(|key| config.get(key).is_some());
    let tensors = match file::open_all(paths, opening) {
        Ok(tensors) => tensors,
        Err(error) if says_so => return Err(error),
        // Whoever reads dense files says what is wrong with them.
        Err(_) => return Ok(None),
    };
    let opened = open_tensors(tensors, sidecars, config, opening)?;
    Ok(Some(opened).filter(|opened| opened.kind != CheckpointKind::Dense))
}

/// The checkpoint of these safetensors, packed by MLX or by a tool that the config names.
fn open_tensors(
    tensors: Tensors,
    sidecars: SidecarFiles,
    config: Value,
    opening: &Opening,
) -> Result<Opened> {
    match hf::find_method(&config, &tensors, &sidecars, opening)? {
        Some(method) => hf::open(tensors, method, sidecars, config, &opening.warnings),
        None => mlx::open(tensors, sidecars, config, &opening.warnings),
    }
}

/// The one file in a directory that is a model by its name; `None` if there is none, or if there are safetensors, which then are
/// the model.
///
/// # Errors
/// If there are several.
fn only_model(dir: &Path, kind: &str, is_model: impl Fn(&str) -> bool) -> Result<Option<PathBuf>> {
    let failed = |error| Error::Io { path: dir.to_owned(), error };
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
        if name.ends_with(".safetensors") {
            return Ok(None);
        }
        if is_model(name) {
            files.push(path);
        }
    }
    files.sort();
    match files.as_slice() {
        [] => Ok(None),
        [file] => Ok(Some(file.clone())),
        [first, second, ..] => Err(Error::file(
            dir,
            format!("{} {kind} models, {} and {} among them", files.len(), first.display(), second.display()),
            "give the path of one of the files",
        )),
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
