//! The weight of a layer, packed or dense.

use super::stand_in::{forget, packed_of};
use super::PackedWeight;
use candle_core::{DType, Result, Tensor, TensorId};
use std::{
    any::Any,
    sync::{
        atomic::{AtomicBool, AtomicUsize, Ordering},
        Arc, OnceLock,
    },
};

static DENSE_COPIES: AtomicUsize = AtomicUsize::new(0);

/// How many packed weights of this process were dequantized whole because somebody asked a layer for its tensor.
/// Each is also sent to [`log::warn!`].
pub fn dense_copies() -> usize {
    DENSE_COPIES.load(Ordering::Relaxed)
}

/// What a layer holds: a dense tensor, or a packed weight that is shared with all others made of the same stand-in.
#[derive(Clone, Debug)]
pub struct Weight {
    /// The dense tensor or the stand-in.
    tensor: Tensor,
    packed: Option<Arc<Packed>>,
}

impl Weight {
    /// The weight that `tensor` is or [stands for](crate::stand_in).
    pub fn new(tensor: Tensor) -> Self {
        let packed = packed_of(&tensor);
        Self { tensor, packed }
    }

    /// The packed weight, if it is packed.
    pub fn packed(&self) -> Option<&Packed> {
        self.packed.as_deref()
    }

    /// The weight as a tensor.
    ///
    /// A packed one that is probably both embedding and output head gives its stand-in until the first computation: who
    /// asks earlier makes the other layer of it. In all other cases the weight is dequantized, once, since the caller
    /// may compute with it. If that fails, the caller gets the stand-in, on which any computation is an error.
    pub fn tensor(&self) -> &Tensor {
        match self.packed() {
            Some(packed) if !packed.is_for_another_layer() => packed.dense_copy().unwrap_or(&self.tensor),
            _ => &self.tensor,
        }
    }
}

/// A packed weight in layers.
#[derive(Debug)]
pub struct Packed {
    weight: Arc<dyn PackedWeight>,
    dtype: DType,
    shared: bool,
    id: OnceLock<TensorId>,
    used: AtomicBool,
    dense: OnceLock<Option<Tensor>>,
}

impl Packed {
    pub(crate) fn new(weight: Arc<dyn PackedWeight>, dtype: DType, shared: bool) -> Self {
        Self {
            weight,
            dtype,
            shared,
            id: OnceLock::new(),
            used: AtomicBool::new(false),
            dense: OnceLock::new(),
        }
    }

    /// The stand-in that leads to this weight.
    pub(crate) fn set_id(&self, id: TensorId) {
        // The only caller has just made it.
        let _ = self.id.set(id);
    }

    /// The weight as who loaded it knows it, if it is of that type.
    pub fn downcast_ref<T: PackedWeight>(&self) -> Option<&T> {
        let weight: &dyn Any = &*self.weight;
        weight.downcast_ref()
    }

    /// The logical dimensions, `[N, K]`.
    pub fn dims(&self) -> Vec<usize> {
        self.weight.dims()
    }

    /// `x w^T + bias`: `x` is `[.., K]`, the result `[.., N]` of the dtype of `x`.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit.
    pub fn matmul(&self, x: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        self.used.store(true, Ordering::Relaxed);
        self.weight.matmul(x, bias)
    }

    /// The rows of these ids `[..]`, as `[.., K]` of the dtype of the stand-in.
    ///
    /// # Errors
    /// If an id is not below N.
    pub fn rows(&self, ids: &Tensor) -> Result<Tensor> {
        self.used.store(true, Ordering::Relaxed);
        self.weight.rows(ids, self.dtype)
    }

    fn is_for_another_layer(&self) -> bool {
        self.shared && !self.used.load(Ordering::Relaxed)
    }

    fn dense_copy(&self) -> Option<&Tensor> {
        let copy = || {
            DENSE_COPIES.fetch_add(1, Ordering::Relaxed);
            let what = format!("the packed weight {:?}", self.weight);
            match self.weight.dequantize(self.dtype) {
                Ok(dense) => {
                    log::warn!("{what} is dequantized whole: the model asks its layer for the tensor");
                    Some(dense)
                }
                Err(error) => {
                    log::error!("{what} can't be dequantized, nothing can be computed with it: {error}");
                    None
                }
            }
        };
        self.dense.get_or_init(copy).as_ref()
    }
}

impl Drop for Packed {
    fn drop(&mut self) {
        if let Some(id) = self.id.get() {
            forget(*id);
        }
    }
}
