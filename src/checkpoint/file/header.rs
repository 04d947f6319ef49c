//! The header of a safetensors file, checked in full before anything is allocated from it.
//!
//! A file is an 8-byte little-endian length, that many bytes of JSON, and the tensors' bytes without
//! gaps. The checks are those of the `safetensors` crate; they are made here because its errors do
//! not say which tensor is wrong, because it keeps the last of two tensors of one name, and because what it makes of a
//! header takes many times the header's size. Here it takes at most three times as much: the text, and a sorted list
//! whose entries are made while the text is read.

use super::json_map::{self, Entries};
use super::opening::Opening;
use super::tensors::{Tensors, Twice};
use super::{MappedFile, StoredTensor};
use crate::{Error, Result};
use safetensors::Dtype;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use std::{collections::BTreeMap, fmt, fs::File, io::Read, ops::Range, path::Path};

/// Bytes of the length field in front of the header.
const LENGTH_BYTES: u64 = 8;

/// Longer headers are refused, as the `safetensors` crate refuses them. A checkpoint of 10^5 tensors
/// needs about a tenth of this.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// The least that a tensor takes in a header.
const LEAST_ENTRY: usize = r#""":{"dtype":"U8","shape":[],"data_offsets":[0,0]},"#.len();

/// Tensors of more dimensions are refused. No model has such.
const MAX_DIMS: usize = 8;

/// Longer text of the metadata is dropped, and so is all of it if it is longer than this: nothing that is read there is.
const MAX_TEXT_BYTES: usize = 256;
const MAX_METADATA_BYTES: usize = 1 << 20;

const REMEDY: &str = "the file is damaged or incomplete: fetch or write it again";

#[derive(serde::Deserialize)]
struct RawInfo {
    dtype: Dtype,
    shape: Shape,
    data_offsets: (usize, usize),
}

/// Where one tensor lies in its file.
#[derive(Clone, Debug)]
pub(in crate::checkpoint) struct TensorInfo {
    pub dtype: Dtype,
    pub dims: Box<[usize]>,
    /// Bytes, counted from the start of the file. May begin at any offset.
    pub range: Range<usize>,
}

/// What a file says of itself.
pub(super) struct Header {
    pub tensors: Tensors,
    pub metadata: Metadata,
}

/// The free text of a safetensors header. What is not text there, or long, is dropped.
pub(in crate::checkpoint) type Metadata = BTreeMap<String, String>;

/// Reads and checks the header of the file at `path`, from its start on. Of the tensors nothing is read.
pub(super) fn read(path: &Path, file: &mut File, opening: &Opening) -> Result<Header> {
    let malformed = |problem: String| Error::file(path, problem, REMEDY);
    let io = |error| Error::Io { path: path.to_owned(), error };
    let size = file.metadata().map_err(io)?.len();
    let Some(after_length) = size.checked_sub(LENGTH_BYTES) else {
        return Err(malformed(format!("{size} bytes are too few for a safetensors file")));
    };
    let mut length = [0; LENGTH_BYTES as usize];
    file.read_exact(&mut length).map_err(io)?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER_BYTES {
        return Err(malformed(format!(
            "not a safetensors file: it claims a header of {length} bytes (at most {MAX_HEADER_BYTES} are read)"
        )));
    }
    let (Some(data_len), Ok(header_len)) = (after_length.checked_sub(length), usize::try_from(length)) else {
        return Err(malformed(format!(
            "the header claims {length} bytes and the file has {after_length} after the length field"
        )));
    };
    opening.spend_bytes(path, length)?;
    let mut json = vec![0; header_len];
    file.read_exact(&mut json).map_err(io)?;
    let mapped = MappedFile::new(path, file)?;
    let to_usize = |bytes: u64| {
        usize::try_from(bytes).map_err(|_| malformed(format!("{bytes} bytes exceed the address space")))
    };
    let data = Data { path, start: to_usize(LENGTH_BYTES + length)?, len: to_usize(data_len)? };
    if mapped.len() != to_usize(size)? {
        let problem = format!("{size} bytes, and then {}: the file changes while it is opened", mapped.len());
        return Err(malformed(problem));
    }
    let objects = json.iter().filter(|byte| **byte == b'{').count();
    let mut tensors = Vec::with_capacity(objects.min(header_len / LEAST_ENTRY));
    let mut metadata = Metadata::new();
    let most = opening.entries_left();
    let parsed = json_map::read(&json, |name, entry: Entry| {
        match entry {
            Entry::Metadata(texts) => metadata = texts,
            Entry::Tensor(RawInfo { dtype, shape: Shape(dims), data_offsets: (start, end) }) => {
                let info = TensorInfo { dtype, dims, range: start..end };
                tensors.push((name.into(), StoredTensor::unchecked(&mapped, info)));
            }
        }
        tensors.len() as u64 <= most
    });
    drop(json);
    // That they are too many is why the text was not read to its end.
    opening.spend_entries(path, tensors.len() as u64, 1)?;
    parsed.map_err(|error| malformed(format!("malformed safetensors header: {error}")))?;
    let tensors = Tensors::new(tensors).map_err(|Twice { name, .. }| {
        malformed(format!("malformed safetensors header: `{name}` is listed twice"))
    })?;
    Ok(Header { tensors: data.place(tensors)?, metadata })
}

/// The part of a file behind its header.
struct Data<'a> {
    path: &'a Path,
    start: usize,
    len: usize,
}

impl Data<'_> {
    /// Checks sizes and offsets, and makes the offsets relative to the file.
    fn place(&self, mut tensors: Tensors) -> Result<Tensors> {
        for (name, tensor) in tensors.iter() {
            self.check(name, tensor.info())?;
        }
        let mut expected = 0;
        for (name, &Range { start, end }) in tensors.in_file_order() {
            if start != expected {
                let what = if start < expected { "overlaps the tensor before it" } else { "leaves a gap" };
                return Err(Error::tensor(
                    self.path,
                    name,
                    format!("data at offset {expected}"),
                    format!("offset {start}, which {what}"),
                    REMEDY,
                ));
            }
            expected = end;
        }
        if expected != self.len {
            let problem = format!("{} bytes after the last tensor", self.len - expected);
            return Err(Error::file(self.path, problem, REMEDY));
        }
        // The sums are at most the file's length, so they cannot overflow.
        tensors.move_by(self.start);
        Ok(tensors)
    }

    fn check(&self, name: &str, info: &TensorInfo) -> Result<()> {
        let TensorInfo { dtype, dims, range: Range { start, end } } = info;
        let wrong =
            |expected: String, found: String| Err(Error::tensor(self.path, name, expected, found, REMEDY));
        let Some(size) = size_in_bytes(*dtype, dims) else {
            let expected = "a shape of whole bytes that fits 64 bits".into();
            return wrong(expected, format!("{dtype:?} {dims:?}"));
        };
        if *end > self.len {
            let expected = format!("data_offsets within the {} bytes of tensors in the file", self.len);
            return wrong(expected, format!("[{start}, {end}]"));
        }
        if end.checked_sub(*start) != Some(size) {
            let expected = format!("data_offsets that span {size} bytes for {dtype:?} {dims:?}");
            return wrong(expected, format!("[{start}, {end}]"));
        }
        Ok(())
    }
}

/// Bytes of a tensor; `None` if they overflow or are not whole (sub-byte dtypes).
pub(super) fn size_in_bytes(dtype: Dtype, dims: &[usize]) -> Option<usize> {
    let elements = dims.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim))?;
    let bits = elements.checked_mul(dtype.bitsize())?;
    (bits % 8 == 0).then_some(bits / 8)
}

/// What stands under a key of the header.
enum Entry {
    Tensor(RawInfo),
    Metadata(Metadata),
}

impl<'de> Entries<'de> for Entry {
    fn value<A: MapAccess<'de>>(name: &str, map: &mut A) -> Result<Self, A::Error> {
        if name != "__metadata__" {
            return map.next_value().map(Self::Tensor);
        }
        let raw: &RawValue = map.next_value()?;
        let is_read = raw.get().starts_with('{') && raw.get().len() <= MAX_METADATA_BYTES;
        let object = is_read.then(|| serde_json::from_str::<BTreeMap<_, _>>(raw.get()));
        let object: BTreeMap<String, &RawValue> =
            object.transpose().map_err(A::Error::custom)?.unwrap_or_default();
        let text = |(key, value): (String, &RawValue)| {
            let is_short = value.get().len() <= MAX_TEXT_BYTES;
            Some((key, is_short.then(|| serde_json::from_str(value.get()).ok()).flatten()?))
        };
        Ok(Self::Metadata(object.into_iter().filter_map(text).collect()))
    }
}

/// The dimensions of a tensor.
struct Shape(Box<[usize]>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Dims;

        impl<'de> Visitor<'de> for Dims {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a shape")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut numbers: A) -> Result<Shape, A::Error> {
                let mut dims = [0; MAX_DIMS];
                let mut count = 0;
                while let Some(dim) = numbers.next_element()? {
                    let place = dims.get_mut(count);
                    *place.ok_or_else(|| {
                        A::Error::custom(format_args!("a shape of more than {MAX_DIMS} dimensions"))
                    })? = dim;
                    count += 1;
                }
                Ok(Shape(dims.iter().copied().take(count).collect()))
            }
        }

        deserializer.deserialize_seq(Dims)
    }
}
