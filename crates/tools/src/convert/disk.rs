//! What conversions ask of the file system beyond the standard library.

use candle_quant::checkpoint::Checkpoint;
use candle_quant::{Error, Result};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::time::UNIX_EPOCH;

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

/// What tells a folder from all others of this machine, whatever its name.
#[cfg(unix)]
pub(super) fn identity(folder: &Path) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    let metadata = fs::symlink_metadata(folder).ok()?;
    Some((metadata.dev(), metadata.ino()))
}

#[cfg(not(unix))]
pub(super) fn identity(_: &Path) -> Option<(u64, u64)> {
    None
}

/// Returns when the names in a folder are on the disk.
#[cfg(unix)]
pub(super) fn sync_folder(folder: &Path) -> io::Result<()> {
    match fs::File::open(folder)?.sync_all() {
        // Some file systems can't, and need not.
        Err(error) if matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => {
            Ok(())
        }
        other => other,
    }
}

#[cfg(not(unix))]
pub(super) fn sync_folder(_: &Path) -> io::Result<()> {
    Ok(())
}

/// Puts the folder `new` in the place of the folder `old`, which is at `new` afterwards or at `aside`: by one rename
/// where the system can, otherwise by two, between which both are there but neither has the name.
pub(super) fn replace(old: &Path, new: &Path, aside: &Path) -> io::Result<()> {
    #[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
    {
        use rustix::fs::{renameat_with, RenameFlags, CWD};
        if renameat_with(CWD, new, CWD, old, RenameFlags::EXCHANGE).is_ok() {
            return Ok(());
        }
    }
    fs::rename(old, aside)?;
    fs::rename(new, old)
}

/// An error of the file system at a path.
pub(super) fn io(path: &Path) -> impl Fn(io::Error) -> Error + '_ {
    |error| Error::Io { path: path.to_owned(), error }
}

/// Writes a file whose bytes are on the disk when this returns.
pub(super) fn write_synced(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(io(path))
}

/// For every file of weights its size and the time of its last change.
pub(super) fn states_of_files(source: &Checkpoint) -> Result<BTreeMap<String, (u64, u128)>> {
    let state = |path: &Path| {
        let metadata = fs::metadata(path)?;
        let changed = metadata.modified()?.duration_since(UNIX_EPOCH).unwrap_or_default();
        // JSON has no bytes: of a path that is no Unicode, what is none is left out.
        let path = fs::canonicalize(path)?.to_string_lossy().into_owned();
        Ok((path, (metadata.len(), changed.as_nanos())))
    };
    let files = source.weight_files().into_iter();
    files.map(|path| state(&path).map_err(|error| Error::Io { path, error })).collect()
}
