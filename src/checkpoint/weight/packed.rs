//! Quantized weights in a file.

use super::integer_groups::IntegerGroups;
use super::layout::Layout;
use super::mlx_form::MlxForm;
use super::slice::Slice;
use super::stored_form::StoredForm;
use crate::checkpoint::file::of_tensor;
use crate::format::Scale;
use crate::{QuantFormat, QuantTensor, Result};
use candle_core::Device;
use std::ops::Range;
use std::sync::Arc;

/// A quantized weight, checked but not read. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct PackedWeight {
    name: String,
    format: QuantFormat,
    dims: Vec<usize>,
    layout: Arc<dyn Layout>,
}

impl PackedWeight {
    pub(in crate::checkpoint) fn new(
        name: &str,
        format: QuantFormat,
        dims: Vec<usize>,
        layout: impl Layout + 'static,
    ) -> Self {
        Self { name: name.to_owned(), format, dims, layout: Arc::new(layout) }
    }

    pub(super) fn narrow(&self, dim: usize, range: Range<usize>) -> Result<Self> {
        let slice = Slice::new(&self.name, &self.dims, dim, range, self.layout.granularity())?;
        let (dims, layout) = (slice.part_dims(), self.layout.narrow(&slice)?);
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

    /// Bytes that it takes when it is loaded.
    pub fn loaded_bytes(&self) -> u64 {
        self.layout.loaded_bytes()
    }

    /// Copies the packed bytes to `device`, brought into this crate's layout where the file has another one.
    /// No code is dequantized, and nothing is rounded.
    ///
    /// # Errors
    /// If a global scale is negative or not finite, or the device refuses the memory.
    pub fn load(&self, device: &Device) -> Result<QuantTensor> {
        self.layout.load(device).map_err(of_tensor(&self.name))
    }

    /// Elements along K that lie together.
    pub(super) fn granularity(&self) -> usize {
        self.layout.granularity()
    }

    pub(super) fn stored_form(&self) -> Option<StoredForm> {
        self.layout.stored_form(&self.name)
    }

    /// Scales and zeros of integer codes; `None` if it has none. Scales and zeros, or biases, are read for it.
    ///
    /// # Errors
    /// If they can't be read.
    pub fn integer_groups(&self) -> Result<Option<IntegerGroups>> {
        if self.format.element().uint().is_none() || self.format.scale() != Scale::Float {
            return Ok(None);
        }
        let (scales, biases) = self.layout.group_values().map_err(of_tensor(&self.name))?;
        let is_symmetric = !self.format.has_biases();
        IntegerGroups::of(self.format, &scales, biases.as_ref().filter(|_| !is_symmetric))
    }

    /// What it is in an MLX checkpoint. F32 scales of symmetric codes are read for it, and of all else nothing.
    ///
    /// # Errors
    /// If the shapes are no whole groups.
    pub fn mlx_form(&self) -> Result<MlxForm> {
        self.layout.mlx_form()
    }
}
