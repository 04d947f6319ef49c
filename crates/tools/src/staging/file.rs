//! One file that is written.

use super::disk::{io, io_of_new, kind_of, plain, sync_folder};
use candle_quant::{Error, Result};
use std::fs;
use std::io::Write;
use std::path::Path;
use tempfile::NamedTempFile;

/// Whether a file can be written: there is none of this name or a regular one, which is replaced, and its folder takes
/// files. Nothing changes by that.
///
/// # Errors
/// If not. A link, a pipe and a device are never replaced, nor written to.
pub fn check_file(path: impl AsRef<Path>) -> Result<()> {
    new_beside(&plain(path.as_ref())).map(drop)
}

/// Writes a file: beside it first, so that it is there as a whole, or as it was before.
///
/// # Errors
/// As those of [`check_file`]; or if the disk is full.
pub fn write_file(path: impl AsRef<Path>, bytes: &[u8]) -> Result<()> {
    let path = &plain(path.as_ref());
    let mut new = new_beside(path)?;
    new.write_all(bytes).and_then(|()| new.as_file().sync_all()).map_err(io(path))?;
    check_kind(path)?;
    new.persist(path).map_err(|failed| io(path)(failed.error))?;
    sync_folder(path.parent().unwrap_or(path))
}

/// A file that is gone again unless it takes the place of `path`.
fn new_beside(path: &Path) -> Result<NamedTempFile> {
    check_kind(path)?;
    let (Some(folder), Some(_)) = (path.parent(), path.file_name()) else {
        return Err(Error::file(path, "not the name of a file", "give another output"));
    };
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let mut builder = tempfile::Builder::new();
    builder.prefix(".candle-quant-").suffix(".partial");
    // What the user's umask leaves of it, as for any new file.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    builder.tempfile_in(folder).map_err(io_of_new(path))
}

fn check_kind(path: &Path) -> Result<()> {
    match fs::symlink_metadata(path) {
        Ok(there) if !there.is_file() => {
            let problem = format!("it is there already, and no regular file, but {}", kind_of(&there));
            Err(Error::file(path, problem, "give another output"))
        }
        _ => Ok(()),
    }
}
