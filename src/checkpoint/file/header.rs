//! The header of a safetensors file, checked in full before anything is allocated from it.
//!
//! A file is an 8-byte little-endian length, that many bytes of JSON, and the tensors' bytes without
//! gaps. The checks are those of the `safetensors` crate; they are made here because its errors do
//! not say which tensor is wrong, and because it keeps the last of two tensors of one name.

use crate::{Error, Result};
use safetensors::Dtype;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
use serde_json::Value;
use std::{collections::BTreeMap, fmt, fs::File, io::Read, marker::PhantomData, ops::Range, path::Path};

/// Bytes of the length field in front of the header.
const LENGTH_BYTES: u64 = 8;

/// Longer headers are refused, as the `safetensors` crate refuses them. A checkpoint of 10^5 tensors
/// needs about a tenth of this.
const MAX_HEADER_BYTES: u64 = 100_000_000;

const REMEDY: &str = "the file is damaged or incomplete: fetch or write it again";

#[derive(serde::Deserialize)]
struct RawInfo {
    dtype: Dtype,
    shape: Vec<usize>,
    data_offsets: (usize, usize),
}

/// Where one tensor lies in its file.
#[derive(Debug)]
pub(in crate::checkpoint) struct TensorInfo {
    pub dtype: Dtype,
    pub dims: Vec<usize>,
    /// Bytes, counted from the start of the file. May begin at any offset.
    pub range: Range<usize>,
}

/// What a file says of itself.
pub(super) struct Header {
    pub tensors: BTreeMap<String, TensorInfo>,
    pub metadata: Metadata,
}

/// Reads and checks the header of the file at `path`, from its start on.
pub(super) fn read(path: &Path, file: &mut File) -> Result<Header> {
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
    let mut json = vec![0; header_len];
    file.read_exact(&mut json).map_err(io)?;
    let raw: UniqueMap<RawInfo> = serde_json::from_slice(&json)
        .map_err(|error| malformed(format!("malformed safetensors header: {error}")))?;
    let to_usize = |bytes: u64| {
        usize::try_from(bytes).map_err(|_| malformed(format!("{bytes} bytes exceed the address space")))
    };
    let tensors = check(path, raw.entries, to_usize(LENGTH_BYTES + length)?, to_usize(data_len)?)?;
    Ok(Header { tensors, metadata: raw.metadata })
}

/// Checks sizes and offsets, and makes the offsets relative to the file.
fn check(
    path: &Path,
    raw: BTreeMap<String, RawInfo>,
    data_start: usize,
    data_len: usize,
) -> Result<BTreeMap<String, TensorInfo>> {
    for (name, info) in &raw {
        let (begin, end) = info.data_offsets;
        let wrong = |expected: String, found: String| Error::Tensor {
            file: path.into(),
            tensor: name.clone(),
            expected,
            found,
            remedy: REMEDY.into(),
        };
        let size = size_in_bytes(info.dtype, &info.shape).ok_or_else(|| {
            wrong(
                "a shape of whole bytes that fits 64 bits".into(),
                format!("{:?} {:?}", info.dtype, info.shape),
            )
        })?;
        if end > data_len {
            return Err(wrong(
                format!("data_offsets within the {data_len} bytes of tensors in the file"),
                format!("[{begin}, {end}]"),
            ));
        }
        if end.checked_sub(begin) != Some(size) {
            return Err(wrong(
                format!("data_offsets that span {size} bytes for {:?} {:?}", info.dtype, info.shape),
                format!("[{begin}, {end}]"),
            ));
        }
    }
    let mut in_file_order: Vec<_> = raw.iter().map(|(name, info)| (info.data_offsets, name)).collect();
    in_file_order.sort_unstable();
    let mut expected = 0;
    for ((begin, end), name) in in_file_order {
        if begin != expected {
            let what = if begin < expected { "overlaps the tensor before it" } else { "leaves a gap" };
            return Err(Error::Tensor {
                file: path.into(),
                tensor: name.clone(),
                expected: format!("data at offset {expected}"),
                found: format!("offset {begin}, which {what}"),
                remedy: REMEDY.into(),
            });
        }
        expected = end;
    }
    if expected != data_len {
        return Err(Error::File {
            path: path.to_owned(),
            problem: format!("{} bytes after the last tensor", data_len - expected),
            remedy: REMEDY.into(),
        });
    }
    // `data_start + end` is at most the file's length, so these sums cannot overflow.
    let absolute = |info: RawInfo| TensorInfo {
        dtype: info.dtype,
        dims: info.shape,
        range: data_start + info.data_offsets.0..data_start + info.data_offsets.1,
    };
    Ok(raw.into_iter().map(|(name, info)| (name, absolute(info))).collect())
}

/// Bytes of a tensor; `None` if they overflow or are not whole (sub-byte dtypes).
pub(super) fn size_in_bytes(dtype: Dtype, dims: &[usize]) -> Option<usize> {
    let elements = dims.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim))?;
    let bits = elements.checked_mul(dtype.bitsize())?;
    (bits % 8 == 0).then_some(bits / 8)
}

/// A JSON object whose keys are tensor names: none may come twice, and errors name the tensor.
/// `__metadata__`, the free text of safetensors headers, is kept apart.
pub(super) struct UniqueMap<V> {
    pub entries: BTreeMap<String, V>,
    pub metadata: Metadata,
}

/// The free text of a safetensors header. What is not text there is dropped.
pub(in crate::checkpoint) type Metadata = BTreeMap<String, String>;

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<V>(PhantomData<V>);

        impl<'de, V: Deserialize<'de>> Visitor<'de> for Entries<V> {
            type Value = UniqueMap<V>;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object with tensor names as keys")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let (mut entries, mut metadata) = (BTreeMap::new(), Metadata::new());
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        if let Value::Object(object) = map.next_value()? {
                            let text =
                                |(key, value): (String, Value)| Some((key, value.as_str()?.to_owned()));
                            metadata = object.into_iter().filter_map(text).collect();
                        }
                        continue;
                    }
                    let value = map
                        .next_value()
                        .map_err(|error| A::Error::custom(format_args!("`{name}`: {error}")))?;
                    if entries.contains_key(&name) {
                        return Err(A::Error::custom(format_args!("`{name}` is listed twice")));
                    }
                    entries.insert(name, value);
                }
                Ok(UniqueMap { entries, metadata })
            }
        }

        deserializer.deserialize_map(Entries(PhantomData))
    }
}
