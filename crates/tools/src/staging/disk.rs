//! What outputs ask of the file system beyond the standard library.

use candle_quant::{Error, Result};
use std::fs::{self, DirEntry, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

/// Bytes that can be written to the disk that `path`, or the nearest folder above it, is on; `None` if that can't be
/// told.
pub fn available_space(path: &Path) -> Option<u64> {
    let absolute = std::path::absolute(path).ok()?;
    let folder = absolute.ancestors().find(|folder| folder.exists())?;
    space_at(folder)
}

#[cfg(unix)]
fn space_at(folder: &Path) -> Option<u64> {
    let disk = rustix::fs::statvfs(folder).ok()?;
    // File systems that do not count have no blocks at all.
    (disk.f_blocks > 0).then(|| disk.f_bavail.saturating_mul(disk.f_frsize))
}

#[cfg(not(unix))]
fn space_at(_: &Path) -> Option<u64> {
    None
}

/// The path without what makes the system follow a link at its end: `out` for `out/` and `out/.`.
pub(crate) fn plain(path: &Path) -> PathBuf {
    path.components().collect()
}

/// Whether there is anything of this name, be it a link that leads nowhere.
pub(crate) fn is_there(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

/// What something is, in words, if it is no regular file.
pub(crate) fn kind_of(metadata: &Metadata) -> &'static str {
    match metadata.file_type() {
        kind if kind.is_dir() => "a folder",
        kind if kind.is_symlink() => "a link",
        kind if kind.is_file() => "a file",
        _ => "a pipe, a socket or a device",
    }
}

/// What tells a file or folder from all others of this machine, whatever its name; `None` if there is none.
#[cfg(unix)]
pub(crate) fn identity(path: &Path) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    let metadata = fs::symlink_metadata(path).ok()?;
    Some((metadata.dev(), metadata.ino()))
}

/// Nothing does here.
#[cfg(not(unix))]
pub(crate) fn identity(path: &Path) -> Option<(u64, u64)> {
    is_there(path).then_some((0, 0))
}

/// Returns when the names in a folder are on the disk.
#[cfg(unix)]
pub(crate) fn sync_folder(folder: &Path) -> Result<()> {
    let named = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    match File::open(named).and_then(|folder| folder.sync_all()) {
        // Some file systems can't, and need not.
        Err(error) if matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported) => Ok(()),
        other => other.map_err(io(folder)),
    }
}

#[cfg(not(unix))]
pub(crate) fn sync_folder(_: &Path) -> Result<()> {
    Ok(())
}

/// Puts the folder `new` in the place of the folder `old`, and returns where that is then: at `new`, by one rename,
/// where the system can; otherwise at `aside`, by two renames, between which both are there but neither has the name.
pub(super) fn exchange<'a>(old: &Path, new: &'a Path, aside: &'a Path) -> io::Result<&'a Path> {
    #[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
    {
        use rustix::fs::{renameat_with, RenameFlags, CWD};
        if renameat_with(CWD, new, CWD, old, RenameFlags::EXCHANGE).is_ok() {
            return Ok(new);
        }
    }
    fs::rename(old, aside)?;
    // Nobody is to find nothing.
    fs::rename(new, old).inspect_err(|_| drop(fs::rename(aside, old)))?;
    Ok(aside)
}

/// An error of the file system at a path.
pub(crate) fn io(path: &Path) -> impl Fn(io::Error) -> Error + '_ {
    |error| Error::Io { path: path.to_owned(), error }
}

/// As [`io`], for what is new at `path`: if its folder is not there, that is what is said.
pub(crate) fn io_of_new(path: &Path) -> impl Fn(io::Error) -> Error + '_ {
    move |error| match path.parent().filter(|folder| !folder.as_os_str().is_empty()).map(fs::metadata) {
        Some(Err(of_folder)) => io(path.parent().unwrap_or(path))(of_folder),
        _ => io(path)(error),
    }
}

/// A new file in the place of a regular one. What else is there is an error: no link is followed.
pub(crate) fn create(path: &Path) -> io::Result<File> {
    if fs::symlink_metadata(path).is_ok_and(|there| there.is_file()) {
        fs::remove_file(path)?;
    }
    OpenOptions::new().write(true).create_new(true).open(path)
}

/// Writes a file in a folder of an output; its bytes are on the disk when this returns.
pub(crate) fn write_synced(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || {
        let mut file = create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(io(path))
}

/// What is in a folder, by name.
pub(super) fn entries(folder: &Path) -> Result<Vec<DirEntry>> {
    let entries = fs::read_dir(folder).and_then(Iterator::collect::<io::Result<Vec<_>>>);
    let mut entries = entries.map_err(io(folder))?;
    entries.sort_by_key(DirEntry::file_name);
    Ok(entries)
}

/// Removes a file that may be gone already.
pub(super) fn remove_file(path: &Path) -> Result<()> {
    unless_missing(fs::remove_file(path)).map_err(io(path))
}

/// Removes a folder that may be gone already, if it is empty. Returns whether it is gone.
pub(super) fn remove_empty(folder: &Path) -> Result<bool> {
    match unless_missing(fs::remove_dir(folder)) {
        Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => Ok(false),
        other => other.map(|()| true).map_err(io(folder)),
    }
}

fn unless_missing(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
