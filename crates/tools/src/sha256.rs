//! SHA-256 of files.

use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Bytes that are read at a time.
const CHUNK: usize = 4 << 20;

/// The SHA-256 of a regular file, in hexadecimal.
pub(crate) fn of_file(path: &Path) -> io::Result<String> {
    // Asked before opening: to open a named pipe waits for a writer.
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    let (mut file, mut hasher, mut chunk) = (File::open(path)?, Hasher::default(), vec![0; CHUNK]);
    loop {
        let count = file.read(&mut chunk)?;
        match chunk.get(..count) {
            None | Some([]) => return Ok(hasher.finish()),
            Some(bytes) => hasher.update(bytes),
        }
    }
}

/// The SHA-256 of bytes, in hexadecimal.
pub(crate) fn of_bytes(bytes: impl AsRef<[u8]>) -> String {
    hex(&Sha256::digest(bytes))
}

/// The SHA-256 of pieces, one after another.
#[derive(Default)]
pub(crate) struct Hasher(Sha256);

impl Hasher {
    pub(crate) fn update(&mut self, piece: impl AsRef<[u8]>) {
        self.0.update(piece);
    }

    /// The digest, in hexadecimal.
    pub(crate) fn finish(self) -> String {
        hex(&self.0.finalize())
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
