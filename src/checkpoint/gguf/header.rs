//! The header of a GGUF file, read in the ordinary way and checked in full.
//!
//! candle's own reader refuses a file for one tensor of a type it does not know, so this is ours: version 2
//! and 3, metadata, and where every tensor lies. Nothing is allocated that the file does not hold.

use super::architectures;
use super::metadata::{Array, Metadata, Type, Value};
use crate::checkpoint::file::{Opening, GGUF_ENTRY};
use crate::checkpoint::weight::{block_type, BlockType};
use crate::{Error, Result};
use std::collections::{btree_map, BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::io::{BufReader, Read};
use std::ops::Range;
use std::path::Path;

pub(in crate::checkpoint) const MAGIC: &[u8; 4] = b"GGUF";

/// Headers are read up to here; the vocabulary of the largest models takes a tenth of it.
const MAX_HEADER_BYTES: u64 = 100_000_000;

const DEFAULT_ALIGNMENT: u32 = 32;
const MAX_DIMS: u32 = 4;

/// The least that an entry takes: a key of no bytes and a value of one, a name of none and one dimension.
const LEAST_VALUE_BYTES: u64 = 8 + 4 + 1;
const LEAST_TENSOR_BYTES: u64 = 8 + 4 + 8 + 4 + 8;

const REMEDY: &str = "the file is damaged or incomplete: fetch or convert it again";

/// What a file says of itself.
pub(super) struct Header {
    pub metadata: Metadata,
    pub tensors: Vec<TensorEntry>,
}

/// One tensor of a file.
pub(super) struct TensorEntry {
    pub name: String,
    /// The shape, rows before columns; the file has it the other way round.
    pub dims: Vec<usize>,
    pub type_id: u32,
    /// What the number means, if it is known.
    pub block: Option<BlockType>,
    /// Its bytes, counted from the start of the file; empty if the type is unknown.
    pub range: Range<usize>,
}

/// Reads and checks the header of the file at `path`. No more of it is read than may be.
pub(super) fn read(path: &Path, file: &mut File, opening: &Opening) -> Result<Header> {
    let len = file.metadata().map_err(|error| Error::Io { path: path.to_owned(), error })?.len();
    let (most, left) = (len.min(MAX_HEADER_BYTES), opening.bytes_left());
    let header = read_until(most.min(left), path, (file, len), opening);
    if header.is_err() && left < most {
        // It ended there.
        opening.spend_bytes(path, left.saturating_add(1))?;
    }
    header
}

/// As [`read`], of what lies before `end`.
fn read_until(end: u64, path: &Path, (file, len): (&mut File, u64), opening: &Opening) -> Result<Header> {
    let mut reader = Reader { path, file: BufReader::new(file), position: 0, end };
    reader.version()?;
    let (tensors, values) = (reader.u64("the number of tensors")?, reader.u64("the number of values")?);
    reader.fits(tensors, LEAST_TENSOR_BYTES, format_args!("tensors"))?;
    reader.fits(values, LEAST_VALUE_BYTES, format_args!("values"))?;
    opening.spend_entries(path, tensors.saturating_add(values), GGUF_ENTRY)?;
    let metadata = reader.metadata(values)?;
    let early_mxfp4 = architectures::of(&metadata)?.is_some_and(|architecture| architecture.has_early_mxfp4);
    let tensors = reader.tensors(tensors)?;
    let alignment = metadata.size("general.alignment")?.unwrap_or(DEFAULT_ALIGNMENT);
    if !alignment.is_power_of_two() {
        let problem = format!("`general.alignment` is {alignment}, expected a power of two");
        return Err(Error::file(path, problem, REMEDY));
    }
    opening.spend_bytes(path, reader.position)?;
    let data = Data { path, start: reader.position.next_multiple_of(alignment.into()), len, alignment };
    let tensors = tensors
        .into_iter()
        .map(|(name, raw)| data.place(name, raw, early_mxfp4))
        .collect::<Result<Vec<_>>>()?;
    data.check_overlaps(&tensors)?;
    Ok(Header { metadata, tensors })
}

struct RawTensor {
    dims: Vec<u64>,
    type_id: u32,
    offset: u64,
}

struct Reader<'a> {
    path: &'a Path,
    file: BufReader<&'a mut File>,
    position: u64,
    /// Nothing is read from here on.
    end: u64,
}

impl Reader<'_> {
    fn wrong(&self, problem: impl Into<String>) -> Error {
        Error::file(self.path, problem, REMEDY)
    }

    fn version(&mut self) -> Result<()> {
        if self.take::<4>("the magic number")? != *MAGIC {
            return Err(self.wrong("not a GGUF file"));
        }
        let version = self.u32("the version")?;
        let unsupported = |what| Error::Unsupported {
            what: format!("{}: {what}", self.path.display()),
            remedy: "convert the model again with a current tool; versions 2 and 3 are read".into(),
        };
        match version {
            2 | 3 => Ok(()),
            _ if matches!(version.swap_bytes(), 1..=3) => Err(unsupported("a big-endian GGUF file".into())),
            _ => Err(unsupported(format!("GGUF version {version}"))),
        }
    }

    /// Refuses counts of things that the rest of the file has no room for.
    fn fits(&self, count: u64, least: u64, what: fmt::Arguments) -> Result<()> {
        let left = self.end - self.position;
        match count.checked_mul(least) {
            Some(bytes) if bytes <= left => Ok(()),
            _ => Err(self.wrong(format!("{count} {what} do not fit the {left} bytes that are left"))),
        }
    }

    fn bytes(&mut self, count: u64, what: &str) -> Result<Vec<u8>> {
        self.fits(count, 1, format_args!("bytes of {what}"))?;
        let size = usize::try_from(count).map_err(|_| self.wrong(format!("{what} of {count} bytes")))?;
        let mut bytes = vec![0; size];
        self.read(&mut bytes)?;
        Ok(bytes)
    }

    fn take<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        self.fits(N as u64, 1, format_args!("bytes of {what}"))?;
        let mut bytes = [0; N];
        self.read(&mut bytes)?;
        Ok(bytes)
    }

    /// Fills `bytes`; that they are there has been checked.
    fn read(&mut self, bytes: &mut [u8]) -> Result<()> {
        self.file.read_exact(bytes).map_err(|error| Error::Io { path: self.path.to_owned(), error })?;
        self.position += bytes.len() as u64;
        Ok(())
    }

    fn u32(&mut self, what: &str) -> Result<u32> {
        self.take(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64> {
        self.take(what).map(u64::from_le_bytes)
    }

    fn text(&mut self, what: &str) -> Result<String> {
        let len = self.u64(what)?;
        let bytes = self.bytes(len, what)?;
        String::from_utf8(bytes).map_err(|_| self.wrong(format!("{what} is not UTF-8")))
    }

    fn metadata(&mut self, count: u64) -> Result<Metadata> {
        let mut values = BTreeMap::new();
        for _ in 0..count {
            let key = self.text("a key")?;
            let value = self.value(&key)?;
            match values.entry(key) {
                btree_map::Entry::Occupied(entry) => {
                    return Err(self.wrong(format!("the key `{}` comes twice", entry.key())))
                }
                btree_map::Entry::Vacant(entry) => entry.insert(value),
            };
        }
        Ok(Metadata { path: self.path.into(), values })
    }

    fn value(&mut self, key: &str) -> Result<Value> {
        let kind = Type(self.u32("the type of a value")?);
        match (kind, kind.size()) {
            (Type::TEXT, _) => self.text(&format!("the value of `{key}`")).map(Value::Text),
            (Type::ARRAY, _) => self.array(key).map(Value::Array),
            (_, Some(size)) => {
                let bytes = self.bytes(size as u64, "a value")?;
                let value = kind.value(&bytes);
                value.ok_or_else(|| self.wrong(format!("`{key}` is a bool of value {bytes:?}")))
            }
            (Type(other), None) => Err(self.wrong(format!("`{key}` has a value of unknown type {other}"))),
        }
    }

    fn array(&mut self, key: &str) -> Result<Array> {
        let item = Type(self.u32("the type of an array")?);
        let count = self.u64("the length of an array")?;
        let what = format!("elements of `{key}`");
        let element = format!("an element of `{key}`");
        let bytes = match (item, item.size()) {
            (Type::TEXT, _) => {
                self.fits(count, 8, format_args!("{what}"))?;
                let mut bytes = Vec::new();
                for _ in 0..count {
                    let text = self.text(&element)?;
                    bytes.extend_from_slice(&(text.len() as u64).to_le_bytes());
                    bytes.extend_from_slice(text.as_bytes());
                }
                bytes
            }
            (_, Some(size)) => {
                self.fits(count, size as u64, format_args!("{what}"))?;
                self.bytes(count * size as u64, &what)?
            }
            (Type::ARRAY, None) => return Err(self.wrong(format!("`{key}` is an array of arrays"))),
            (Type(other), None) => {
                return Err(self.wrong(format!("`{key}` is an array of unknown type {other}")))
            }
        };
        // It fits the file, so it fits the address space.
        Ok(Array { item, len: usize::try_from(count).unwrap_or(usize::MAX), bytes })
    }

    fn tensors(&mut self, count: u64) -> Result<Vec<(String, RawTensor)>> {
        let (mut tensors, mut names) = (Vec::new(), BTreeSet::new());
        for _ in 0..count {
            let name = self.text("a tensor's name")?;
            let rank = self.u32("the number of dimensions")?;
            if !(1..=MAX_DIMS).contains(&rank) {
                return Err(self.tensor(&name, "one to four dimensions", rank.to_string()));
            }
            let mut dims = (0..rank).map(|_| self.u64("a dimension")).collect::<Result<Vec<_>>>()?;
            dims.reverse();
            let type_id = self.u32("the type of a tensor")?;
            let offset = self.u64("the offset of a tensor")?;
            if !names.insert(name.clone()) {
                return Err(self.tensor(&name, "each name once", "it twice"));
            }
            tensors.push((name, RawTensor { dims, type_id, offset }));
        }
        Ok(tensors)
    }

    fn tensor(&self, name: &str, expected: impl Into<String>, found: impl Into<String>) -> Error {
        Error::tensor(self.path, name, expected, found, REMEDY)
    }
}

/// The part of a file behind its header.
struct Data<'a> {
    path: &'a Path,
    start: u64,
    /// Length of the file.
    len: u64,
    alignment: u32,
}

impl Data<'_> {
    /// Checks the shape and the place of a tensor.
    fn place(&self, name: String, raw: RawTensor, early_mxfp4: bool) -> Result<TensorEntry> {
        let wrong =
            |expected: String, found: String| Err(Error::tensor(self.path, &name, expected, found, REMEDY));
        let RawTensor { dims, type_id, offset } = raw;
        let block = block_type(type_id, early_mxfp4);
        let shape = |dims: &[u64]| format!("{} {dims:?}", block.map_or("unknown", |block| block.name));
        if !offset.is_multiple_of(self.alignment.into()) {
            return wrong(format!("an offset that is a multiple of {}", self.alignment), offset.to_string());
        }
        let to_usize = |dim: &u64| usize::try_from(*dim).ok().filter(|dim| *dim > 0);
        let Some(sizes) = dims.iter().map(to_usize).collect::<Option<Vec<_>>>() else {
            return wrong("dimensions of one and more".into(), format!("{dims:?}"));
        };
        let elements = sizes.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim));
        let size = match (elements, block, sizes.last()) {
            (Some(_), None, _) => 0,
            (Some(elements), Some(block), Some(&last)) => {
                if !last.is_multiple_of(block.elements) {
                    return wrong(
                        format!("rows of whole blocks of {} elements", block.elements),
                        shape(&dims),
                    );
                }
                match (elements / block.elements).checked_mul(block.bytes) {
                    Some(size) => size,
                    None => return wrong("a size that fits 64 bits".into(), shape(&dims)),
                }
            }
            _ => return wrong("a size that fits 64 bits".into(), shape(&dims)),
        };
        let begin = self.start.checked_add(offset);
        let end = begin.and_then(|begin| begin.checked_add(size as u64)).filter(|&end| end <= self.len);
        let to_usize = |bytes: Option<u64>| usize::try_from(bytes?).ok();
        match (to_usize(begin), to_usize(end)) {
            (Some(begin), Some(end)) => {
                Ok(TensorEntry { name, dims: sizes, type_id, block, range: begin..end })
            }
            _ => wrong(
                format!("{size} bytes of {} within the {} of the file", shape(&dims), self.len),
                format!("offset {offset} behind the header of {} bytes", self.start),
            ),
        }
    }

    fn check_overlaps(&self, tensors: &[TensorEntry]) -> Result<()> {
        let mut in_file_order: Vec<_> = tensors.iter().filter(|entry| !entry.range.is_empty()).collect();
        in_file_order.sort_by_key(|entry| entry.range.start);
        for (first, second) in in_file_order.iter().zip(in_file_order.iter().skip(1)) {
            if second.range.start < first.range.end {
                return Err(Error::tensor(
                    self.path,
                    &second.name,
                    format!("bytes from {} on, behind those of `{}`", first.range.end, first.name),
                    format!("{:?}, which overlap them", second.range),
                    REMEDY,
                ));
            }
        }
        Ok(())
    }
}
