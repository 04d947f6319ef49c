//! Which kind of checkpoint a path leads to. Data decides: magic numbers and tensors, not file names alone.

use super::container::{Companions, Opened};
use super::warnings::Warnings;
use super::{hf, mapped, mlx, shards};
use crate::{Error, Result};
use std::{fs, path::Path};

/// Opens whatever lies at `path`.
pub(super) fn open(path: &Path, warnings: &Warnings) -> Result<Opened> {
    let metadata = fs::metadata(path).map_err(|error| Error::Io { path: path.to_owned(), error })?;
    let (dir, tensors) = if metadata.is_dir() {
        (path, shards::open_directory(path, warnings)?)
    } else {
        (path.parent().unwrap_or(Path::new("")), mapped::open(path)?)
    };
    let companions = Companions::Directory(dir.to_owned());
    let config = companions.config()?;
    if let Some(method) = hf::find_method(&config, &companions)? {
        return hf::open(tensors, method, companions, config, warnings);
    }
    mlx::open(tensors, companions, config, warnings)
}
