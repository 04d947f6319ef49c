//! Tensors of dense elements in a file, or of codes that are dequantized when they are loaded.

use super::layout::{Dequantize, SliceInMemory};
use super::names::module_of;
use super::slice::Slice;
use super::stored_form::StoredForm;
use crate::checkpoint::file::{candle_dtype, of_tensor, StoredTensor};
use crate::memory_nodes::placed;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// A tensor of dense elements, not read yet. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct DenseTensor {
    name: String,
    dtype: DType,
    dims: Vec<usize>,
    source: Source,
}

/// Where dense elements come from.
#[derive(Clone)]
enum Source {
    /// From the file as they are.
    Stored(StoredTensor),
    /// From codes of a format in which nothing is computed.
    Quantized(Arc<dyn Dequantize>),
}

impl DenseTensor {
    pub(in crate::checkpoint) fn new(name: &str, tensor: &StoredTensor) -> Result<Self> {
        let dtype = candle_dtype(tensor.dtype()).ok_or_else(|| {
            Error::tensor(
                tensor.path(),
                name,
                "a dtype that is loaded as numbers (F16, BF16, F32, F64, U8, U32, I16, I32, I64)",
                format!("{:?}", tensor.dtype()),
                "convert the tensor to F16, BF16 or F32",
            )
        })?;
        let (dims, source) = (tensor.dims().to_vec(), Source::Stored(tensor.clone()));
        Ok(Self { name: name.to_owned(), dtype, dims, source })
    }

    /// A tensor that `source` dequantizes when it is loaded.
    pub(in crate::checkpoint) fn dequantized(
        name: &str,
        dtype: DType,
        dims: Vec<usize>,
        source: impl Dequantize + 'static,
    ) -> Self {
        Self { name: name.to_owned(), dtype, dims, source: Source::Quantized(Arc::new(source)) }
    }

    /// The tensor's full name, for example `model.norm.weight`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The dtype of the numbers: that in the file, or the one they are dequantized to.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The shape.
    pub fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// Bytes in the file.
    pub fn size_in_bytes(&self) -> usize {
        match &self.source {
            Source::Stored(tensor) => tensor.size_in_bytes(),
            Source::Quantized(source) => source.size_in_bytes(),
        }
    }

    /// Whether the numbers are in the file as they are.
    pub fn is_stored(&self) -> bool {
        matches!(&self.source, Source::Stored(tensor) if tensor.is_whole())
    }

    /// A run of elements, as a tensor of one dimension.
    ///
    /// # Errors
    /// If the numbers are not stored as they are, or the run is not within the tensor.
    pub fn elements(&self, elements: Range<usize>) -> Result<Self> {
        let run = match &self.source {
            Source::Stored(tensor) => tensor.elements(elements.clone()),
            Source::Quantized(_) => None,
        };
        match run {
            Some(run) => Self::new(&self.name, &run),
            None => Err(Error::mismatch(
                format!("elements of `{}`", self.name),
                format!("some of its stored {:?}", self.dims),
                format!("{elements:?}"),
            )),
        }
    }

    /// Hands the bytes to `take` as the file has them, in order and in pieces.
    ///
    /// # Errors
    /// If the numbers are not stored as they are.
    pub fn for_each_chunk(&self, take: impl FnMut(&[u8])) -> Result<()> {
        match &self.source {
            Source::Stored(tensor) => tensor.for_each_chunk(1, take).map_err(of_tensor(&self.name)),
            Source::Quantized(_) => {
                Err(Error::mismatch(&self.name, "numbers that are stored as they are", "codes"))
            }
        }
    }

    pub(super) fn stored_form(&self) -> Option<StoredForm> {
        match &self.source {
            Source::Stored(_) => None,
            Source::Quantized(source) => source.stored_form(module_of(&self.name).unwrap_or(&self.name)),
        }
    }

    pub(super) fn granularity(&self) -> usize {
        match &self.source {
            Source::Stored(_) => 1,
            Source::Quantized(source) => source.granularity(),
        }
    }

    pub(super) fn narrow(&self, dim: usize, range: Range<usize>) -> Result<Self> {
        let slice = Slice::new(&self.name, &self.dims, dim, range, 1)?;
        let source = match &self.source {
            Source::Stored(stored) => Source::Stored(slice.of(stored, 1, self.dtype.size_in_bytes())?),
            Source::Quantized(source) => Source::Quantized(match source.narrow(&slice)? {
                Some(part) => part,
                None => {
                    let (whole, dims) = (Arc::clone(source), self.dims.clone());
                    Arc::new(SliceInMemory { whole, dims, dim: slice.dim, range: slice.range.clone() })
                }
            }),
        };
        Ok(Self { name: self.name.clone(), dtype: self.dtype, dims: slice.part_dims(), source })
    }

    /// Copies the tensor to `device` and converts it to `dtype` there.
    ///
    /// # Errors
    /// If the device refuses the memory or the conversion.
    pub fn load(&self, dtype: DType, device: &Device) -> Result<Tensor> {
        let tensor = match &self.source {
            Source::Stored(tensor) => tensor.load(device),
            Source::Quantized(source) => source.dequantize(device),
        };
        let tensor = tensor.map_err(of_tensor(&self.name))?;
        Ok(placed(&tensor.reshape(self.dims.as_slice())?.to_dtype(dtype)?)?)
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stored(tensor) => tensor.fmt(f),
            Self::Quantized(source) => source.fmt(f),
        }
    }
}
