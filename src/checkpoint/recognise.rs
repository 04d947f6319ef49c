//! Which kind of checkpoint a path leads to. Data decides: magic numbers and tensors, not file names alone.

use super::container::{Companions, Opened};
use super::warnings::Warnings;
use super::{mapped, mlx, shards, uqff};
use crate::{Error, Result};
use std::{fs, path::Path};

/// Opens whatever lies at `path`.
pub(super) fn open(path: &Path, warnings: &Warnings) -> Result<Opened> {
    if let Some(files) = uqff::find(path, warnings)? {
        return uqff::open(files, warnings);
    }
    let metadata = fs::metadata(path).map_err(|error| Error::Io { path: path.to_owned(), error })?;
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
