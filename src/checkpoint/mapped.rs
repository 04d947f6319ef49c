//! Memory-mapped files, and the copy of one tensor's bytes out of them.

use super::header::{self, Header, Metadata};
use super::section::Section;
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

/// One tensor of a mapped file, or a part of one. Cloning shares the mapping.
#[derive(Clone)]
pub(super) struct StoredTensor {
    file: Arc<MappedFile>,
    info: Arc<TensorInfo>,
    /// Which of the bytes in the range of `info`; all of them if `None`. The dims of `info` are those of the part.
    part: Option<Section>,
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
        Ok(StoredTensor { file: Arc::clone(self), info: Arc::new(info), part: None })
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
        self.part.as_ref().map_or(self.info.range.len(), Section::size_in_bytes)
    }

    /// The same bytes as numbers of another dtype and shape; `None` if these have another number of bytes.
    pub(super) fn as_numbers(&self, dtype: Dtype, dims: &[usize]) -> Option<Self> {
        let info = TensorInfo { dtype, dims: dims.to_vec(), range: self.info.range.clone() };
        (header::size_in_bytes(dtype, dims) == Some(self.size_in_bytes())).then(|| Self {
            file: Arc::clone(&self.file),
            info: Arc::new(info),
            part: self.part.clone(),
        })
    }

    /// Entries `range` along dimension `dim` of the tensor, seen as a row-major array of `sizes`, the last one and
    /// a range of it in bytes.
    ///
    /// # Errors
    /// If these are not the sizes of the tensor, or of the part that it is, or the range leaves them.
    pub(super) fn narrow(&self, sizes: &[usize], dim: usize, range: &Range<usize>) -> Result<Self> {
        let whole = || Section::whole(sizes, self.size_in_bytes());
        let section = self.part.clone().map_or_else(whole, Some);
        let section = section.and_then(|section| section.narrow(sizes, dim, range));
        section.map(|section| self.of_section(section)).ok_or_else(|| {
            let what = format!("range {range:?} of dimension {dim} of {self:?}");
            Error::mismatch(what, format!("entries of {sizes:?}"), "others")
        })
    }

    /// The tensor with its rows in another order: row `i` is the stored row `order[i]`.
    ///
    /// # Errors
    /// If it has no rows of these numbers, or is only a part of a tensor.
    pub(super) fn reordered(&self, order: &Arc<[usize]>) -> Result<Self> {
        let row = self.size_in_bytes().checked_div(order.len()).unwrap_or(0);
        let section = match self.part {
            None => Section::whole(&[order.len(), row], self.size_in_bytes()),
            Some(_) => None,
        };
        let section = section.and_then(|section| section.reordered(order)).ok_or_else(|| {
            Error::mismatch(format!("rows of {self:?}"), format!("{} of one length", order.len()), "others")
        })?;
        Ok(Self { part: Some(section), ..self.clone() })
    }

    /// Every second entry of dimension `dim` of the tensor, seen as a row-major array of `sizes`, the last one in
    /// bytes, from `first` on.
    ///
    /// # Errors
    /// If these are not the sizes of the tensor, or it is only a part of one.
    pub(super) fn every_second(&self, sizes: &[usize], dim: usize, first: usize) -> Result<Self> {
        let section = match self.part {
            None => Section::whole(sizes, self.size_in_bytes()),
            Some(_) => None,
        };
        section
            .and_then(|section| section.every(dim, first, 2))
            .map(|section| self.of_section(section))
            .ok_or_else(|| {
                Error::mismatch(
                    format!("every second entry of {self:?}"),
                    format!("sizes {sizes:?}"),
                    "others",
                )
            })
    }

    fn of_section(&self, section: Section) -> Self {
        let mut dims = section.dims();
        if let Some(last) = dims.last_mut() {
            *last = last.saturating_mul(8) / self.dtype().bitsize().max(1);
        }
        let info = TensorInfo { dtype: self.dtype(), dims, range: self.info.range.clone() };
        Self { file: Arc::clone(&self.file), info: Arc::new(info), part: Some(section) }
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
        if let Some(run) = self.only_run() {
            for start in run.clone().step_by(step) {
                let chunk = start..start.saturating_add(step).min(run.end);
                take(self.bytes(chunk.clone())?);
                self.file.release(chunk.start, chunk.len());
            }
            return Ok(());
        }
        let mut chunk = Vec::with_capacity(step.min(self.size_in_bytes()));
        for run in self.runs() {
            let mut rest = self.bytes(run.clone())?;
            while !rest.is_empty() {
                let (head, tail) = rest.split_at(rest.len().min(step - chunk.len()));
                chunk.extend_from_slice(head);
                rest = tail;
                if chunk.len() == step {
                    take(&chunk);
                    chunk.clear();
                    self.file.release(self.info.range.start, self.info.range.len());
                }
            }
        }
        if !chunk.is_empty() {
            take(&chunk);
        }
        self.file.release(self.info.range.start, self.info.range.len());
        Ok(())
    }

    /// Lends the bytes at an address that is a multiple of 8, copied if they lie elsewhere or apart.
    pub(super) fn with_aligned<R>(&self, take: impl FnOnce(&[u8]) -> R) -> Result<R> {
        if let Some(run) = self.only_run() {
            let address = self.file.map.as_ptr().addr().wrapping_add(run.start);
            if address.is_multiple_of(align_of::<u64>()) {
                let result = take(self.bytes(run.clone())?);
                self.file.release(run.start, run.len());
                return Ok(result);
            }
        }
        let size = self.size_in_bytes();
        let mut copy = vec![0u64; size.div_ceil(size_of::<u64>())];
        let mut rest: &mut [u8] = bytemuck::cast_slice_mut(&mut copy);
        self.for_each_chunk(1, |chunk| {
            let (head, tail) = std::mem::take(&mut rest).split_at_mut(chunk.len());
            head.copy_from_slice(chunk);
            rest = tail;
        })?;
        Ok(take(&bytemuck::cast_slice(&copy)[..size]))
    }

    /// Where the bytes lie in the file, if they lie together.
    fn only_run(&self) -> Option<Range<usize>> {
        let mut runs = self.runs();
        let first = runs.next()?;
        runs.next().is_none().then_some(first)
    }

    /// Whether it is all of a tensor, in the order of the file.
    pub(super) fn is_whole(&self) -> bool {
        self.part.is_none()
    }

    /// A run of elements as a tensor of one dimension; `None` if it is not within the tensor, or its elements are
    /// not whole bytes, or this is a part of a tensor.
    pub(super) fn elements(&self, elements: Range<usize>) -> Option<Self> {
        let size = header::size_in_bytes(self.dtype(), &[1])?;
        let Range { start, end } = self.info.range;
        let begin = start.checked_add(elements.start.checked_mul(size)?)?;
        let stop = start.checked_add(elements.end.checked_mul(size)?)?;
        let info = TensorInfo { dtype: self.dtype(), dims: vec![elements.len()], range: begin..stop };
        let within = begin <= stop && stop <= end && self.is_whole();
        within.then(|| Self { file: Arc::clone(&self.file), info: Arc::new(info), part: None })
    }

    /// Where the bytes lie in the file, in order.
    fn runs(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let base = self.info.range.start;
        let whole = self.part.is_none().then(|| self.info.range.clone());
        let part = self.part.iter().flat_map(Section::runs);
        whole.into_iter().chain(part.map(move |run| base + run.start..base + run.end))
    }

    /// Bytes of the mapping.
    fn bytes(&self, range: Range<usize>) -> Result<&[u8]> {
        #[cfg(test)]
        super::reads::record(self.path(), &range);
        // Always there: `MappedFile::tensor` has checked it.
        self.file.map.get(range.clone()).ok_or_else(|| {
            Error::file(
                self.path(),
                format!("bytes {range:?} are outside the file"),
                "fetch or write it again",
            )
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
