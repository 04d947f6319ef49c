//! The digests that a checkpoint states of its files.

use crate::sha256 as hash;
use candle_quant::checkpoint::{Checkpoint, Digest};
use candle_quant::{Error, Result};

/// Reads a file that has a digest, and compares.
///
/// # Errors
/// If the file has another digest, or can't be read.
pub fn verify_digest(digest: &Digest) -> Result<()> {
    let path = digest.file();
    let found = hash::of_file(path).map_err(|error| Error::Io { path: path.to_owned(), error })?;
    if found.eq_ignore_ascii_case(digest.sha256()) {
        return Ok(());
    }
    Err(Error::file(
        path,
        format!("{} has the SHA-256 {found}, expected {}", digest.name(), digest.sha256()),
        "the file is damaged: fetch it again",
    ))
}

/// Reads all files that have a digest, and compares. Returns how many they are.
///
/// # Errors
/// The first file that has another digest, or can't be read.
pub fn verify_digests(checkpoint: &Checkpoint) -> Result<usize> {
    checkpoint.digests().iter().try_for_each(verify_digest)?;
    Ok(checkpoint.digests().len())
}
