//! One tensor of a file, or a part of one, and the copy of its bytes out of the file.

use super::data::DataFile;
use super::header::{self, TensorInfo};
use super::room::{gather, room_for};
use super::section::Section;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor, WithDType};
use half::{bf16, f16};
use safetensors::Dtype;
use std::{fmt, ops::Range, path::Path, sync::Arc};

/// One tensor of a file, or a part of one. Cloning shares the file.
#[derive(Clone)]
pub(in crate::checkpoint) struct StoredTensor {
    file: Arc<DataFile>,
    info: TensorInfo,
    /// Which of the bytes in the range of `info`; all of them if `None`. The dims of `info` are those of the part.
    part: Option<Box<Section>>,
}

impl StoredTensor {
    /// A tensor of a file.
    ///
    /// # Errors
    /// If its bytes are not in the file.
    pub(in crate::checkpoint) fn new(file: &Arc<DataFile>, name: &str, info: TensorInfo) -> Result<Self> {
        let Range { start, end } = info.range;
        if start > end || end > file.len() {
            return Err(Error::tensor(
                file.path(),
                name,
                format!("bytes within the {} of the file", file.len()),
                format!("{start}..{end}"),
                "the file is damaged or incomplete: fetch or write it again",
            ));
        }
        Ok(Self::unchecked(file, info))
    }

    /// A tensor of a file whose range is checked later.
    pub(super) fn unchecked(file: &Arc<DataFile>, info: TensorInfo) -> Self {
        Self { file: Arc::clone(file), info, part: None }
    }

    pub(super) fn info(&self) -> &TensorInfo {
        &self.info
    }

    /// Counts the range from another place on.
    pub(super) fn move_by(&mut self, bytes: usize) {
        self.info.range = self.info.range.start + bytes..self.info.range.end + bytes;
    }

    pub(in crate::checkpoint) fn path(&self) -> &Path {
        self.file.path()
    }

    pub(in crate::checkpoint) fn dtype(&self) -> Dtype {
        self.info.dtype
    }

    pub(in crate::checkpoint) fn dims(&self) -> &[usize] {
        &self.info.dims
    }

    pub(in crate::checkpoint) fn size_in_bytes(&self) -> usize {
        self.part.as_ref().map_or(self.info.range.len(), |part| part.size_in_bytes())
    }

    /// The same bytes as numbers of another dtype and shape; `None` if these have another number of bytes.
    pub(in crate::checkpoint) fn as_numbers(&self, dtype: Dtype, dims: &[usize]) -> Option<Self> {
        let info = TensorInfo { dtype, dims: dims.into(), range: self.info.range.clone() };
        (header::size_in_bytes(dtype, dims) == Some(self.size_in_bytes())).then(|| Self {
            file: Arc::clone(&self.file),
            info,
            part: self.part.clone(),
        })
    }

    /// Entries `range` along dimension `dim` of the tensor, seen as a row-major array of `sizes`, the last one and
    /// a range of it in bytes.
    ///
    /// # Errors
    /// If these are not the sizes of the tensor, or of the part that it is, or the range leaves them.
    pub(in crate::checkpoint) fn narrow(
        &self,
        sizes: &[usize],
        dim: usize,
        range: &Range<usize>,
    ) -> Result<Self> {
        let whole = || Section::whole(sizes, self.size_in_bytes());
        let section = self.part.as_deref().cloned().map_or_else(whole, Some);
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
    pub(in crate::checkpoint) fn reordered(&self, order: &Arc<[usize]>) -> Result<Self> {
        let row = self.size_in_bytes().checked_div(order.len()).unwrap_or(0);
        self.rows(&[order.len(), row], order)
    }

    /// Rows of the tensor, seen as a row-major array of `sizes`, the last one in bytes: row `i` is the stored row `order[i]`.
    /// Its shape stays, whatever their number.
    ///
    /// # Errors
    /// If it has no such rows, or is only a part of a tensor.
    pub(in crate::checkpoint) fn rows(&self, sizes: &[usize], order: &Arc<[usize]>) -> Result<Self> {
        self.ordered("rows", sizes, 0, order, 1)
    }

    /// The tensor with its columns in another order, seen as a row-major array of `sizes`, the last one in bytes: run `i` of
    /// `run` bytes of each row is the stored run `order[i]`. Its shape stays.
    ///
    /// # Errors
    /// If it has no such columns, or is only a part of a tensor.
    pub(in crate::checkpoint) fn columns(
        &self,
        sizes: &[usize],
        order: &Arc<[usize]>,
        run: usize,
    ) -> Result<Self> {
        self.ordered("columns", sizes, sizes.len().saturating_sub(1), order, run)
    }

    fn ordered(
        &self,
        what: &str,
        sizes: &[usize],
        dim: usize,
        order: &Arc<[usize]>,
        run: usize,
    ) -> Result<Self> {
        let section = match self.part {
            None => Section::whole(sizes, self.size_in_bytes()),
            Some(_) => None,
        };
        let section = section.and_then(|section| section.reordered(dim, order, run)).ok_or_else(|| {
            Error::mismatch(format!("{what} of {self:?}"), format!("{} of {sizes:?}", order.len()), "others")
        })?;
        Ok(Self { part: Some(Box::new(section)), ..self.clone() })
    }

    /// Every second entry of dimension `dim` of the tensor, seen as a row-major array of `sizes`, the last one in
    /// bytes, from `first` on.
    ///
    /// # Errors
    /// If these are not the sizes of the tensor, or it is only a part of one.
    pub(in crate::checkpoint) fn every_second(
        &self,
        sizes: &[usize],
        dim: usize,
        first: usize,
    ) -> Result<Self> {
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
        let info = TensorInfo { dtype: self.dtype(), dims: dims.into(), range: self.info.range.clone() };
        Self { file: Arc::clone(&self.file), info, part: Some(Box::new(section)) }
    }

    /// The tensor on `device`, in the dtype of the file. 8-bit floats come as their bytes (U8).
    #[allow(clippy::wildcard_enum_match_arm, reason = "files have dtypes that nothing here reads")]
    pub(in crate::checkpoint) fn load(&self, device: &Device) -> Result<Tensor> {
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
    pub(in crate::checkpoint) fn read<T: Element>(&self) -> Result<Vec<T>> {
        let mut elements = room_for(self.size_in_bytes() / T::SIZE);
        self.for_each_chunk(1, |chunk| T::append(chunk, &mut elements))?;
        gather(&elements);
        Ok(elements)
    }

    /// Hands the bytes to `take`, in order and in pieces of whole units of `unit` bytes.
    pub(in crate::checkpoint) fn for_each_chunk(
        &self,
        unit: usize,
        mut take: impl FnMut(&[u8]),
    ) -> Result<()> {
        let unit = unit.max(1);
        let step = (self.file.copy_chunk() / unit).max(1).saturating_mul(unit);
        let mut buffer = Vec::new();
        if let Some(run) = self.only_run() {
            for start in run.clone().step_by(step) {
                let chunk = start..start.saturating_add(step).min(run.end);
                take(self.bytes(chunk.clone(), &mut buffer)?);
                self.file.release(chunk.start, chunk.len());
            }
            return Ok(());
        }
        let mut chunk = Vec::with_capacity(step.min(self.size_in_bytes()));
        for run in self.runs() {
            let mut at = run.start;
            while at < run.end {
                let end = run.end.min(at.saturating_add(step - chunk.len()));
                chunk.extend_from_slice(self.bytes(at..end, &mut buffer)?);
                at = end;
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
    pub(in crate::checkpoint) fn with_aligned<R>(&self, take: impl FnOnce(&[u8]) -> R) -> Result<R> {
        if let Some(run) = self.only_run() {
            if self.file.is_aligned(run.start) {
                let result = take(self.bytes(run.clone(), &mut Vec::new())?);
                self.file.release(run.start, run.len());
                return Ok(result);
            }
        }
        with_aligned_copy(self.size_in_bytes(), |chunk| self.for_each_chunk(1, chunk), take)
    }

    /// Where the bytes lie in the file, if they lie together.
    fn only_run(&self) -> Option<Range<usize>> {
        let mut runs = self.runs();
        let first = runs.next()?;
        runs.next().is_none().then_some(first)
    }

    /// Whether it is all of a tensor, in the order of the file.
    pub(in crate::checkpoint) fn is_whole(&self) -> bool {
        self.part.is_none()
    }

    /// A run of elements as a tensor of one dimension; `None` if it is not within the tensor, or its elements are
    /// not whole bytes, or this is a part of a tensor.
    pub(in crate::checkpoint) fn elements(&self, elements: Range<usize>) -> Option<Self> {
        let size = header::size_in_bytes(self.dtype(), &[1])?;
        let Range { start, end } = self.info.range;
        let begin = start.checked_add(elements.start.checked_mul(size)?)?;
        let stop = start.checked_add(elements.end.checked_mul(size)?)?;
        let info = TensorInfo { dtype: self.dtype(), dims: [elements.len()].into(), range: begin..stop };
        let within = begin <= stop && stop <= end && self.is_whole();
        within.then(|| Self::unchecked(&self.file, info))
    }

    /// Where the bytes lie in the file, in order.
    fn runs(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let base = self.info.range.start;
        let whole = self.part.is_none().then(|| self.info.range.clone());
        let part = self.part.iter().flat_map(|part| part.runs());
        whole.into_iter().chain(part.map(move |run| base + run.start..base + run.end))
    }

    fn bytes<'a>(&'a self, range: Range<usize>, buffer: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        self.file.bytes(range, buffer)
    }
}

impl fmt::Debug for StoredTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {:?} in {}", self.dtype(), self.dims(), self.path().display())
    }
}

/// Lends `size` bytes, which `for_each_chunk` hands over in order and in pieces, at an address that is a multiple of 8.
pub(in crate::checkpoint) fn with_aligned_copy<R>(
    size: usize,
    for_each_chunk: impl FnOnce(&mut dyn FnMut(&[u8])) -> Result<()>,
    take: impl FnOnce(&[u8]) -> R,
) -> Result<R> {
    let mut copy = vec![0u64; size.div_ceil(size_of::<u64>())];
    let mut rest: &mut [u8] = bytemuck::cast_slice_mut(&mut copy);
    for_each_chunk(&mut |chunk| {
        let (head, tail) = std::mem::take(&mut rest).split_at_mut(chunk.len());
        head.copy_from_slice(chunk);
        rest = tail;
    })?;
    Ok(take(&bytemuck::cast_slice(&copy)[..size]))
}

/// The candle dtype that means the same numbers, or `None` for dtypes that are not loaded as numbers.
#[allow(clippy::wildcard_enum_match_arm, reason = "files have dtypes that nothing here reads")]
pub(in crate::checkpoint) fn candle_dtype(dtype: Dtype) -> Option<DType> {
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
pub(in crate::checkpoint) trait Element: WithDType {
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
