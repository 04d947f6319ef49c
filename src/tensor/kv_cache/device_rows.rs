//! How keys and values of all sequences lie in the memory of a device.

use super::{KvCacheConfig, KvFormat};
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};

/// By how many rows a cache grows at least: whole tiles of the kernels.
const STEP: usize = 256;

/// Keys and values of so many rows of each head of each sequence: one part after the other, each `[B, kv_heads, capacity]` of
/// what a row has of it. A cache of floats has keys and values; one of codes has those of keys, those of values, then scales and
/// biases of keys, of values, each group's one behind the other in f16 (`cuda/kv_codes.cuh`).
#[derive(Clone, Debug)]
pub(crate) struct DeviceRows {
    /// Floats `[2, B, kv_heads, capacity, head_dim]`, or bytes.
    pub(crate) memory: Tensor,
    pub(crate) sequences: usize,
    pub(crate) capacity: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) formats: [KvFormat; 2],
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
        Ok(Self { memory, sequences, capacity, kv_heads, head_dim, formats })
    }

    /// The same with more rows.
    pub(super) fn grown(&self, capacity: usize) -> Result<Self> {
        let sizes = [self.sequences, self.kv_heads, capacity, self.head_dim];
        let grown = Self::new(sizes, self.formats, self.memory.device())?;
        if self.codes().is_none() {
            grown.memory.slice_set(&self.memory, 3, 0)?;
            return Ok(grown);
        }
        for (old, new) in self.parts()?.into_iter().zip(grown.parts()?) {
            new.slice_set(&old, 1, 0)?;
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
                Some(position) if places.len() == self.sequences => rows.slice_set(&new, 2, position)?,
                _ => {
                    for (entry, place) in places.iter().enumerate() {
                        let of_sequence = rows.narrow(0, place.sequence, 1)?;
                        of_sequence.slice_set(&new.narrow(0, entry, 1)?, 2, place.position)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The parts of a cache of codes, `[B * kv_heads, capacity * bytes]`.
    fn parts(&self) -> Result<Vec<Tensor>> {
        let heads = self.sequences * self.kv_heads;
        let parts = self.offsets().into_iter().zip(row_bytes(self.formats, self.head_dim));
        let part = |(from, bytes): (usize, usize)| {
            let of_head = self.capacity * bytes;
            Ok(self.memory.narrow(0, from, heads * of_head)?.reshape((heads, of_head))?)
        };
        parts.map(part).collect()
    }
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
