//! Quantized weights whose columns do not lie in the order of their groups, are filled up to whole groups, or whose groups run across
//! rows.

use super::layout::IrregularLayout;
use super::slice::Slice;
use super::stored_form::StoredForm;
use crate::checkpoint::file::of_tensor;
use crate::tensor::LayerWeight;
use crate::{QuantFormat, Result};
use candle_core::Device;
use std::ops::Range;
use std::sync::Arc;

/// A quantized matrix whose columns do not lie in the order of their groups, are filled up to whole groups, or whose groups run
/// across rows, checked but not read. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct IrregularWeight {
    name: String,
    dims: Vec<usize>,
    layout: Arc<dyn IrregularLayout>,
}

impl IrregularWeight {
    pub(in crate::checkpoint) fn new(
        name: &str,
        dims: Vec<usize>,
        layout: impl IrregularLayout + 'static,
    ) -> Self {
        Self { name: name.to_owned(), dims, layout: Arc::new(layout) }
    }

    pub(super) fn narrow(&self, dim: usize, range: Range<usize>) -> Result<Self> {
        let slice = Slice::new(&self.name, &self.dims, dim, range, self.layout.granularity())?;
        let (dims, layout) = (slice.part_dims(), self.layout.narrow(&slice)?);
        Ok(Self { name: self.name.clone(), dims, layout })
    }

    /// The module path, for example `model.layers.0.mlp.down_proj`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The format that it is loaded in. Groups may be smaller than those of the file, and those of a part smaller than those
    /// of the whole.
    pub fn format(&self) -> QuantFormat {
        self.layout.format()
    }

    /// The name of that, for reports: `affine 4-bit g64, act-order`, `fp8 g32, filled`, `affine 4-bit g64, across rows`.
    pub fn format_name(&self) -> String {
        self.layout.format_name()
    }

    /// The logical shape `[N, K]`.
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

    /// Elements along K that lie together.
    pub(super) fn granularity(&self) -> usize {
        self.layout.granularity()
    }

    pub(super) fn stored_form(&self) -> Option<StoredForm> {
        self.layout.stored_form(&self.name)
    }

    /// Brings the codes to `device`, as they are computed with. No code is dequantized, and nothing is rounded.
    ///
    /// # Errors
    /// If the file can't be read, or the device refuses the memory.
    pub fn load(&self, device: &Device) -> Result<LayerWeight> {
        self.layout.load(device).map_err(of_tensor(&self.name))
    }
}
