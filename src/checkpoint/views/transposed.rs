//! Stacks of matrices `[E, K, N]`, as some models have them, read as `[E, N, K]`.

use crate::checkpoint::weight::{DenseTensor, Dequantize, Slice, Weight};
use crate::Result;
use candle_core::{Device, Tensor};
use std::sync::Arc;

/// A dense stack whose matrices have rows for columns.
#[derive(Clone, Debug)]
pub(super) struct Transposed(pub DenseTensor);

impl Transposed {
    /// The weight of this name, if the stored one has three dimensions.
    pub fn into_weight(self, name: &str) -> Option<Weight> {
        let &[experts, k, n] = self.0.dims() else { return None };
        let dtype = self.0.dtype();
        Some(Weight::Dense(DenseTensor::dequantized(name, dtype, vec![experts, n, k], self)))
    }
}

impl Dequantize for Transposed {
    fn size_in_bytes(&self) -> usize {
        Weight::Dense(self.0.clone()).size_in_bytes()
    }

    fn dequantize(&self, device: &Device) -> Result<Tensor> {
        Ok(self.0.load(self.0.dtype(), device)?.transpose(1, 2)?.contiguous()?)
    }

    fn granularity(&self) -> usize {
        1
    }

    fn narrow(&self, slice: &Slice) -> Result<Option<Arc<dyn Dequantize>>> {
        let dim = [0, 2, 1].get(slice.dim).copied().unwrap_or(slice.dim);
        match Weight::Dense(self.0.clone()).narrow(dim, slice.range.clone())? {
            Weight::Dense(part) => Ok(Some(Arc::new(Self(part)))),
            Weight::Packed(_) | Weight::Ggml(_) => Ok(None),
        }
    }
}
