//! A file of weights while it is written.

use crate::staging;
use candle_quant::{Error, Result};
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

/// A file that is written at any place, by several threads.
pub(in crate::convert) struct ShardFile {
    path: PathBuf,
    /// None if nothing is to be written.
    file: Option<File>,
}

impl ShardFile {
    /// Creates the file in place of one that was begun, and writes its header.
    pub(in crate::convert) fn create(path: PathBuf, header: &[u8], size: u64) -> Result<Self> {
        let create = || {
            let mut file = staging::create(&path)?;
            file.write_all(header)?;
            file.set_len(size)?;
            Ok(file)
        };
        match create() {
            Ok(file) => Ok(Self { path, file: Some(file) }),
            Err(error) => Err(Error::Io { path, error }),
        }
    }

    /// A file that takes everything and keeps nothing.
    pub(in crate::convert) fn nowhere() -> Self {
        Self { path: PathBuf::new(), file: None }
    }

    /// Whether anything is kept.
    pub(super) fn is_written(&self) -> bool {
        self.file.is_some()
    }

    /// Writes `bytes` at `offset`.
    pub(in crate::convert) fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let Some(file) = &self.file else {
            return Ok(());
        };
        write_all_at(file, bytes, offset).map_err(|error| Error::Io { path: self.path.clone(), error })
    }

    /// Returns when all bytes are on the disk.
    pub(in crate::convert) fn finish(self) -> Result<()> {
        let synced = self.file.as_ref().map_or(Ok(()), File::sync_all);
        synced.map_err(|error| Error::Io { path: self.path, error })
    }
}

#[cfg(unix)]
fn write_all_at(file: &File, bytes: &[u8], offset: u64) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, offset)
}

#[cfg(windows)]
fn write_all_at(file: &File, mut bytes: &[u8], mut offset: u64) -> std::io::Result<()> {
    while !bytes.is_empty() {
        let written = std::os::windows::fs::FileExt::seek_write(file, bytes, offset)?;
        if written == 0 {
            return Err(std::io::ErrorKind::WriteZero.into());
        }
        bytes = &bytes[written..];
        offset += written as u64;
    }
    Ok(())
}
