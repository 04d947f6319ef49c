//! The weight of a module as a checkpoint stores it.

use super::stored_form::StoredForm;
use super::{dense::DenseTensor, ggml::GgmlWeight, irregular::IrregularWeight, packed::PackedWeight};
use crate::tensor::LayerWeight;
use crate::Result;
use candle_core::Device;
use std::ops::Range;

/// The weight of a module, as the checkpoint holds it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Weight {
    /// Quantized: packed words, scales and what else the format has.
    Packed(PackedWeight),
    /// The same, with columns in another order than that of their groups or filled up, or with groups across rows.
    Irregular(IrregularWeight),
    /// Blocks of a GGML type, for kernels of this crate or of candle.
    Ggml(GgmlWeight),
    /// Dense elements.
    Dense(DenseTensor),
}

impl Weight {
    /// The logical shape: `[.., N, K]` if it is a matrix.
    pub fn dims(&self) -> &[usize] {
        match self {
            Self::Packed(weight) => weight.dims(),
            Self::Irregular(weight) => weight.dims(),
            Self::Ggml(weight) => weight.dims(),
            Self::Dense(tensor) => tensor.dims(),
        }
    }

    /// Bytes of all its tensors in the file.
    pub fn size_in_bytes(&self) -> usize {
        match self {
            Self::Packed(weight) => weight.size_in_bytes(),
            Self::Irregular(weight) => weight.size_in_bytes(),
            Self::Ggml(weight) => weight.size_in_bytes(),
            Self::Dense(tensor) => tensor.size_in_bytes(),
        }
    }

    /// Bytes that it takes when a layer on the CPU has loaded it: those of blocks of GGML's types in the format of this crate.
    /// Dense elements may be loaded in another dtype.
    pub fn loaded_bytes(&self) -> u64 {
        match self {
            Self::Packed(weight) => weight.loaded_bytes(),
            Self::Irregular(weight) => weight.loaded_bytes(),
            Self::Ggml(weight) => match weight.packed() {
                Some(packed) => packed.loaded_bytes(),
                None => weight.size_in_bytes() as u64,
            },
            Self::Dense(tensor) => tensor.size_in_bytes() as u64,
        }
    }

    /// The name of its format, for reports: `affine 4-bit g64`, `affine 4-bit g64, act-order`, `fp8 g32, filled`, `ggml Q4K`, `BF16`.
    pub fn format_name(&self) -> String {
        match self {
            Self::Packed(weight) => weight.format().to_string(),
            Self::Irregular(weight) => weight.format_name(),
            Self::Ggml(weight) => format!("ggml {:?}", weight.dtype()),
            Self::Dense(tensor) => format!("{:?}", tensor.dtype()),
        }
    }

    /// What the file has of the weight, if files of another kind can have the same: codes and scales as they lie. `None` also of
    /// parts that do not lie together.
    pub fn stored_form(&self) -> Option<StoredForm> {
        match self {
            Self::Packed(weight) => weight.stored_form(),
            Self::Irregular(weight) => weight.stored_form(),
            Self::Ggml(weight) => weight.stored_blocks().map(StoredForm::Blocks),
            Self::Dense(tensor) => tensor.stored_form(),
        }
    }

    /// Elements along K that can't be separated by [`narrow`](Weight::narrow): those of a group or block, 1 in a
    /// tensor of dense elements.
    pub fn granularity(&self) -> usize {
        match self {
            Self::Packed(weight) => weight.granularity(),
            Self::Irregular(weight) => weight.granularity(),
            Self::Ggml(weight) => weight.granularity(),
            Self::Dense(tensor) => tensor.granularity(),
        }
    }

    /// Entries `range` along dimension `dim` of the logical shape `[.., N, K]`. Nothing is read; loading the part
    /// reads no more than the bytes that make it, which [`size_in_bytes`](Weight::size_in_bytes) counts. Of the
    /// few formats in which a part does not lie apart from the rest, more is counted and read.
    ///
    /// # Errors
    /// If the range is empty, leaves the dimension, or along K not at multiples of [`granularity`](Weight::granularity).
    pub fn narrow(&self, dim: usize, range: Range<usize>) -> Result<Self> {
        if self.dims().get(dim).is_some_and(|&size| range == (0..size)) {
            return Ok(self.clone());
        }
        Ok(match self {
            Self::Packed(weight) => Self::Packed(weight.narrow(dim, range)?),
            Self::Irregular(weight) => Self::Irregular(weight.narrow(dim, range)?),
            Self::Ggml(weight) => Self::Ggml(weight.narrow(dim, range)?),
            Self::Dense(tensor) => Self::Dense(tensor.narrow(dim, range)?),
        })
    }

    /// Copies the weight to `device` in the format in which it is stored. Dense elements keep their dtype.
    ///
    /// # Errors
    /// As those of [`PackedWeight::load`], [`GgmlWeight::load`] and [`DenseTensor::load`].
    pub fn load(&self, device: &Device) -> Result<LayerWeight> {
        Ok(match self {
            Self::Packed(weight) => weight.load(device)?.into(),
            Self::Irregular(weight) => weight.load(device)?,
            Self::Ggml(weight) => weight.load(device)?.into(),
            Self::Dense(tensor) => tensor.load(tensor.dtype(), device)?.into(),
        })
    }
}
