//! What the readers of checkpoints implement: a weight that lies in a file in some layout, packed or to be
//! dequantized.

use super::mlx_form::MlxForm;
use super::slice::Slice;
use super::stored_form::StoredForm;
use crate::tensor::LayerWeight;
use crate::{QuantFormat, QuantTensor, Result};
use candle_core::{Device, Tensor};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// A packed weight in the layout of some container, checked but not read.
pub(in crate::checkpoint) trait Layout: fmt::Debug + Send + Sync {
    /// Bytes of all its tensors in the file.
    fn size_in_bytes(&self) -> usize;

    /// Bytes that it takes when it is loaded: as many as in the file, unless the layout brings scales into other shapes.
    fn loaded_bytes(&self) -> u64 {
        self.size_in_bytes() as u64
    }

    /// Brings it to `device`, in the layout of this crate.
    fn load(&self, device: &Device) -> Result<QuantTensor>;

    /// What it is in an MLX checkpoint. F32 scales of symmetric codes are read for it.
    fn mlx_form(&self) -> Result<MlxForm>;

    /// What the file has of the weight of this module, if others can have the same.
    fn stored_form(&self, _module: &str) -> Option<StoredForm> {
        None
    }

    /// Scales and biases of the format's groups, as loading gives them, without the codes.
    fn group_values(&self) -> Result<(Tensor, Option<Tensor>)> {
        let weight = self.load(&Device::Cpu)?;
        Ok((weight.scales().clone(), weight.biases().cloned()))
    }

    /// Elements along K that lie together: no [`Slice`] separates them.
    fn granularity(&self) -> usize;

    /// A part of the weight, of which no other bytes are read.
    fn narrow(&self, slice: &Slice) -> Result<Arc<dyn Layout>>;
}

/// A packed matrix that does not lie in rows of whole groups: its columns are in another order or filled up, or groups run across
/// rows.
pub(in crate::checkpoint) trait IrregularLayout: fmt::Debug + Send + Sync {
    /// The format that it is loaded in.
    fn format(&self) -> QuantFormat;

    /// The name of that, for reports.
    fn format_name(&self) -> String;

    /// Bytes of all its tensors in the file.
    fn size_in_bytes(&self) -> usize;

    /// Bytes that it takes when it is loaded.
    fn loaded_bytes(&self) -> u64;

    /// Brings it to `device`, as it is computed with.
    fn load(&self, device: &Device) -> Result<LayerWeight>;

    /// As [`Layout::stored_form`].
    fn stored_form(&self, _module: &str) -> Option<StoredForm> {
        None
    }

    /// Elements along K that lie together.
    fn granularity(&self) -> usize;

    /// A part, which may read more than its own codes.
    fn narrow(&self, slice: &Slice) -> Result<Arc<dyn IrregularLayout>>;
}

/// Numbers that are stored in a format in which nothing is computed.
pub(in crate::checkpoint) trait Dequantize: fmt::Debug + Send + Sync {
    /// Bytes in the file.
    fn size_in_bytes(&self) -> usize;

    /// The numbers, of the dtype and shape that were promised.
    fn dequantize(&self, device: &Device) -> Result<Tensor>;

    /// As [`Layout::stored_form`].
    fn stored_form(&self, _module: &str) -> Option<StoredForm> {
        None
    }

    /// Elements along K that are best kept together.
    fn granularity(&self) -> usize;

    /// A part, of which no other bytes are read; `None` if its bytes do not lie apart from others.
    fn narrow(&self, slice: &Slice) -> Result<Option<Arc<dyn Dequantize>>>;
}

/// Blocks of a GGML type that do not lie in one tensor.
pub(in crate::checkpoint) trait GgmlBlocks: fmt::Debug + Send + Sync {
    /// Bytes in the file.
    fn size_in_bytes(&self) -> usize;

    /// Hands the blocks to `take`, row by row and in pieces.
    fn for_each_chunk(&self, take: &mut dyn FnMut(&[u8])) -> Result<()>;

    /// A part, of which no other bytes are read.
    fn narrow(&self, slice: &Slice) -> Result<Arc<dyn GgmlBlocks>>;
}

/// A slice of a weight whose bytes do not lie apart from the rest: more is read, and cut in the memory of the host.
#[derive(Debug)]
pub(in crate::checkpoint) struct SliceInMemory<T: ?Sized> {
    pub whole: Arc<T>,
    /// The shape of `whole`.
    pub dims: Vec<usize>,
    pub dim: usize,
    pub range: Range<usize>,
}

impl SliceInMemory<dyn Layout> {
    /// Rows of a weight, of which `whole`, of these dimensions, has all that lie together with them, from row `first` on.
    pub fn of_rows(whole: Arc<dyn Layout>, dims: Vec<usize>, first: usize, slice: &Slice) -> Arc<dyn Layout> {
        let range = slice.range.start.saturating_sub(first)..slice.range.end.saturating_sub(first);
        if dims.get(slice.dim).is_some_and(|rows| range == (0..*rows)) {
            return whole;
        }
        Arc::new(Self { whole, dims, dim: slice.dim, range })
    }
}

impl Layout for SliceInMemory<dyn Layout> {
    fn size_in_bytes(&self) -> usize {
        self.whole.size_in_bytes()
    }

    /// The share that the range has of all.
    fn loaded_bytes(&self) -> u64 {
        let size = self.dims.get(self.dim).copied().unwrap_or(0).max(1);
        let bytes = u128::from(self.whole.loaded_bytes()) * self.range.len() as u128 / size as u128;
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }

    fn load(&self, device: &Device) -> Result<QuantTensor> {
        let whole = self.whole.load(&Device::Cpu)?;
        whole.narrow(self.dim, self.range.start, self.range.len())?.to_device(device)
    }

    fn group_values(&self) -> Result<(Tensor, Option<Tensor>)> {
        let (scales, biases) = self.whole.group_values()?;
        // Rows alone: of K a group of the format would be divided by its size.
        if self.dim.saturating_add(1) == self.dims.len() {
            let part = self.load(&Device::Cpu)?;
            return Ok((part.scales().clone(), part.biases().cloned()));
        }
        let narrow = |values: &Tensor| values.narrow(self.dim, self.range.start, self.range.len());
        Ok((narrow(&scales)?, biases.as_ref().map(narrow).transpose()?))
    }

    /// Layouts with MLX's bytes are not cut in memory.
    fn mlx_form(&self) -> Result<MlxForm> {
        Ok(match self.whole.mlx_form()? {
            MlxForm::Stored(_) => MlxForm::Impossible(" of which only a part is meant"),
            form @ (MlxForm::Rearranged(_)
            | MlxForm::WithoutBiases(_)
            | MlxForm::Multiplied
            | MlxForm::Impossible(_)) => form,
        })
    }

    fn granularity(&self) -> usize {
        self.whole.granularity()
    }

    fn narrow(&self, slice: &Slice) -> Result<Arc<dyn Layout>> {
        if slice.dim == self.dim {
            let range = self.range.start + slice.range.start..self.range.start + slice.range.end;
            let whole = Arc::clone(&self.whole);
            return Ok(Arc::new(Self { whole, dims: self.dims.clone(), dim: self.dim, range }));
        }
        let slice = Slice { dims: &self.dims, ..slice.clone() };
        let whole = self.whole.narrow(&slice)?;
        Ok(Arc::new(Self { whole, dims: slice.part_dims(), dim: self.dim, range: self.range.clone() }))
    }
}

impl Dequantize for SliceInMemory<dyn Dequantize> {
    fn size_in_bytes(&self) -> usize {
        self.whole.size_in_bytes()
    }

    fn dequantize(&self, device: &Device) -> Result<Tensor> {
        let whole = self.whole.dequantize(&Device::Cpu)?;
        Ok(whole.narrow(self.dim, self.range.start, self.range.len())?.contiguous()?.to_device(device)?)
    }

    fn granularity(&self) -> usize {
        self.whole.granularity()
    }

    fn narrow(&self, _: &Slice) -> Result<Option<Arc<dyn Dequantize>>> {
        Ok(None)
    }
}
