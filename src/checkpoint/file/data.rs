//! Files of weights, whose bytes are read when they are asked for: through a mapping, or by positioned reads.

use crate::{Error, Result};
use memmap2::Mmap;
use std::{
    fs::File,
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

/// How the bytes of weights are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reads {
    /// Through a mapping of the file: nothing is copied twice. If the file shrinks, the process is killed (`SIGBUS`).
    #[default]
    Mapped,
    /// By positioned reads, which copy once more. If the file shrinks, that is an error; the file stays open.
    Positioned,
}

/// Bytes copied before the pages behind them are given back. A multiple of every element size and
/// of every page size.
const MAPPED_CHUNK: usize = 4 << 20;

/// Bytes that are read at a time: they stay in the cache until they are copied on.
const POSITIONED_CHUNK: usize = 64 << 10;

/// One open file.
pub(in crate::checkpoint) struct DataFile {
    path: PathBuf,
    /// Bytes when it was opened.
    len: usize,
    bytes: Bytes,
}

enum Bytes {
    Mapped(Mmap),
    Positioned(File),
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

/// The error of reading the bytes of a tensor, which it names.
#[allow(clippy::wildcard_enum_match_arm, reason = "all other errors are not about the file")]
pub(in crate::checkpoint) fn of_tensor(tensor: &str) -> impl Fn(Error) -> Error + '_ {
    move |error| match error {
        Error::File { path, problem, remedy } => {
            Error::tensor(&path, tensor, "all its bytes", format!("a file {problem}"), remedy)
        }
        other => other,
    }
}

impl DataFile {
    /// Takes an open file. Nothing is read.
    pub(in crate::checkpoint) fn new(path: &Path, file: File, reads: Reads) -> Result<Arc<Self>> {
        let io = |error| Error::Io { path: path.to_owned(), error };
        let (len, bytes) = match reads {
            Reads::Mapped => {
                // SAFETY: the mapping is read-only and only ever seen as bytes, for which every value is valid.
                // That nobody truncates or rewrites the file meanwhile cannot be ensured from here; the module
                // docs state what follows if somebody does.
                let map = unsafe { Mmap::map(&file) }.map_err(io)?;
                (map.len(), Bytes::Mapped(map))
            }
            Reads::Positioned => {
                let len = file.metadata().map_err(io)?.len();
                let too_large = |_| {
                    Error::file(path, format!("{len} bytes exceed the address space"), "use a 64-bit machine")
                };
                (usize::try_from(len).map_err(too_large)?, Bytes::Positioned(file))
            }
        };
        Ok(Arc::new(Self { path: path.to_owned(), len, bytes }))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of the file when it was opened.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// How many bytes are to be asked for at a time.
    pub(super) fn copy_chunk(&self) -> usize {
        match self.bytes {
            Bytes::Mapped(_) => MAPPED_CHUNK,
            Bytes::Positioned(_) => POSITIONED_CHUNK,
        }
    }

    /// The bytes of a range, in the mapping or in `buffer`.
    ///
    /// # Errors
    /// If the file does not have them, or no longer.
    pub(super) fn bytes<'a>(&'a self, range: Range<usize>, buffer: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        #[cfg(feature = "testing")]
        super::reads::record(&self.path, &range);
        match &self.bytes {
            Bytes::Mapped(map) => map.get(range.clone()).ok_or_else(|| self.cut(self.len as u64)),
            Bytes::Positioned(file) => {
                buffer.resize(range.len(), 0);
                match read_exact_at(file, buffer, range.start as u64) {
                    Ok(()) => Ok(buffer.as_slice()),
                    Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                        let found = file.metadata().map_or(0, |metadata| metadata.len());
                        Err(self.cut(found))
                    }
                    Err(error) => Err(Error::Io { path: self.path.clone(), error }),
                }
            }
        }
    }

    fn cut(&self, found: u64) -> Error {
        let problem = format!("cut after it was opened: {found} of {} bytes are left", self.len);
        Error::file(&self.path, problem, "fetch or write it again, and begin anew")
    }

    /// Whether the byte at `offset` is in memory, at an address that is a multiple of 8.
    pub(super) fn is_aligned(&self, offset: usize) -> bool {
        match &self.bytes {
            Bytes::Mapped(map) => map.as_ptr().addr().wrapping_add(offset).is_multiple_of(align_of::<u64>()),
            Bytes::Positioned(_) => false,
        }
    }

    /// Takes copied pages out of the process's resident set, so that loading does not hold a weight
    /// twice. They stay in the page cache of the system. A hint: failure costs memory only.
    #[cfg(target_os = "linux")]
    pub(super) fn release(&self, offset: usize, len: usize) {
        if let Bytes::Mapped(map) = &self.bytes {
            // SAFETY: MADV_DONTNEED on a read-only mapping of a file loses nothing: whoever reads the
            // pages again, in this or another thread, gets the file's bytes again.
            let _ = unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, offset, len) };
        }
    }

    #[cfg(not(target_os = "linux"))]
    pub(super) fn release(&self, _offset: usize, _len: usize) {}
}

#[cfg(unix)]
fn read_exact_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, buffer, offset)
}

#[cfg(windows)]
fn read_exact_at(file: &File, mut buffer: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !buffer.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, buffer, offset)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => {
                buffer = std::mem::take(&mut buffer).split_at_mut(count).1;
                offset += count as u64;
            }
        }
    }
    Ok(())
}
