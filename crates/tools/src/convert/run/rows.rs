//! Where rows of a tensor go in a file.

use super::repack::le_bytes;
use super::shard_file::ShardFile;
use super::source_digest::SourceHasher;
use crate::convert::output::{HeadOrder, Job};
use candle_core::{DType, Device};
use candle_quant::checkpoint::{DenseTensor, StoredBlocks};
use candle_quant::{Error, Result};

/// Writes the bytes for each tensor of the output; `row` is the number of their first row.
pub(super) fn write_rows(job: &Job, row: usize, bytes: &[Vec<u8>], file: &ShardFile) -> Result<()> {
    let rows = job.planned.shape.split_last().map_or(1, |(_, rows)| rows.iter().product::<usize>());
    if let Some(order) = job.order {
        return write_heads(job, order, row, bytes, file);
    }
    let before = |bytes: u64| bytes / rows.max(1) as u64 * row as u64;
    let mut parts = job.outputs.iter().zip(bytes);
    parts.try_for_each(|(output, bytes)| file.write(output.offset + before(output.bytes), bytes))
}

/// As [`write_rows`], each row to its place among those of its head; those of a vector are its numbers.
fn write_heads(job: &Job, order: HeadOrder, row: usize, bytes: &[Vec<u8>], file: &ShardFile) -> Result<()> {
    let rows = match job.planned.shape.as_slice() {
        [rows] | [rows, _] => *rows,
        other => {
            let expected = "a matrix or a vector of heads";
            return Err(Error::mismatch(format!("`{}`", job.planned.name), expected, format!("{other:?}")));
        }
    };
    for (output, bytes) in job.outputs.iter().zip(bytes) {
        let width = output.bytes / rows.max(1) as u64;
        for (index, bytes) in
            bytes.chunks_exact(usize::try_from(width).unwrap_or(usize::MAX).max(1)).enumerate()
        {
            file.write(output.offset + width * order.place(row + index) as u64, bytes)?;
        }
    }
    Ok(())
}

/// Writes floats of fewer bits as F32, from the byte `at` of the file on.
pub(super) fn write_widened(
    floats: &DenseTensor,
    at: u64,
    file: &ShardFile,
    hasher: &mut SourceHasher,
) -> Result<()> {
    let floats = floats.load(floats.dtype(), &Device::Cpu)?;
    hasher.tensor(&floats)?;
    file.write(at, &le_bytes(&floats.to_dtype(DType::F32)?)?)
}

/// Copies blocks, whole rows at a time.
pub(super) fn copy_blocks(
    job: &Job,
    weight: &StoredBlocks,
    file: &ShardFile,
    hasher: &mut SourceHasher,
) -> Result<()> {
    let rows = job.planned.shape.split_last().map_or(1, |(_, rows)| rows.iter().product::<usize>());
    let width = (weight.size_in_bytes() / rows.max(1)).max(1);
    let (mut row, mut left, mut result) = (0, Vec::new(), Ok(()));
    weight.for_each_chunk(&mut |blocks| {
        hasher.bytes(blocks);
        left.extend_from_slice(blocks);
        let whole = left.len() / width * width;
        let rest = left.split_off(whole);
        let of_rows = std::mem::replace(&mut left, rest);
        if result.is_ok() {
            result = write_rows(job, row, &[of_rows], file);
        }
        row += whole / width;
    })?;
    result
}
