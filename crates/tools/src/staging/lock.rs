//! The lock of the process that writes an output.

use super::disk::{identity, io, kind_of};
use candle_quant::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read, Seek, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Held as long as this exists; the system releases it when the process ends, however that happens.
#[derive(Debug)]
pub(super) struct Lock(#[allow(dead_code, reason = "open as long as the lock is held")] File);

/// Who holds a lock, as its file says.
#[derive(Serialize, Deserialize)]
struct Owner {
    pid: u32,
    /// Seconds since 1970.
    started: u64,
}

impl Owner {
    fn this_process() -> Self {
        Self { pid: std::process::id(), started: now() }
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

impl Lock {
    /// Takes the lock whose file is at `path`, in the folder `root`; `None` if the folder has gone meanwhile, because
    /// another process has finished.
    ///
    /// # Errors
    /// If another process holds it, or the file is no lock.
    pub(super) fn take(root: &Path, path: &Path) -> Result<Option<Self>> {
        check_kind(path)?;
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = match no_links(&mut options).open(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(io(path))?,
        };
        try_lock(&file, root, path)?;
        if identity_of(&file) != identity(path) {
            // Removed by a process that has finished, and so nobody else's obstacle.
            return Ok(None);
        }
        check_content(&file, path)?;
        let mut file = file;
        let owner = serde_json::to_vec(&Owner::this_process())
            .map_err(|error| Error::file(path, error.to_string(), "report this"))?;
        let written = file.set_len(0).and_then(|()| file.rewind()).and_then(|()| file.write_all(&owner));
        written.map_err(io(path))?;
        Ok(Some(Self(file)))
    }

    /// Whether nobody holds the lock.
    ///
    /// # Errors
    /// As those of [`Lock::take`].
    pub(super) fn check(root: &Path, path: &Path) -> Result<()> {
        check_kind(path)?;
        match no_links(OpenOptions::new().read(true).write(true)).open(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            opened => {
                let file = opened.map_err(io(path))?;
                try_lock(&file, root, path)?;
                check_content(&file, path)
            }
        }
    }
}

fn try_lock(file: &File, root: &Path, path: &Path) -> Result<()> {
    match file.try_lock() {
        Ok(()) => Ok(()),
        Err(TryLockError::Error(error)) => Err(io(path)(error)),
        Err(TryLockError::WouldBlock) => {
            let mut file = file;
            let who = match read_owner(&mut file) {
                Some(Owner { pid, started }) => {
                    format!("process {pid}, which began {} s ago,", now().saturating_sub(started))
                }
                None => "another process".to_owned(),
            };
            let problem = format!("{who} is writing here");
            Err(Error::file(root, problem, "wait until it has finished, or give another output"))
        }
    }
}

/// Refuses a file that somebody else has called so.
fn check_content(file: &File, path: &Path) -> Result<()> {
    let mut reader = file;
    // One that is empty was about to be written.
    if file.metadata().map_err(io(path))?.len() > 0 && read_owner(&mut reader).is_none() {
        let problem = "no lock of candle-quant, which needs a file of this name";
        return Err(Error::file(path, problem, "move it away, or give another output"));
    }
    Ok(())
}

fn read_owner(file: &mut (impl Read + Seek)) -> Option<Owner> {
    /// A lock has much less.
    const MOST: u64 = 1 << 10;
    let mut text = Vec::new();
    file.rewind().ok()?;
    file.take(MOST).read_to_end(&mut text).ok()?;
    serde_json::from_slice(&text).ok()
}

fn check_kind(path: &Path) -> Result<()> {
    match fs::symlink_metadata(path) {
        Ok(there) if !there.is_file() => {
            let problem = format!("no lock, but {}", kind_of(&there));
            Err(Error::file(path, problem, "move it away, or give another output"))
        }
        _ => Ok(()),
    }
}

#[cfg(unix)]
fn no_links(options: &mut OpenOptions) -> &OpenOptions {
    use std::os::unix::fs::OpenOptionsExt;
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    options.custom_flags(flags.bits().cast_signed())
}

#[cfg(not(unix))]
fn no_links(options: &mut OpenOptions) -> &OpenOptions {
    options
}

#[cfg(unix)]
fn identity_of(file: &File) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    let metadata = file.metadata().ok()?;
    Some((metadata.dev(), metadata.ino()))
}

/// A file that is open can't be removed here.
#[cfg(not(unix))]
fn identity_of(_: &File) -> Option<(u64, u64)> {
    Some((0, 0))
}
