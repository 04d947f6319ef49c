//! The safetensors files of the output: what lies where in them, known before the first byte is written.

use crate::{Error, QuantFormat, Result};
use safetensors::Dtype;
use serde_json::{json, Value};
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
    /// Its bytes, if they are known already.
    pub value: Option<Vec<u8>>,
}

impl Output {
    /// A tensor that has no place yet.
    ///
    /// # Errors
    /// If its size overflows.
    pub(super) fn new(name: String, dtype: Dtype, dims: Vec<usize>) -> Result<Self> {
        let bits = dims.iter().try_fold(dtype.bitsize() as u64, |bits, &dim| bits.checked_mul(dim as u64));
        match bits {
            Some(bits) => Ok(Self { name, dtype, dims, bytes: bits / 8, offset: 0, value: None }),
            None => Err(Error::mismatch(name, "a tensor that fits 64 bits", format!("{dims:?}"))),
        }
    }

    /// A number that is known already, of shape `[]`.
    pub(super) fn scalar(name: String, dtype: Dtype, bytes: &[u8]) -> Self {
        let value = Some(bytes.to_vec());
        Self { name, dtype, dims: Vec::new(), bytes: bytes.len() as u64, offset: 0, value }
    }

    /// The tensors of a packed weight in MLX's layout, called as `name` says: codes, scales, and biases if the format
    /// has them.
    pub(super) fn packed(
        dims: &[usize],
        format: QuantFormat,
        scales: Dtype,
        name: impl Fn(&str) -> String,
    ) -> Result<Vec<Self>> {
        let k = dims.last().copied().unwrap_or(0);
        let rows = dims.get(..dims.len().saturating_sub(1)).unwrap_or_default();
        let output = |part: &str, dtype, last: usize| Self::new(name(part), dtype, [rows, &[last]].concat());
        let groups = format.groups_per_row(k)?;
        let mut outputs =
            vec![output("weight", Dtype::U32, format.words_per_row(k)?)?, output("scales", scales, groups)?];
        if format.has_biases() {
            outputs.push(output("biases", scales, groups)?);
        }
        Ok(outputs)
    }

    /// Bytes of a row: of all but the last dimension.
    pub(super) fn bytes_of_row(&self) -> u64 {
        self.dims.last().map_or(0, |&last| last as u64 * self.dtype.bitsize() as u64 / 8)
    }
}

/// How a header is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    /// Metadata, then the tensors in the order of their bytes, padded so that those are aligned.
    Common,
    /// As MLX does it: all by name, without padding.
    Mlx,
}

/// Gives every tensor of one file its place, in this order, and returns the header and the size of the file.
pub(super) fn lay_out(outputs: &mut [&mut Output], metadata: Option<Value>, style: Style) -> (Vec<u8>, u64) {
    let mut entries: Vec<_> =
        metadata.map(|metadata| ("__metadata__".to_owned(), metadata.to_string())).into_iter().collect();
    let mut end = 0;
    for output in outputs.iter_mut() {
        let (dtype, shape) = (json!(output.dtype), json!(output.dims));
        let offsets = json!([end, end + output.bytes]);
        let info = match style {
            Style::Common => format!(r#"{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}"#),
            Style::Mlx => format!(r#"{{"data_offsets":{offsets},"dtype":{dtype},"shape":{shape}}}"#),
        };
        entries.push((output.name.clone(), info));
        output.offset = end;
        end += output.bytes;
    }
    if style == Style::Mlx {
        entries.sort();
    }
    let entries: Vec<_> = entries.iter().map(|(name, info)| format!("{}:{info}", json!(name))).collect();
    let mut header = format!("{{{}}}", entries.join(","));
    if style == Style::Common {
        let padded = header.len().next_multiple_of(8);
        header.extend(std::iter::repeat_n(' ', padded - header.len()));
    }
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
