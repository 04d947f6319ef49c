//! The safetensors files of the output: what lies where in them, known before the first byte is written.

use crate::{Error, Result};
use safetensors::Dtype;
use serde_json::json;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

/// One tensor of an output file.
#[derive(Clone, Debug)]
pub(super) struct Output {
    pub name: String,
    pub dtype: Dtype,
    pub dims: Vec<usize>,
    pub bytes: u64,
    /// Of the tensor's first byte, from the start of its file.
    pub offset: u64,
}

impl Output {
    /// A tensor that has no place yet.
    ///
    /// # Errors
    /// If its size overflows.
    pub(super) fn new(name: String, dtype: Dtype, dims: Vec<usize>) -> Result<Self> {
        let bits = dims.iter().try_fold(dtype.bitsize() as u64, |bits, &dim| bits.checked_mul(dim as u64));
        match bits {
            Some(bits) => Ok(Self { name, dtype, dims, bytes: bits / 8, offset: 0 }),
            None => Err(Error::mismatch(name, "a tensor that fits 64 bits", format!("{dims:?}"))),
        }
    }

    /// Bytes of a row: of all but the last dimension.
    pub(super) fn bytes_of_row(&self) -> u64 {
        self.dims.last().map_or(0, |&last| last as u64 * self.dtype.bitsize() as u64 / 8)
    }
}

/// The file names of so many shards, as Hugging Face and mlx-lm count them.
pub(super) fn file_name(index: usize, count: usize) -> String {
    match count {
        1 => "model.safetensors".into(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
    }
}

/// Gives every tensor of one file its place, and returns the header and the size of the file.
///
/// Wider numbers come first, so that all of them are aligned.
pub(super) fn lay_out(outputs: &mut [&mut Output], format: &str) -> (Vec<u8>, u64) {
    outputs.sort_by_key(|output| std::cmp::Reverse(output.dtype.bitsize()));
    let mut header = format!(r#"{{"__metadata__":{}"#, json!({ "format": format }));
    let mut end = 0;
    for output in outputs.iter_mut() {
        let info = json!({
            "dtype": output.dtype,
            "shape": output.dims,
            "data_offsets": [end, end + output.bytes],
        });
        header.push_str(&format!(",{}:{info}", json!(output.name)));
        output.offset = end;
        end += output.bytes;
    }
    header.push('}');
    let padded = header.len().next_multiple_of(8);
    header.extend(std::iter::repeat_n(' ', padded - header.len()));
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    let start = bytes.len() as u64;
    for output in outputs {
        output.offset += start;
    }
    (bytes, start + end)
}

/// A file that is written at any place, by several threads.
pub(super) struct ShardFile {
    path: PathBuf,
    /// None if nothing is to be written.
    file: Option<File>,
}

impl ShardFile {
    /// Creates or truncates the file, and writes its header.
    pub(super) fn create(path: PathBuf, header: &[u8], size: u64) -> Result<Self> {
        let create = || {
            let mut file = File::create(&path)?;
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
    pub(super) fn nowhere() -> Self {
        Self { path: PathBuf::new(), file: None }
    }

    /// Writes `bytes` at `offset`.
    pub(super) fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let Some(file) = &self.file else {
            return Ok(());
        };
        write_all_at(file, bytes, offset).map_err(|error| Error::Io { path: self.path.clone(), error })
    }

    /// Returns when all bytes are on the disk.
    pub(super) fn finish(self) -> Result<()> {
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
