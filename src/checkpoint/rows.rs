//! Rows in another order than that of the file: rotary embeddings of adjacent pairs against halves.

use super::mapped::{candle_dtype, StoredTensor};
use super::weight::Decode;
use super::DenseTensor;
use crate::{Error, Result};
use candle_core::{Device, Tensor};
use std::sync::Arc;

/// Which stored row each row of a query or key projection is, for models that rotate element i of a head with
/// element i + `head_dim` / 2, if the file's model rotates element 2i with element 2i + 1.
pub(super) fn halves_of_pairs(heads: usize, head_dim: usize) -> Arc<[usize]> {
    let of_head = |head: usize| {
        let half = |first: usize| (0..head_dim / 2).map(move |pair| head * head_dim + 2 * pair + first);
        half(0).chain(half(1))
    };
    (0..heads).flat_map(of_head).collect()
}

/// A stored tensor of plain numbers with its rows in another order.
#[derive(Debug)]
struct Reordered {
    stored: StoredTensor,
    order: Arc<[usize]>,
}

impl Decode for Reordered {
    fn size_in_bytes(&self) -> usize {
        self.stored.size_in_bytes()
    }

    fn decode(&self, device: &Device) -> Result<Tensor> {
        let dtype = candle_dtype(self.stored.dtype()).ok_or_else(|| Error::Unsupported {
            what: format!("a {:?} tensor", self.stored.dtype()),
            remedy: "convert it to F16, BF16 or F32".into(),
        })?;
        let dims = self.stored.dims();
        let load = |bytes: &[u8]| Tensor::from_raw_buffer(bytes, dtype, dims, device);
        Ok(self.stored.with_rows(&self.order, load)??)
    }
}

/// A tensor of plain numbers whose row `i` is the stored row `order[i]`, if there is an order.
pub(super) fn dense(name: &str, stored: &StoredTensor, order: Option<&Arc<[usize]>>) -> Result<DenseTensor> {
    let tensor = DenseTensor::new(name, stored)?;
    let Some(order) = order else {
        return Ok(tensor);
    };
    let (dtype, dims) = (tensor.dtype(), tensor.dims().to_vec());
    let reordered = Reordered { stored: stored.clone(), order: Arc::clone(order) };
    Ok(DenseTensor::decoded(name, dtype, dims, reordered))
}
