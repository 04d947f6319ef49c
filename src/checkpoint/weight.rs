//! Weights of a checkpoint that are still in their file.

use super::layout::{Cut, Layout, Parts};
use super::mapped::{candle_dtype, StoredTensor};
use crate::{Error, QuantFormat, QuantTensor, Result};
use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{DType, Device, Tensor};
use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// The weight of a module, as the checkpoint holds it.
#[derive(Clone, Debug)]
pub enum Weight {
    /// Quantized: packed words, scales and what else the format has.
    Packed(PackedWeight),
    /// Blocks of a GGML type, for candle's own quantized tensors.
    Ggml(GgmlWeight),
    /// Plain numbers.
    Dense(DenseTensor),
}

impl Weight {
    /// The logical shape: `[.., N, K]` if it is a matrix.
    pub fn dims(&self) -> &[usize] {
        match self {
            Self::Packed(weight) => weight.dims(),
            Self::Ggml(weight) => weight.dims(),
            Self::Dense(tensor) => tensor.dims(),
        }
    }

    /// Bytes of all its tensors in the file.
    pub fn size_in_bytes(&self) -> usize {
        match self {
            Self::Packed(weight) => weight.size_in_bytes(),
            Self::Ggml(weight) => weight.size_in_bytes(),
            Self::Dense(tensor) => tensor.size_in_bytes(),
        }
    }

    /// The name of its format, for reports: `affine 4-bit g64`, `ggml Q4K`, `BF16`.
    pub fn format_name(&self) -> String {
        match self {
            Self::Packed(weight) => weight.format().to_string(),
            Self::Ggml(weight) => format!("ggml {:?}", weight.dtype()),
            Self::Dense(tensor) => format!("{:?}", tensor.dtype()),
        }
    }

    /// Elements along K that can't be separated by [`narrow`](Weight::narrow): those of a group or block, 1 in a
    /// tensor of plain numbers.
    pub fn unit(&self) -> usize {
        match self {
            Self::Packed(weight) => weight.layout.unit(),
            Self::Ggml(weight) => weight.unit(),
            Self::Dense(tensor) => tensor.unit(),
        }
    }

    /// Entries `range` along dimension `dim` of the logical shape `[.., N, K]`. Nothing is read; loading the part
    /// reads no more than the bytes that make it, which [`size_in_bytes`](Weight::size_in_bytes) counts. Of the
    /// few formats in which a part does not lie apart from the rest, more is counted and read.
    ///
    /// # Errors
    /// If the range is empty, leaves the dimension, or along K cuts a [`unit`](Weight::unit) of a quantized weight.
    pub fn narrow(&self, dim: usize, range: Range<usize>) -> Result<Self> {
        if self.dims().get(dim).is_some_and(|&size| range == (0..size)) {
            return Ok(self.clone());
        }
        Ok(match self {
            Self::Packed(weight) => Self::Packed(weight.narrow(dim, range)?),
            Self::Ggml(weight) => Self::Ggml(weight.narrow(dim, range)?),
            Self::Dense(tensor) => Self::Dense(tensor.narrow(dim, range)?),
        })
    }

    /// The numbers it stands for, decoded if it is quantized.
    ///
    /// # Errors
    /// As those of loading it; if the device can't decode or convert to `dtype`.
    pub fn decode(&self, dtype: DType, device: &Device) -> Result<Tensor> {
        match self {
            Self::Packed(weight) => weight.load(device)?.dequantize(dtype),
            Self::Ggml(weight) => Ok(weight.load(device)?.dequantize(device)?.to_dtype(dtype)?),
            Self::Dense(tensor) => tensor.load(dtype, device),
        }
    }
}

/// A quantized weight, checked but not read. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct PackedWeight {
    name: String,
    format: QuantFormat,
    dims: Vec<usize>,
    layout: Arc<dyn Layout>,
}

impl PackedWeight {
    pub(super) fn new(
        name: &str,
        format: QuantFormat,
        dims: Vec<usize>,
        layout: impl Layout + 'static,
    ) -> Self {
        Self { name: name.to_owned(), format, dims, layout: Arc::new(layout) }
    }

    fn narrow(&self, dim: usize, range: Range<usize>) -> Result<Self> {
        let cut = Cut::new(&self.name, &self.dims, dim, range, self.layout.unit())?;
        let (dims, layout) = (cut.part_dims(), self.layout.narrow(&cut)?);
        Ok(Self { name: self.name.clone(), format: self.format, dims, layout })
    }

    /// The module path, for example `model.layers.0.mlp.down_proj`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How the weight is quantized.
    pub fn format(&self) -> QuantFormat {
        self.format
    }

    /// The logical shape `[.., N, K]`: leading dimensions (experts), out features, in features.
    pub fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// Bytes of all its tensors in the file.
    pub fn size_in_bytes(&self) -> usize {
        self.layout.size_in_bytes()
    }

    /// Copies the packed bytes to `device`, brought into this crate's layout where the file has another one.
    /// No code is decoded or rounded.
    ///
    /// # Errors
    /// If a global scale is negative or not finite, or the device refuses the memory.
    pub fn load(&self, device: &Device) -> Result<QuantTensor> {
        self.layout.load(device)
    }
}

impl PackedWeight {
    /// Whether there is a multiplier of all scales that is not MLX's.
    pub(crate) fn has_multiplier(&self) -> bool {
        self.layout.has_multiplier()
    }

    /// The dtype of its scales, if scales and biases of this dtype mean exactly the same in MLX's layout. F32 scales of
    /// symmetric codes are read for it.
    pub(crate) fn affine_scales(&self) -> Result<Option<safetensors::Dtype>> {
        self.layout.affine_scales()
    }

    /// The tensors of the weight as a module of an MLX checkpoint has them, if the file has these bytes.
    pub(crate) fn as_mlx(&self) -> Result<Option<Vec<(&'static str, DenseTensor)>>> {
        let Some(parts) = self.layout.parts().map(Parts::as_mlx).transpose()?.flatten() else {
            return Ok(None);
        };
        let dense = |(part, stored): (_, StoredTensor)| Ok((part, DenseTensor::new(&self.name, &stored)?));
        parts.into_iter().map(dense).collect::<Result<_>>().map(Some)
    }
}

/// A weight in blocks of a GGML type, checked but not read. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct GgmlWeight {
    name: String,
    dtype: GgmlDType,
    dims: Vec<usize>,
    blocks: StoredTensor,
}

impl GgmlWeight {
    /// A weight whose `blocks` are those of `dims`, row by row; the reader has checked that they are.
    pub(super) fn new(name: &str, dtype: GgmlDType, dims: Vec<usize>, blocks: StoredTensor) -> Self {
        Self { name: name.to_owned(), dtype, dims, blocks }
    }

    fn narrow(&self, dim: usize, range: Range<usize>) -> Result<Self> {
        let cut = Cut::new(&self.name, &self.dims, dim, range, self.unit())?;
        let blocks = cut.of(&self.blocks, self.dtype.block_size(), self.dtype.type_size())?;
        Ok(Self { name: self.name.clone(), dtype: self.dtype, dims: cut.part_dims(), blocks })
    }

    /// candle's products take the blocks of some types in pairs.
    fn unit(&self) -> usize {
        use GgmlDType::{Q4_1, Q5_0, Q5_1};
        let (block, k) = (self.dtype.block_size(), self.dims.last().copied().unwrap_or(0));
        let in_pairs = matches!(self.dtype, Q4_1 | Q5_0 | Q5_1) && k.is_multiple_of(2 * block);
        if in_pairs {
            2 * block
        } else {
            block
        }
    }

    /// The module path, for example `model.layers.0.mlp.down_proj`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The type of its blocks.
    pub fn dtype(&self) -> GgmlDType {
        self.dtype
    }

    /// The logical shape `[.., N, K]`.
    pub fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// Bytes in the file.
    pub fn size_in_bytes(&self) -> usize {
        self.blocks.size_in_bytes()
    }

    /// Copies the matrices of a stack `[E, N, K]` to `device`, each for itself.
    ///
    /// # Errors
    /// As those of [`load`](GgmlWeight::load); if the weight is no stack.
    pub fn load_matrices(&self, device: &Device) -> Result<Vec<QTensor>> {
        let &[experts, n, k] = self.dims.as_slice() else {
            return Err(Error::mismatch(&self.name, "a stack [E, N, K]", format!("{:?}", self.dims)));
        };
        let bytes_of_each = (self.blocks.size_in_bytes() / experts.max(1)).max(1);
        self.blocks.with_aligned(|blocks| {
            let load = |blocks| {
                let storage = QStorage::from_data(Cow::Borrowed(blocks), device, self.dtype)?;
                Ok(QTensor::new(storage, (n, k))?)
            };
            blocks.chunks_exact(bytes_of_each).map(load).collect()
        })?
    }

    /// Copies the blocks to `device`.
    ///
    /// # Errors
    /// If the device refuses the memory or the type.
    pub fn load(&self, device: &Device) -> Result<QTensor> {
        let load = |blocks: &[u8]| QStorage::from_data(Cow::Borrowed(blocks), device, self.dtype);
        let storage = self.blocks.with_aligned(load)??;
        Ok(QTensor::new(storage, self.dims.as_slice())?)
    }
}

/// A tensor of plain numbers, not read yet. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct DenseTensor {
    name: String,
    dtype: DType,
    dims: Vec<usize>,
    source: Source,
}

/// Where plain numbers come from.
#[derive(Clone)]
enum Source {
    /// From the file as they are.
    Stored(StoredTensor),
    /// From codes of a format in which nothing is computed.
    Decoded(Arc<dyn Decode>),
}

/// Numbers that are stored in a format in which nothing is computed.
pub(super) trait Decode: fmt::Debug + Send + Sync {
    /// Bytes in the file.
    fn size_in_bytes(&self) -> usize;
    /// The numbers, of the dtype and shape that were promised.
    fn decode(&self, device: &Device) -> Result<Tensor>;
    /// Elements along K that are best kept together.
    fn unit(&self) -> usize;
    /// A part, of which no other bytes are read; `None` if its bytes do not lie apart from others.
    fn narrow(&self, cut: &Cut) -> Result<Option<Arc<dyn Decode>>>;
}

/// A part of a tensor that is decoded as a whole.
#[derive(Debug)]
struct Excerpt {
    from: Arc<dyn Decode>,
    dim: usize,
    range: Range<usize>,
}

impl Decode for Excerpt {
    fn size_in_bytes(&self) -> usize {
        self.from.size_in_bytes()
    }

    fn decode(&self, device: &Device) -> Result<Tensor> {
        let whole = self.from.decode(&Device::Cpu)?;
        Ok(whole.narrow(self.dim, self.range.start, self.range.len())?.contiguous()?.to_device(device)?)
    }

    fn unit(&self) -> usize {
        self.from.unit()
    }

    fn narrow(&self, _: &Cut) -> Result<Option<Arc<dyn Decode>>> {
        Ok(None)
    }
}

impl DenseTensor {
    pub(super) fn new(name: &str, tensor: &StoredTensor) -> Result<Self> {
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

    /// A tensor that `source` decodes when it is asked for.
    pub(super) fn decoded(name: &str, dtype: DType, dims: Vec<usize>, source: impl Decode + 'static) -> Self {
        Self { name: name.to_owned(), dtype, dims, source: Source::Decoded(Arc::new(source)) }
    }

    /// The tensor's full name, for example `model.norm.weight`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The dtype of the numbers: that in the file, or that which they are decoded to.
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
            Source::Decoded(source) => source.size_in_bytes(),
        }
    }

    /// Whether the numbers are in the file as they are.
    pub(crate) fn is_stored(&self) -> bool {
        matches!(&self.source, Source::Stored(tensor) if tensor.is_whole())
    }

    /// A run of elements, as a tensor of one dimension.
    ///
    /// # Errors
    /// If the numbers are not stored as they are, or the run is not within the tensor.
    pub(crate) fn elements(&self, elements: Range<usize>) -> Result<Self> {
        let run = match &self.source {
            Source::Stored(tensor) => tensor.elements(elements.clone()),
            Source::Decoded(_) => None,
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
    pub(crate) fn for_each_chunk(&self, take: impl FnMut(&[u8])) -> Result<()> {
        match &self.source {
            Source::Stored(tensor) => tensor.for_each_chunk(1, take),
            Source::Decoded(_) => {
                Err(Error::mismatch(&self.name, "numbers that are stored as they are", "codes"))
            }
        }
    }

    fn unit(&self) -> usize {
        match &self.source {
            Source::Stored(_) => 1,
            Source::Decoded(source) => source.unit(),
        }
    }

    fn narrow(&self, dim: usize, range: Range<usize>) -> Result<Self> {
        let cut = Cut::new(&self.name, &self.dims, dim, range, 1)?;
        let source = match &self.source {
            Source::Stored(stored) => Source::Stored(cut.of(stored, 1, self.dtype.size_in_bytes())?),
            Source::Decoded(source) => Source::Decoded(match source.narrow(&cut)? {
                Some(part) => part,
                None => {
                    let from = Arc::clone(source);
                    Arc::new(Excerpt { from, dim: cut.dim, range: cut.range.clone() })
                }
            }),
        };
        Ok(Self { name: self.name.clone(), dtype: self.dtype, dims: cut.part_dims(), source })
    }

    /// Copies the tensor to `device` and converts it to `dtype` there.
    ///
    /// # Errors
    /// If the device refuses the memory or the conversion.
    pub fn load(&self, dtype: DType, device: &Device) -> Result<Tensor> {
        let tensor = match &self.source {
            Source::Stored(tensor) => tensor.load(device)?.reshape(self.dims.as_slice())?,
            Source::Decoded(source) => source.decode(device)?,
        };
        Ok(tensor.to_dtype(dtype)?)
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stored(tensor) => tensor.fmt(f),
            Self::Decoded(source) => source.fmt(f),
        }
    }
}
