//! Memory-mapped files.

use crate::{Error, Result};
use memmap2::Mmap;
use std::{
    fs::File,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

/// One open file.
pub(in crate::checkpoint) struct MappedFile {
    path: PathBuf,
    map: Mmap,
}

/// Opens a regular file for reading.
///
/// What is needed while opening a checkpoint is read from the file, not from a mapping: a file that shrinks
/// meanwhile is an error then, and does not kill the process.
pub(in crate::checkpoint) fn open_file(path: &Path) -> Result<File> {
    let io = |error| Error::Io { path: path.to_owned(), error };
    // Asked before opening: to open a named pipe would block.
    if !std::fs::metadata(path).map_err(io)?.is_file() {
        return Err(Error::file(path, "not a regular file", "give a directory or a file of weights"));
    }
    File::open(path).map_err(io)
}

impl MappedFile {
    /// Maps an open file. Nothing is read.
    pub(in crate::checkpoint) fn new(path: &Path, file: &File) -> Result<Arc<Self>> {
        // SAFETY: the mapping is read-only and only ever seen as bytes, for which every value is valid.
        // That nobody truncates or rewrites the file meanwhile cannot be ensured from here; the module
        // docs state what follows if somebody does.
        let map = unsafe { Mmap::map(file) };
        let map = map.map_err(|error| Error::Io { path: path.to_owned(), error })?;
        Ok(Arc::new(Self { path: path.to_owned(), map }))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of the file.
    pub(super) fn len(&self) -> usize {
        self.map.len()
    }

    /// The bytes of a range; `None` if it is not in the file.
    pub(super) fn bytes(&self, range: &Range<usize>) -> Option<&[u8]> {
        #[cfg(any(test, feature = "recorded-reads"))]
        super::reads::record(&self.path, range);
        self.map.get(range.clone())
    }

    /// Whether the byte at `offset` lies at an address that is a multiple of 8.
    pub(super) fn is_aligned(&self, offset: usize) -> bool {
        self.map.as_ptr().addr().wrapping_add(offset).is_multiple_of(align_of::<u64>())
    }

    /// Takes copied pages out of the process's resident set, so that loading does not hold a weight
    /// twice. They stay in the page cache of the system. A hint: failure costs memory only.
    #[cfg(target_os = "linux")]
    pub(super) fn release(&self, offset: usize, len: usize) {
        // SAFETY: MADV_DONTNEED on a read-only mapping of a file loses nothing: whoever reads the
        // pages again, in this or another thread, gets the file's bytes again.
        let _ = unsafe { self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, offset, len) };
    }

    #[cfg(not(target_os = "linux"))]
    pub(super) fn release(&self, _offset: usize, _len: usize) {}
}
