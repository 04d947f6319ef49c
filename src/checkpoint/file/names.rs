//! What is in a folder.

use crate::{Error, Result};
use std::fs;
use std::io::ErrorKind::{NotADirectory, NotFound};
use std::path::Path;

/// The names in a folder that are text, sorted; none if it is not there.
pub(in crate::checkpoint) fn names_in(dir: &Path) -> Result<Vec<String>> {
    let failed = |error| Error::Io { path: dir.to_owned(), error };
    let entries = match fs::read_dir(dir) {
        Err(error) if matches!(error.kind(), NotFound | NotADirectory) => return Ok(vec![]),
        other => other.map_err(failed)?,
    };
    let mut names = Vec::new();
    for entry in entries {
        names.extend(entry.map_err(failed)?.file_name().into_string());
    }
    names.sort();
    Ok(names)
}
