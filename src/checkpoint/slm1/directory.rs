//! The tensor directory: what is stored where, and that nothing overlaps.

use super::header::{Header, ALIGNMENT, ENTRY_BYTES};
use super::source::{to_usize, Source, REMEDY};
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::ops::Range;

/// The numbers of the types: F32, signed bytes, signed nibbles.
pub(super) const F32: u32 = 1;
pub(super) const Q8_0: u32 = 2;
pub(super) const Q4_0: u32 = 3;

/// How a tensor's numbers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    F32,
    /// Signed bytes, one scale for each row.
    Q8,
    /// Signed nibbles, one scale for so many elements of a row.
    Q4 {
        block: usize,
    },
}

/// A tensor's entry, checked.
#[derive(Debug)]
pub(super) struct DirectoryEntry {
    pub encoding: Encoding,
    pub dims: Vec<usize>,
    pub payload: Range<u64>,
    /// F32; empty if the tensor is F32 itself.
    pub scales: Range<u64>,
}

/// The tensors by the hashes of their names. `name_of` returns the names that are known.
pub(super) fn read(
    source: &mut Source,
    header: &Header,
    name_of: impl Fn(u64) -> String,
) -> Result<BTreeMap<u64, DirectoryEntry>> {
    let mut entries = BTreeMap::new();
    for index in 0..u64::from(header.tensor_count) {
        let raw = source.read::<64>(header.directory.start + index * ENTRY_BYTES)?;
        let hash = u64::from_le_bytes(std::array::from_fn(|i| raw[i]));
        let name = name_of(hash);
        let entry = Parser { source, header, name: &name, raw }.entry()?;
        if entries.insert(hash, entry).is_some() {
            return Err(Error::tensor(source.path, name, "each hash of a name once", "it twice", REMEDY));
        }
    }
    check_overlaps(source, header, &entries, name_of)?;
    Ok(entries)
}

struct Parser<'a> {
    source: &'a Source<'a>,
    header: &'a Header,
    name: &'a str,
    raw: [u8; 64],
}

impl Parser<'_> {
    fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(std::array::from_fn(|i| self.raw[at + i]))
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|i| self.raw[at + i]))
    }

    fn wrong(&self, expected: impl Into<String>, found: impl Into<String>) -> Error {
        Error::tensor(self.source.path, self.name, expected, found, REMEDY)
    }

    fn entry(&self) -> Result<DirectoryEntry> {
        let (dtype, block) = (self.u32(8), self.u32(56));
        if !matches!(dtype, F32 | Q8_0 | Q4_0) {
            return Err(self.wrong("dtype 1 (f32), 2 (q8_0) or 3 (q4_0)", format!("dtype {dtype}")));
        }
        let (dims, elements) = self.dims()?;
        let cols = dims.last().copied().unwrap_or(0);
        let rows = elements / cols.max(1);
        let too_large = || self.wrong("a size that fits 64 bits", format!("{dims:?}"));
        let (encoding, bytes, scales) = match dtype {
            F32 => (Encoding::F32, elements.checked_mul(4).ok_or_else(too_large)?, 0),
            Q8_0 => {
                if u64::from(block) != cols {
                    return Err(self.wrong(format!("blocks of whole rows, {cols}"), block.to_string()));
                }
                (Encoding::Q8, elements, rows)
            }
            _ => {
                let blocks = u64::from(block);
                if !cols.is_multiple_of(2) {
                    return Err(self.wrong("rows of an even number of 4-bit elements", cols.to_string()));
                }
                if blocks == 0 || !blocks.is_multiple_of(2) || !cols.is_multiple_of(blocks) {
                    let expected = format!("blocks of an even number of elements that divides {cols}");
                    return Err(self.wrong(expected, block.to_string()));
                }
                let block = to_usize(blocks).ok_or_else(too_large)?;
                (Encoding::Q4 { block }, elements / 2, elements / blocks)
            }
        };
        let payload = self.payload(bytes)?;
        let scales = match encoding {
            Encoding::F32 => payload.end..payload.end,
            Encoding::Q8 | Encoding::Q4 { .. } => {
                self.scales(scales.checked_mul(4).ok_or_else(too_large)?)?
            }
        };
        if self.source.strict && self.u32(60) != 0 {
            return Err(self.wrong("0 in the reserved field", self.u32(60).to_string()));
        }
        let dims = dims.iter().map(|&dim| to_usize(dim)).collect::<Option<_>>().ok_or_else(too_large)?;
        Ok(DirectoryEntry { encoding, dims, payload, scales })
    }

    /// The dimensions and their product.
    fn dims(&self) -> Result<(Vec<u64>, u64)> {
        let rank = self.u32(12);
        let all = [16, 20, 24, 28].map(|at| u64::from(self.u32(at)));
        let (used, unused) = match rank {
            1..=4 => all.split_at(rank as usize),
            _ => return Err(self.wrong("a rank of 1 to 4", rank.to_string())),
        };
        if used.contains(&0) {
            return Err(self.wrong("dimensions of one and more", format!("{used:?}")));
        }
        if unused.iter().any(|dim| *dim > 1) {
            return Err(self.wrong(format!("0 or 1 behind the {rank} dimensions"), format!("{all:?}")));
        }
        match used.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim)) {
            Some(elements) => Ok((used.to_vec(), elements)),
            None => Err(self.wrong("a size that fits 64 bits", format!("{used:?}"))),
        }
    }

    fn payload(&self, bytes: u64) -> Result<Range<u64>> {
        let (offset, length) = (self.u64(32), self.u64(40));
        if length != bytes {
            return Err(self.wrong(format!("{bytes} bytes for its shape"), length.to_string()));
        }
        if !offset.is_multiple_of(ALIGNMENT) {
            self.source.odd(format!("`{}` at {offset} begins at no multiple of 64", self.name))?;
        }
        self.inside("payload", offset, length)
    }

    fn scales(&self, bytes: u64) -> Result<Range<u64>> {
        let offset = self.u64(48);
        if offset == 0 {
            return Err(self.wrong("an array of scales", "none (its offset is 0)"));
        }
        if !offset.is_multiple_of(4) {
            self.source
                .odd(format!("the scales of `{}` at {offset} begin at no multiple of 4", self.name))?;
        }
        self.inside("scales", offset, bytes)
    }

    /// A range of the data section, in the file as a whole.
    fn inside(&self, what: &str, offset: u64, bytes: u64) -> Result<Range<u64>> {
        let begin = self.header.data_offset;
        match offset.checked_add(bytes) {
            Some(end) if offset >= begin && end <= self.source.len => Ok(offset..end),
            _ => Err(self.wrong(
                format!("{what} of {bytes} bytes from {begin} to {}", self.source.len),
                format!("offset {offset}"),
            )),
        }
    }
}

fn check_overlaps(
    source: &mut Source,
    header: &Header,
    entries: &BTreeMap<u64, DirectoryEntry>,
    name_of: impl Fn(u64) -> String,
) -> Result<()> {
    enum Owner {
        Section(&'static str),
        Payload(u64),
        Scales(u64),
    }
    let mut spans = vec![
        (0..header.length, Owner::Section("the header")),
        (header.tokenizer.clone(), Owner::Section("the tokenizer")),
        (header.directory.clone(), Owner::Section("the tensor directory")),
    ];
    for (&hash, entry) in entries {
        spans.push((entry.payload.clone(), Owner::Payload(hash)));
        spans.push((entry.scales.clone(), Owner::Scales(hash)));
    }
    spans.retain(|(range, _)| !range.is_empty());
    spans.sort_by_key(|(range, _)| range.start);
    let name = |owner: &Owner| match owner {
        Owner::Section(name) => (*name).to_owned(),
        Owner::Payload(hash) => format!("`{}`", name_of(*hash)),
        Owner::Scales(hash) => format!("the scales of `{}`", name_of(*hash)),
    };
    for ((first, first_owner), (second, second_owner)) in spans.iter().zip(spans.iter().skip(1)) {
        if second.start < first.end {
            let (first_name, second_name) = (name(first_owner), name(second_owner));
            return Err(
                source.wrong(format!("{second_name} at {second:?} overlap {first_name} at {first:?}"))
            );
        }
    }
    let end = spans.last().map_or(0, |(range, _)| range.end);
    if source.strict {
        let mut zeros = true;
        if source.len - end < ALIGNMENT {
            source.for_each_piece(end..source.len, |piece| zeros &= piece.iter().all(|byte| *byte == 0))?;
        }
        if !zeros || source.len - end >= ALIGNMENT {
            let problem =
                format!("{} bytes behind the last tensor, expected less than 64 zeros", source.len - end);
            return Err(source.wrong(problem));
        }
    }
    Ok(())
}
