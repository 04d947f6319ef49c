//! Tensors without elements that stand for packed weights.
//!
//! A stand-in carries its weight in the operation that it is the result of, so the weight lives as long as a clone of
//! the stand-in does. candle shows nobody that operation; the way back is a table of the ids of all stand-ins.

use super::{Packed, PackedWeight};
use candle_core::{
    backend::BackendStorage, CpuStorage, CustomOp1, DType, InplaceOp1, Layout, Result, Shape, Storage,
    Tensor, TensorId, Var,
};
#[cfg(feature = "cuda")]
use candle_core::{cuda_backend::CudaStorageSlice, CudaStorage};
use std::{
    collections::HashMap,
    sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak},
};

/// A tensor of the shape and device of `weight`, and of `dtype`, that stands for it.
///
/// Layers that know of packed weights compute on the weight behind it. Its shape, dtype and device can be asked for,
/// and it can be cloned; any computation on it is an error.
///
/// `shared`: the weight is probably both embedding and output head, so a model that asks the layer for its
/// tensor before the first use wants to make the other one ([`Weight::tensor`](crate::Weight::tensor)).
///
/// # Errors
/// If the device has no memory for one element.
pub fn stand_in(weight: Arc<dyn PackedWeight>, dtype: DType, shared: bool) -> Result<Tensor> {
    // The result of an operation keeps the operation if its operand is a variable.
    let seed = Var::zeros(1, dtype, &weight.device())?;
    let packed = Arc::new(Packed::new(weight, dtype, shared));
    let tensor = seed.apply_op1(Carry(packed.clone()))?;
    tensor.inplace_op1(&RemoveElements)?;
    packed.set_id(tensor.id());
    stand_ins().insert(tensor.id(), Arc::downgrade(&packed));
    Ok(tensor)
}

/// The weight that a tensor stands for, if it is a stand-in.
pub(crate) fn packed_of(tensor: &Tensor) -> Option<Arc<Packed>> {
    stand_ins().get(&tensor.id()).and_then(Weak::upgrade)
}

/// Forgets a stand-in that no longer exists.
pub(crate) fn forget(id: TensorId) {
    stand_ins().remove(&id);
}

fn stand_ins() -> MutexGuard<'static, HashMap<TensorId, Weak<Packed>>> {
    static STAND_INS: LazyLock<Mutex<HashMap<TensorId, Weak<Packed>>>> = LazyLock::new(Mutex::default);
    // Nothing that holds the lock can panic half-way through a change.
    STAND_INS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a tensor is a stand-in or a view of one.
pub(crate) fn has_no_elements(tensor: &Tensor) -> bool {
    match &*tensor.storage_and_layout().0 {
        Storage::Cpu(storage) => matches!(storage, CpuStorage::F4(_)),
        #[cfg(feature = "cuda")]
        Storage::Cuda(storage) => matches!(storage.slice, CudaStorageSlice::F4(_)),
        _ => false,
    }
}

/// The operation that a stand-in is the result of: it holds the weight.
struct Carry(Arc<Packed>);

impl Carry {
    fn shape(&self) -> Shape {
        self.0.dims().into()
    }
}

impl CustomOp1 for Carry {
    fn name(&self) -> &'static str {
        "packed weight"
    }

    fn cpu_fwd(&self, seed: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((seed.try_clone(layout)?, self.shape()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, seed: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        Ok((seed.try_clone(layout)?, self.shape()))
    }
}

/// Replaces the storage by one of a type that no operation is implemented for. The tensor keeps its dtype.
struct RemoveElements;

impl InplaceOp1 for RemoveElements {
    fn name(&self) -> &'static str {
        "packed weight"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        *storage = CpuStorage::F4(Vec::new());
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
        storage.slice = CudaStorageSlice::F4(storage.device.alloc_zeros::<u8>(1)?);
        Ok(())
    }
}
