//! Safetensors files: their headers, and the tensors in them.

use super::data::{open_file, DataFile, Reads};
use super::header::{self, Header, Metadata, TensorInfo};
use super::stored::StoredTensor;
use crate::{Error, Result};
use std::{
    collections::BTreeMap,
    fs::File,
    io::{Read, Seek, SeekFrom},
    ops::Range,
    path::Path,
};

/// Bytes of small tensors, by name.
pub(in crate::checkpoint) type Values = BTreeMap<String, Vec<u8>>;

/// Opens a safetensors file and checks its header. Of the tensors nothing is read.
pub(in crate::checkpoint) fn open(path: &Path, reads: Reads) -> Result<BTreeMap<String, StoredTensor>> {
    Ok(open_with_metadata(path, reads)?.0)
}

/// As [`open`], with the free text of the header.
pub(in crate::checkpoint) fn open_with_metadata(
    path: &Path,
    reads: Reads,
) -> Result<(BTreeMap<String, StoredTensor>, Metadata)> {
    let mut file = open_file(path)?;
    let Header { tensors, metadata } = header::read(path, &mut file)?;
    Ok((all(path, file, reads, tensors)?, metadata))
}

/// As [`open`], with the bytes of every tensor that has at most `most` of them.
pub(in crate::checkpoint) fn open_with_values(
    path: &Path,
    most: usize,
    reads: Reads,
) -> Result<(BTreeMap<String, StoredTensor>, Values)> {
    let mut file = open_file(path)?;
    let Header { tensors, .. } = header::read(path, &mut file)?;
    let mut read = |range: &Range<usize>| {
        let mut bytes = vec![0; range.len()];
        file.seek(SeekFrom::Start(range.start as u64))?;
        file.read_exact(&mut bytes)?;
        Ok(bytes)
    };
    let mut values = Values::new();
    for (name, info) in tensors.iter().filter(|(_, info)| info.range.len() <= most) {
        let bytes = read(&info.range).map_err(|error| Error::Io { path: path.to_owned(), error })?;
        values.insert(name.clone(), bytes);
    }
    Ok((all(path, file, reads, tensors)?, values))
}

fn all(
    path: &Path,
    file: File,
    reads: Reads,
    tensors: BTreeMap<String, TensorInfo>,
) -> Result<BTreeMap<String, StoredTensor>> {
    let file = DataFile::new(path, file, reads)?;
    let stored = |(name, info): (String, _)| {
        let tensor = StoredTensor::new(&file, &name, info)?;
        Ok((name, tensor))
    };
    tensors.into_iter().map(stored).collect()
}
