//! Memory-mapped safetensors files, and the copy of one tensor's bytes out of them.

use super::header::{self, TensorInfo};
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor, WithDType};
use half::{bf16, f16};
use memmap2::Mmap;
use safetensors::Dtype;
use std::{
    collections::BTreeMap,
    fmt,
    fs::File,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Bytes copied before the pages behind them are given back. A multiple of every element size and
/// of every page size.
const COPY_CHUNK: usize = 4 << 20;

/// One open file.
struct MappedFile {
    path: PathBuf,
    map: Mmap,
}

/// One tensor of a mapped file. Cloning shares the mapping.
#[derive(Clone)]
pub(super) struct StoredTensor {
    file: Arc<MappedFile>,
    info: Arc<TensorInfo>,
}

/// Maps a safetensors file and checks its header. Of the tensors nothing is read.
pub(super) fn open(path: &Path) -> Result<BTreeMap<String, StoredTensor>> {
    let io = |error| Error::Io { path: path.to_owned(), error };
    // Asked before opening: to open a named pipe would block.
    if !std::fs::metadata(path).map_err(io)?.is_file() {
        return Err(Error::File {
            path: path.to_owned(),
            problem: "not a regular file".into(),
            remedy: "give a directory or a .safetensors file".into(),
        });
    }
    let file = File::open(path).map_err(io)?;
    // SAFETY: the mapping is read-only and only ever seen as bytes, for which every value is valid.
    // That nobody truncates or rewrites the file meanwhile cannot be ensured from here; the module
    // docs state what follows if somebody does.
    let map = unsafe { Mmap::map(&file) }.map_err(io)?;
    let tensors = header::parse(path, &map)?;
    let file = Arc::new(MappedFile { path: path.to_owned(), map });
    let stored = |info| StoredTensor { file: Arc::clone(&file), info: Arc::new(info) };
    Ok(tensors.into_iter().map(|(name, info)| (name, stored(info))).collect())
}

impl StoredTensor {
    pub(super) fn path(&self) -> &Path {
        &self.file.path
    }

    pub(super) fn dtype(&self) -> Dtype {
        self.info.dtype
    }

    pub(super) fn dims(&self) -> &[usize] {
        &self.info.dims
    }

    pub(super) fn size_in_bytes(&self) -> usize {
        self.info.range.len()
    }

    /// The tensor on `device`, in the dtype of the file. 8-bit floats come as their bytes (U8).
    pub(super) fn load(&self, device: &Device) -> Result<Tensor> {
        match self.dtype() {
            Dtype::U8 | Dtype::F8_E4M3 | Dtype::F8_E8M0 => self.load_as::<u8>(device),
            Dtype::U32 => self.load_as::<u32>(device),
            Dtype::I16 => self.load_as::<i16>(device),
            Dtype::I32 => self.load_as::<i32>(device),
            Dtype::I64 => self.load_as::<i64>(device),
            Dtype::F16 => self.load_as::<f16>(device),
            Dtype::BF16 => self.load_as::<bf16>(device),
            Dtype::F32 => self.load_as::<f32>(device),
            Dtype::F64 => self.load_as::<f64>(device),
            other => Err(Error::Unsupported {
                what: format!("a {other:?} tensor"),
                remedy: "convert it to F16, BF16 or F32".into(),
            }),
        }
    }

    fn load_as<T: Element>(&self, device: &Device) -> Result<Tensor> {
        Ok(Tensor::from_vec(self.read::<T>()?, self.dims(), device)?)
    }

    /// The elements, copied once. The bytes may lie at any offset, so they are never viewed as `&[T]`.
    pub(super) fn read<T: Element>(&self) -> Result<Vec<T>> {
        // Always there: the header check bounds every range by the length of the mapping.
        let bytes = self.file.map.get(self.info.range.clone()).ok_or_else(|| Error::File {
            path: self.path().to_owned(),
            problem: format!("bytes {:?} are outside the file", self.info.range),
            remedy: "fetch or write it again".into(),
        })?;
        let mut elements = Vec::with_capacity(bytes.len() / T::SIZE);
        for (i, chunk) in bytes.chunks(COPY_CHUNK).enumerate() {
            T::append(chunk, &mut elements);
            self.file.release(self.info.range.start + i * COPY_CHUNK, chunk.len());
        }
        Ok(elements)
    }
}

impl MappedFile {
    /// Takes copied pages out of the process's resident set, so that loading does not hold a weight
    /// twice. They stay in the page cache of the system. A hint: failure costs memory only.
    #[cfg(target_os = "linux")]
    fn release(&self, offset: usize, len: usize) {
        // SAFETY: MADV_DONTNEED on a read-only mapping of a file loses nothing: whoever reads the
        // pages again, in this or another thread, gets the file's bytes again.
        let _ = unsafe { self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, offset, len) };
    }

    #[cfg(not(target_os = "linux"))]
    fn release(&self, _offset: usize, _len: usize) {}
}

impl fmt::Debug for StoredTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {:?} in {}", self.dtype(), self.dims(), self.path().display())
    }
}

/// The candle dtype that means the same numbers, or `None` for dtypes that are not loaded as numbers.
pub(super) fn candle_dtype(dtype: Dtype) -> Option<DType> {
    match dtype {
        Dtype::U8 => Some(DType::U8),
        Dtype::U32 => Some(DType::U32),
        Dtype::I16 => Some(DType::I16),
        Dtype::I32 => Some(DType::I32),
        Dtype::I64 => Some(DType::I64),
        Dtype::F16 => Some(DType::F16),
        Dtype::BF16 => Some(DType::BF16),
        Dtype::F32 => Some(DType::F32),
        Dtype::F64 => Some(DType::F64),
        _ => None,
    }
}

/// A number as safetensors files hold it: little-endian, unaligned.
pub(super) trait Element: WithDType {
    const SIZE: usize;
    /// Appends the whole elements of `bytes`. Compiles to a plain copy on little-endian machines.
    fn append(bytes: &[u8], elements: &mut Vec<Self>);
}

macro_rules! element {
    ($($type:ty),*) => {$(
        impl Element for $type {
            const SIZE: usize = size_of::<$type>();
            fn append(bytes: &[u8], elements: &mut Vec<Self>) {
                let (whole, _) = bytes.as_chunks::<{ size_of::<$type>() }>();
                elements.extend(whole.iter().map(|bytes| Self::from_le_bytes(*bytes)));
            }
        }
    )*};
}
element!(u8, u32, i16, i32, i64, f16, bf16, f32, f64);
