//! Memory-mapped files, and the copy of one tensor's bytes out of them.

use super::header::{self, Header, Metadata};
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor, WithDType};
use half::{bf16, f16};
use memmap2::Mmap;
use safetensors::Dtype;
use std::{
    collections::BTreeMap,
    fmt,
    fs::File,
    io::{Read, Seek, SeekFrom},
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Bytes copied before the pages behind them are given back. A multiple of every element size and
/// of every page size.
const COPY_CHUNK: usize = 4 << 20;

/// One open file.
pub(super) struct MappedFile {
    path: PathBuf,
    map: Mmap,
}

/// Where one tensor lies in its file.
#[derive(Debug)]
pub(super) struct TensorInfo {
    pub dtype: Dtype,
    pub dims: Vec<usize>,
    /// Bytes, counted from the start of the file. May begin at any offset.
    pub range: Range<usize>,
}

/// Bytes of small tensors, by name.
pub(super) type Values = BTreeMap<String, Vec<u8>>;

/// One tensor of a mapped file. Cloning shares the mapping.
#[derive(Clone)]
pub(super) struct StoredTensor {
    file: Arc<MappedFile>,
    info: Arc<TensorInfo>,
}

/// Maps a safetensors file and checks its header. Of the tensors nothing is read.
pub(super) fn open(path: &Path) -> Result<BTreeMap<String, StoredTensor>> {
    Ok(open_with_metadata(path)?.0)
}

/// As [`open`], with the free text of the header.
pub(super) fn open_with_metadata(path: &Path) -> Result<(BTreeMap<String, StoredTensor>, Metadata)> {
    let mut file = open_file(path)?;
    let Header { tensors, metadata } = header::read(path, &mut file)?;
    Ok((map_all(path, &file, tensors)?, metadata))
}

/// As [`open`], with the bytes of every tensor that has at most `most` of them.
pub(super) fn open_with_values(path: &Path, most: usize) -> Result<(BTreeMap<String, StoredTensor>, Values)> {
    let mut file = open_file(path)?;
    let Header { tensors, .. } = header::read(path, &mut file)?;
    let mut read = |range: &Range<usize>| {
        let mut bytes = vec![0; range.len()];
        file.seek(SeekFrom::Start(range.start as u64))?;
        file.read_exact(&mut bytes)?;
        Ok(bytes)
    };
    let mut values = Values::new();
    for (name, info) in tensors.iter().filter(|(_, info)| info.range.len() <= most) {
        let bytes = read(&info.range).map_err(|error| Error::Io { path: path.to_owned(), error })?;
        values.insert(name.clone(), bytes);
    }
    Ok((map_all(path, &file, tensors)?, values))
}

fn map_all(
    path: &Path,
    file: &File,
    tensors: BTreeMap<String, TensorInfo>,
) -> Result<BTreeMap<String, StoredTensor>> {
    let file = MappedFile::new(path, file)?;
    let stored = |(name, info): (String, _)| {
        let tensor = file.tensor(&name, info)?;
        Ok((name, tensor))
    };
    tensors.into_iter().map(stored).collect()
}

/// Opens a regular file for reading.
///
/// What is needed while opening a checkpoint is read from the file, not from a mapping: a file that shrinks
/// meanwhile is an error then, and does not kill the process.
pub(super) fn open_file(path: &Path) -> Result<File> {
    let io = |error| Error::Io { path: path.to_owned(), error };
    // Asked before opening: to open a named pipe would block.
    if !std::fs::metadata(path).map_err(io)?.is_file() {
        return Err(Error::file(path, "not a regular file", "give a directory or a file of weights"));
    }
    File::open(path).map_err(io)
}

impl MappedFile {
    /// Maps an open file. Nothing is read.
    pub(super) fn new(path: &Path, file: &File) -> Result<Arc<Self>> {
        // SAFETY: the mapping is read-only and only ever seen as bytes, for which every value is valid.
        // That nobody truncates or rewrites the file meanwhile cannot be ensured from here; the module
        // docs state what follows if somebody does.
        let map = unsafe { Mmap::map(file) };
        let map = map.map_err(|error| Error::Io { path: path.to_owned(), error })?;
        Ok(Arc::new(Self { path: path.to_owned(), map }))
    }

    /// A tensor of this file.
    ///
    /// # Errors
    /// If its bytes are not in the file.
    pub(super) fn tensor(self: &Arc<Self>, name: &str, info: TensorInfo) -> Result<StoredTensor> {
        let Range { start, end } = info.range;
        if start > end || end > self.map.len() {
            return Err(Error::tensor(
                &self.path,
                name,
                format!("bytes within the {} of the file", self.map.len()),
                format!("{start}..{end}"),
                "the file is damaged or incomplete: fetch or write it again",
            ));
        }
        Ok(StoredTensor { file: Arc::clone(self), info: Arc::new(info) })
    }

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

    /// The same bytes as numbers of another dtype and shape; `None` if these have another number of bytes.
    pub(super) fn as_numbers(&self, dtype: Dtype, dims: &[usize]) -> Option<Self> {
        let info = TensorInfo { dtype, dims: dims.to_vec(), range: self.info.range.clone() };
        (header::size_in_bytes(dtype, dims) == Some(self.size_in_bytes()))
            .then(|| Self { file: Arc::clone(&self.file), info: Arc::new(info) })
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
        let mut elements = Vec::with_capacity(self.size_in_bytes() / T::SIZE);
        self.for_each_chunk(1, |chunk| T::append(chunk, &mut elements))?;
        Ok(elements)
    }

    /// Hands the bytes to `take`, in order and in pieces of whole units of `unit` bytes.
    pub(super) fn for_each_chunk(&self, unit: usize, mut take: impl FnMut(&[u8])) -> Result<()> {
        let unit = unit.max(1);
        let step = (COPY_CHUNK / unit).max(1).saturating_mul(unit);
        for (i, chunk) in self.bytes()?.chunks(step).enumerate() {
            take(chunk);
            self.file.release(self.info.range.start + i * step, chunk.len());
        }
        Ok(())
    }

    /// Lends the bytes at an address that is a multiple of 8, copied if they lie elsewhere.
    pub(super) fn with_aligned<R>(&self, take: impl FnOnce(&[u8]) -> R) -> Result<R> {
        let bytes = self.bytes()?;
        if bytes.as_ptr().addr().is_multiple_of(align_of::<u64>()) {
            let result = take(bytes);
            self.file.release(self.info.range.start, bytes.len());
            return Ok(result);
        }
        let mut copy = vec![0u64; bytes.len().div_ceil(size_of::<u64>())];
        let mut rest: &mut [u8] = bytemuck::cast_slice_mut(&mut copy);
        self.for_each_chunk(1, |chunk| {
            let (head, tail) = std::mem::take(&mut rest).split_at_mut(chunk.len());
            head.copy_from_slice(chunk);
            rest = tail;
        })?;
        Ok(take(&bytemuck::cast_slice(&copy)[..bytes.len()]))
    }

    /// Lends a copy of the rows, `order.len()` of equal length, whose row `i` is the stored row `order[i]`.
    pub(super) fn with_rows<R>(&self, order: &[usize], take: impl FnOnce(&[u8]) -> R) -> Result<R> {
        let bytes = self.bytes()?;
        let row = bytes.len() / order.len().max(1);
        let mut copy = vec![0u64; bytes.len().div_ceil(size_of::<u64>())];
        let rows = bytemuck::cast_slice_mut::<u64, u8>(&mut copy).chunks_exact_mut(row.max(1));
        for (to, &from) in rows.zip(order) {
            to.copy_from_slice(bytes.get(from * row..).and_then(|rest| rest.get(..row)).ok_or_else(
                || {
                    Error::file(
                        self.path(),
                        format!("no row {from} of {} bytes", bytes.len()),
                        "fetch it again",
                    )
                },
            )?);
        }
        self.file.release(self.info.range.start, bytes.len());
        Ok(take(&bytemuck::cast_slice(&copy)[..bytes.len()]))
    }

    /// A run of elements as a tensor of one dimension; `None` if it is not within the tensor, or its elements are
    /// not whole bytes.
    pub(super) fn elements(&self, elements: Range<usize>) -> Option<Self> {
        let size = header::size_in_bytes(self.dtype(), &[1])?;
        let Range { start, end } = self.info.range;
        let begin = start.checked_add(elements.start.checked_mul(size)?)?;
        let stop = start.checked_add(elements.end.checked_mul(size)?)?;
        let info = TensorInfo { dtype: self.dtype(), dims: vec![elements.len()], range: begin..stop };
        (begin <= stop && stop <= end).then(|| Self { file: Arc::clone(&self.file), info: Arc::new(info) })
    }

    /// All bytes, in the mapping.
    fn bytes(&self) -> Result<&[u8]> {
        // Always there: `MappedFile::tensor` has checked it.
        self.file.map.get(self.info.range.clone()).ok_or_else(|| {
            let problem = format!("bytes {:?} are outside the file", self.info.range);
            Error::file(self.path(), problem, "fetch or write it again")
        })
    }
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
