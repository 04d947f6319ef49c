//! The file while it is opened: read in the ordinary way, judged strictly or leniently.

use crate::checkpoint::file::{open_file, Warnings};
use crate::{Error, Result};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;

pub(super) const REMEDY: &str =
    "the file is damaged or of another format of that name: fetch or write it again";

/// Bytes that are read at a time.
const BUFFER: usize = 1 << 16;

pub(super) struct Source<'a> {
    pub path: &'a Path,
    pub file: File,
    pub len: u64,
    pub strict: bool,
    warnings: &'a Warnings,
}

impl<'a> Source<'a> {
    pub fn open(path: &'a Path, strict: bool, warnings: &'a Warnings) -> Result<Self> {
        let file = open_file(path)?;
        let metadata = file.metadata().map_err(|error| Error::Io { path: path.to_owned(), error })?;
        Ok(Self { path, file, len: metadata.len(), strict, warnings })
    }

    pub fn wrong(&self, problem: impl Into<String>) -> Error {
        Error::file(self.path, problem, REMEDY)
    }

    /// Something that leaves no doubt about the numbers: an error if the file is to be read strictly.
    pub fn odd(&self, problem: String) -> Result<()> {
        match self.strict {
            true => Err(Error::file(self.path, problem, "open the file leniently if it is to be trusted")),
            false => {
                self.warnings.add(format!("{}: {problem}", self.path.display()));
                Ok(())
            }
        }
    }

    /// The bytes from `offset` on.
    pub fn read<const N: usize>(&mut self, offset: u64) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.read_into(offset, &mut bytes)?;
        Ok(bytes)
    }

    /// The bytes of a range that lies in the file.
    pub fn read_range(&mut self, range: Range<u64>) -> Result<Vec<u8>> {
        let size = to_usize(range.end.saturating_sub(range.start)).ok_or_else(|| self.wrong("too large"))?;
        let mut bytes = vec![0; size];
        self.read_into(range.start, &mut bytes)?;
        Ok(bytes)
    }

    /// Hands on the bytes of a range, in order and in pieces whose length is a multiple of 4 but for the last.
    pub fn for_each_piece(&mut self, range: Range<u64>, mut take: impl FnMut(&[u8])) -> Result<()> {
        let mut buffer = [0; BUFFER];
        let mut at = range.start;
        while at < range.end {
            let size = to_usize(range.end - at).map_or(BUFFER, |left| left.min(BUFFER));
            let piece = buffer.split_at_mut(size).0;
            self.read_into(at, piece)?;
            take(piece);
            at += size as u64;
        }
        Ok(())
    }

    fn read_into(&mut self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let io = |error| Error::Io { path: self.path.to_owned(), error };
        self.file.seek(SeekFrom::Start(offset)).map_err(io)?;
        self.file.read_exact(bytes).map_err(io)
    }
}

/// A number of bytes or elements in memory; `None` if it does not fit the address space.
pub(super) fn to_usize(number: u64) -> Option<usize> {
    usize::try_from(number).ok()
}
