//! Safetensors files: their headers, and the tensors that they map.

use super::header::{self, Header, Metadata};
use super::mapped::open_file;
use super::{Opening, Tensors};
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;

/// Bytes of small tensors, by name.
pub(in crate::checkpoint) type Values = BTreeMap<Box<str>, Vec<u8>>;

/// Maps a safetensors file and checks its header. Of the tensors nothing is read.
pub(in crate::checkpoint) fn open(path: &Path, opening: &Opening) -> Result<Tensors> {
    Ok(open_with_metadata(path, opening)?.0)
}

/// As [`open`], with the free text of the header.
pub(in crate::checkpoint) fn open_with_metadata(
    path: &Path,
    opening: &Opening,
) -> Result<(Tensors, Metadata)> {
    let Header { tensors, metadata } = header::read(path, &mut open_file(path)?, opening)?;
    Ok((tensors, metadata))
}

/// As [`open`], with the bytes of every tensor that has at most `most` of them.
pub(in crate::checkpoint) fn open_with_values(
    path: &Path,
    most: usize,
    opening: &Opening,
) -> Result<(Tensors, Values)> {
    let mut file = open_file(path)?;
    let Header { tensors, .. } = header::read(path, &mut file, opening)?;
    let mut read = |range: &Range<usize>| {
        let mut bytes = vec![0; range.len()];
        file.seek(SeekFrom::Start(range.start as u64))?;
        file.read_exact(&mut bytes)?;
        Ok(bytes)
    };
    let mut values = Values::new();
    for (name, tensor) in tensors.iter().filter(|(_, tensor)| tensor.size_in_bytes() <= most) {
        let bytes = read(&tensor.info().range).map_err(|error| Error::Io { path: path.to_owned(), error })?;
        values.insert(name.into(), bytes);
    }
    Ok((tensors, values))
}
