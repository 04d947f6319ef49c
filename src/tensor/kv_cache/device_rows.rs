//! How keys and values of all sequences lie in the memory of a device.

use super::{KvCacheConfig, KvFormat};
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use std::ops::Range;

/// By how many rows a cache grows at least: whole tiles of the kernels.
const STEP: usize = 256;

/// The rows of a ring are a multiple of this: no tile of the kernels goes beyond its end. So many tokens may come at once at least, or
/// be taken back.
const RING_STEP: usize = 64;

/// Keys and values of so many rows of each head of each sequence; the row of a position is what is left of it divided by how many
/// there are. One part lies behind the other, each `[B, kv_heads, capacity]` of what a row has of it. A cache of floats has keys and
/// values; one of codes has those of keys, those of values, then scales and biases of keys, of values, each group's one behind the
/// other in f16 (`cuda/kv_codes.cuh`).
#[derive(Clone, Debug)]
pub(crate) struct DeviceRows {
    /// Floats `[2, B, kv_heads, capacity, head_dim]`, or bytes.
    pub(crate) memory: Tensor,
    pub(crate) sequences: usize,
    pub(crate) capacity: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) formats: [KvFormat; 2],
    /// Whether there may be positions beyond the capacity: then the rows are a ring.
    pub(crate) is_ring: bool,
}

impl DeviceRows {
    /// Zeros, with the heads and formats of a config.
    pub(super) fn of(
        config: &KvCacheConfig,
        sequences: usize,
        capacity: usize,
        device: &Device,
    ) -> Result<Self> {
        let &KvCacheConfig { kv_heads, head_dim, keys, values, .. } = config;
        Self::new([sequences, kv_heads, capacity, head_dim], [keys, values], device)
    }

    /// The most rows for texts of so many tokens, if all are kept.
    pub(crate) fn most(tokens: usize) -> usize {
        grown(tokens, tokens)
    }

    fn new(sizes: [usize; 4], formats: [KvFormat; 2], device: &Device) -> Result<Self> {
        let [sequences, kv_heads, capacity, head_dim] = sizes;
        let memory = match float(formats[0]) {
            Some(dtype) => Tensor::zeros((2, sequences, kv_heads, capacity, head_dim), dtype, device)?,
            None => {
                let of_row: usize = row_bytes(formats, head_dim).into_iter().sum();
                let counts = [sequences, kv_heads, capacity, of_row];
                let bytes = counts.into_iter().try_fold(1usize, |all, count| all.checked_mul(count));
                let Some(bytes) = bytes else {
                    let expected = "an addressable one";
                    return Err(Error::mismatch("size of a KV cache", expected, format!("{counts:?}")));
                };
                Tensor::zeros(bytes, DType::U8, device)?
            }
        };
        Ok(Self { memory, sequences, capacity, kv_heads, head_dim, formats, is_ring: false })
    }

    /// The same with more rows, for these positions of each sequence.
    pub(super) fn grown(&self, capacity: usize, texts: &[Range<usize>]) -> Result<Self> {
        let sizes = [self.sequences, self.kv_heads, capacity, self.head_dim];
        let grown = Self::new(sizes, self.formats, self.memory.device())?;
        for ((old, new), bytes) in self.parts()?.into_iter().zip(grown.parts()?).zip(self.row_sizes()) {
            if texts.iter().all(|text| text.end <= self.capacity) {
                new.slice_set(&old, 1, 0)?;
                continue;
            }
            for (sequence, text) in texts.iter().enumerate() {
                let of_sequence = |part: &Tensor| part.narrow(0, sequence * self.kv_heads, self.kv_heads);
                for run in runs(text.clone(), &[self.capacity, capacity]) {
                    let [from, to] = [self.capacity, capacity].map(|rows| run.start % rows * bytes);
                    let rows = of_sequence(&old)?.narrow(1, from, run.len() * bytes)?.contiguous()?;
                    of_sequence(&new)?.slice_set(&rows, 1, to)?;
                }
            }
        }
        Ok(grown)
    }

    /// The formats of keys and of values, if they are of codes.
    pub(crate) fn codes(&self) -> Option<[KvFormat; 2]> {
        codes(self.formats)
    }

    /// Where each part begins, in bytes.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(crate) fn offsets(&self) -> [usize; 4] {
        let rows = self.sequences * self.kv_heads * self.capacity;
        let mut end = 0;
        row_bytes(self.formats, self.head_dim).map(|bytes| {
            let begin = end;
            end += rows * bytes;
            begin
        })
    }

    /// Puts keys and values `[B, T, kv_heads, head_dim]` into floats, each entry at its place.
    pub(crate) fn put(&self, parts: [&Tensor; 2], places: &[CachePlace]) -> Result<()> {
        for (part, new) in parts.into_iter().enumerate() {
            let rows = self.memory.get(part)?;
            let new = new.transpose(1, 2)?.contiguous()?;
            match CachePlace::common(places) {
                Some(position) if places.len() == self.sequences => self.put_at(&rows, &new, position)?,
                _ => {
                    for (entry, place) in places.iter().enumerate() {
                        let of_sequence = rows.narrow(0, place.sequence, 1)?;
                        self.put_at(&of_sequence, &new.narrow(0, entry, 1)?, place.position)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Puts `new` `[B, kv_heads, T, head_dim]` into rows of floats, from a position on.
    fn put_at(&self, rows: &Tensor, new: &Tensor, position: usize) -> Result<()> {
        for run in runs(position..position + new.dim(2)?, &[self.capacity]) {
            let part = new.narrow(2, run.start - position, run.len())?.contiguous()?;
            rows.slice_set(&part, 2, run.start % self.capacity)?;
        }
        Ok(())
    }

    /// Elements of the memory that a row has in each part.
    fn row_sizes(&self) -> Vec<usize> {
        match self.codes() {
            None => vec![self.head_dim; 2],
            Some(_) => row_bytes(self.formats, self.head_dim).to_vec(),
        }
    }

    /// `[B * kv_heads, capacity * row size]` of each part.
    fn parts(&self) -> Result<Vec<Tensor>> {
        let (heads, memory) = (self.sequences * self.kv_heads, self.memory.flatten_all()?);
        let mut begin = 0;
        let part = |size: usize| {
            let of_head = self.capacity * size;
            let part = memory.narrow(0, begin, heads * of_head)?.reshape((heads, of_head))?;
            begin += heads * of_head;
            Ok(part)
        };
        self.row_sizes().into_iter().map(part).collect()
    }
}

/// Positions in pieces, whose rows are neighbours in rings of each of these capacities.
fn runs(positions: Range<usize>, capacities: &[usize]) -> impl Iterator<Item = Range<usize>> + '_ {
    let Range { mut start, end } = positions;
    std::iter::from_fn(move || {
        if start >= end {
            return None;
        }
        let left = capacities.iter().map(|capacity| capacity - start % capacity).min()?;
        let run = start..end.min(start + left);
        start = run.end;
        Some(run)
    })
}

/// The sequence of a cache that an entry of a batch continues, and the position of its first token there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CachePlace {
    pub(crate) sequence: usize,
    pub(crate) position: usize,
}

impl CachePlace {
    /// The position of all, if these are sequences 0, 1, .. in turn, and stand at one.
    pub(crate) fn common(places: &[Self]) -> Option<usize> {
        let position = places.first()?.position;
        let is_plain = |(index, place): (usize, &Self)| *place == Self { sequence: index, position };
        places.iter().enumerate().all(is_plain).then_some(position)
    }
}

/// Bytes of a row in each part.
fn row_bytes(formats: [KvFormat; 2], head_dim: usize) -> [usize; 4] {
    let numbers = |format: KvFormat| head_dim * format.bits() / 8;
    let groups = |format: KvFormat| 4 * format.groups(head_dim);
    let [keys, values] = formats;
    [numbers(keys), numbers(values), groups(keys), groups(values)]
}

/// Formats, if they are of codes.
pub(super) fn codes(formats: [KvFormat; 2]) -> Option<[KvFormat; 2]> {
    formats.into_iter().all(KvFormat::is_quantized).then_some(formats)
}

/// Bytes of a token with all its heads.
pub(super) fn token_bytes(config: &KvCacheConfig) -> usize {
    let of_head: usize = row_bytes([config.keys, config.values], config.head_dim).into_iter().sum();
    config.kv_heads.saturating_mul(of_head)
}

/// Rows of a ring for what so many tokens see that come at once.
pub(super) fn ring_rows(window: usize, tokens: usize) -> usize {
    let rows = window.saturating_add(tokens.max(RING_STEP));
    rows.checked_next_multiple_of(RING_STEP).unwrap_or(usize::MAX)
}

/// Rows of a cache that had `capacity` and needs more.
pub(super) fn grown(needed: usize, capacity: usize) -> usize {
    let most = needed.max(capacity.saturating_add(capacity / 4));
    most.checked_next_multiple_of(STEP).unwrap_or(usize::MAX)
}

/// The dtype of numbers in a format, if it is of floats.
pub(super) fn float(format: KvFormat) -> Option<DType> {
    match format {
        KvFormat::F32 => Some(DType::F32),
        KvFormat::F16 => Some(DType::F16),
        KvFormat::Bf16 => Some(DType::BF16),
        KvFormat::Affine8 | KvFormat::Affine4 => None,
    }
}
