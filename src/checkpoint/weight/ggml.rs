//! Weights in blocks of a GGML type, which candle knows, too.

use super::ggml_packed::GgmlCodes;
use super::ggml_types::{type_where, Kind};
use super::layout::GgmlBlocks;
use super::packed::PackedWeight;
use super::slice::Slice;
use super::stored_form::StoredBlocks;
use crate::checkpoint::file::{of_tensor, with_aligned_copy, StoredTensor};
use crate::{Error, Result};
use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::Device;
use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

/// A weight in blocks of a GGML type, checked but not read. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct GgmlWeight {
    name: String,
    dtype: GgmlDType,
    dims: Vec<usize>,
    blocks: Blocks,
}

/// Where blocks come from.
#[derive(Clone, Debug)]
enum Blocks {
    Stored(StoredTensor),
    Composed(Arc<dyn GgmlBlocks>),
}

impl GgmlWeight {
    /// A weight whose `blocks` are those of `dims`, row by row; the reader has checked that they are.
    pub(in crate::checkpoint) fn new(
        name: &str,
        dtype: GgmlDType,
        dims: Vec<usize>,
        blocks: StoredTensor,
    ) -> Self {
        Self { name: name.to_owned(), dtype, dims, blocks: Blocks::Stored(blocks) }
    }

    /// A weight whose blocks lie in several places.
    pub(in crate::checkpoint) fn composed(
        name: &str,
        dtype: GgmlDType,
        dims: Vec<usize>,
        blocks: impl GgmlBlocks + 'static,
    ) -> Self {
        Self { name: name.to_owned(), dtype, dims, blocks: Blocks::Composed(Arc::new(blocks)) }
    }

    pub(super) fn narrow(&self, dim: usize, range: Range<usize>) -> Result<Self> {
        let slice = Slice::new(&self.name, &self.dims, dim, range, self.granularity())?;
        let blocks = match &self.blocks {
            Blocks::Stored(blocks) => {
                Blocks::Stored(slice.of(blocks, self.dtype.block_size(), self.dtype.type_size())?)
            }
            Blocks::Composed(blocks) => Blocks::Composed(blocks.narrow(&slice)?),
        };
        Ok(Self { name: self.name.clone(), dtype: self.dtype, dims: slice.part_dims(), blocks })
    }

    /// Elements along K that lie together: candle's matmuls take the blocks of some types in pairs.
    pub(super) fn granularity(&self) -> usize {
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
        match &self.blocks {
            Blocks::Stored(blocks) => blocks.size_in_bytes(),
            Blocks::Composed(blocks) => blocks.size_in_bytes(),
        }
    }

    /// The blocks, and what GGUF files call their type.
    pub(super) fn stored_blocks(&self) -> Option<StoredBlocks> {
        let (id, of_number) = type_where(|kind| matches!(kind, Kind::Ggml(dtype) if dtype == self.dtype))?;
        let (name, bytes) = (of_number.name, self.dtype.type_size());
        let format = GgmlCodes::of(self.dtype).map(GgmlCodes::format);
        Some(StoredBlocks { name, id, bytes, format, blocks: Arc::new(self.clone()) })
    }

    /// Hands the blocks to `take`, row by row and in pieces of whole blocks.
    ///
    /// # Errors
    /// If they can't be read.
    pub fn for_each_chunk(&self, take: &mut dyn FnMut(&[u8])) -> Result<()> {
        match &self.blocks {
            Blocks::Stored(blocks) => blocks.for_each_chunk(self.dtype.type_size(), take),
            Blocks::Composed(blocks) => blocks.for_each_chunk(take),
        }
    }

    /// Lends the blocks at an address that is a multiple of 8.
    fn with_aligned<R>(&self, take: impl FnOnce(&[u8]) -> R) -> Result<R> {
        let lent = match &self.blocks {
            Blocks::Stored(blocks) => blocks.with_aligned(take),
            Blocks::Composed(blocks) => {
                with_aligned_copy(blocks.size_in_bytes(), |chunk| blocks.for_each_chunk(chunk), take)
            }
        };
        lent.map_err(of_tensor(&self.name))
    }

    /// The weight in the format of this crate that means the same, whose kernels round no activations. Of each block codes
    /// and scales keep their values.
    pub fn packed(&self) -> Option<PackedWeight> {
        let codes = GgmlCodes::of(self.dtype)?;
        Some(codes.weight(&self.name, self.dims.clone(), self.clone()))
    }

    /// Copies the matrices of a stack `[E, N, K]` to `device`, each for itself.
    ///
    /// # Errors
    /// As those of [`load`](GgmlWeight::load); if the weight is no stack.
    pub fn load_matrices(&self, device: &Device) -> Result<Vec<QTensor>> {
        let &[experts, n, k] = self.dims.as_slice() else {
            return Err(Error::mismatch(&self.name, "a stack [E, N, K]", format!("{:?}", self.dims)));
        };
        let bytes_of_each = (self.size_in_bytes() / experts.max(1)).max(1);
        self.with_aligned(|blocks| {
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
        let storage = self.with_aligned(load)??;
        Ok(QTensor::new(storage, self.dims.as_slice())?)
    }
}
