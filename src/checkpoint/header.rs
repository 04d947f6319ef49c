//! The header of a safetensors file, checked in full before anything is allocated from it.
//!
//! A file is an 8-byte little-endian length, that many bytes of JSON, and the tensors' bytes without
//! gaps. The checks are those of the `safetensors` crate; they are made here because its errors do
//! not say which tensor is wrong, and because it keeps the last of two tensors of one name.

use crate::{Error, Result};
use safetensors::Dtype;
use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use std::{collections::BTreeMap, fmt, marker::PhantomData, ops::Range, path::Path};

/// Bytes of the length field in front of the header.
const LENGTH_BYTES: usize = 8;

/// Longer headers are refused, as the `safetensors` crate refuses them. A checkpoint of 10^5 tensors
/// needs about a tenth of this.
const MAX_HEADER_BYTES: u64 = 100_000_000;

const REMEDY: &str = "the file is damaged or incomplete: fetch or write it again";

/// Where one tensor lies in its file.
#[derive(Debug)]
pub(super) struct TensorInfo {
    pub dtype: Dtype,
    pub dims: Vec<usize>,
    /// Bytes, counted from the start of the file. May begin at any offset.
    pub range: Range<usize>,
}

#[derive(serde::Deserialize)]
struct RawInfo {
    dtype: Dtype,
    shape: Vec<usize>,
    data_offsets: (usize, usize),
}

/// Reads and checks the header of `file`, the bytes of the file at `path`.
pub(super) fn parse(path: &Path, file: &[u8]) -> Result<BTreeMap<String, TensorInfo>> {
    let malformed = |problem: String| Error::File { path: path.to_owned(), problem, remedy: REMEDY.into() };
    let Some((length, rest)) = file.split_first_chunk::<LENGTH_BYTES>() else {
        return Err(malformed(format!("{} bytes are too few for a safetensors file", file.len())));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER_BYTES {
        return Err(malformed(format!(
            "not a safetensors file: it claims a header of {length} bytes (at most {MAX_HEADER_BYTES} are read)"
        )));
    }
    let split = usize::try_from(length).ok().and_then(|n| rest.split_at_checked(n));
    let Some((json, data)) = split else {
        return Err(malformed(format!(
            "the header claims {length} bytes and the file has {} after the length field",
            rest.len()
        )));
    };
    let raw: UniqueMap<RawInfo> = serde_json::from_slice(json)
        .map_err(|error| malformed(format!("malformed safetensors header: {error}")))?;
    check(path, raw.0, file.len() - data.len(), data.len())
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
fn size_in_bytes(dtype: Dtype, dims: &[usize]) -> Option<usize> {
    let elements = dims.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim))?;
    let bits = elements.checked_mul(dtype.bitsize())?;
    (bits % 8 == 0).then_some(bits / 8)
}

/// A JSON object whose keys are tensor names: none may come twice, and errors name the tensor.
/// `__metadata__`, the free text of safetensors headers, is skipped.
pub(super) struct UniqueMap<V>(pub BTreeMap<String, V>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<V>(PhantomData<V>);

        impl<'de, V: Deserialize<'de>> Visitor<'de> for Entries<V> {
            type Value = BTreeMap<String, V>;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object with tensor names as keys")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = BTreeMap::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
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
                Ok(entries)
            }
        }

        deserializer.deserialize_map(Entries(PhantomData)).map(Self)
    }
}
