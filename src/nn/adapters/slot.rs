//! Where a layer carries its adapters.

use super::super::LayerWeight;
use super::Lora;
use crate::{Error, Result};
use candle_core::Tensor;
use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// The adapters of one layer, by name. Clones share them: a model's adapters are changed while its layers stay as they
/// are.
#[derive(Clone, Debug)]
pub struct AdapterSlot(Arc<Slot>);

#[derive(Debug)]
struct Slot {
    module: String,
    /// Of the whole weight.
    dims: Vec<usize>,
    /// Of each of `dims` the range that the layer has, which is one rank's.
    part: Vec<Range<usize>>,
    adapters: RwLock<Vec<Named>>,
}

#[derive(Clone, Debug)]
struct Named {
    name: String,
    lora: Lora,
    is_active: bool,
}

impl AdapterSlot {
    /// The slot of a layer that has `part` of a weight of dimensions `dims`.
    pub(crate) fn new(module: impl Into<String>, dims: &[usize], part: Vec<Range<usize>>) -> Self {
        Self(Arc::new(Slot { module: module.into(), dims: dims.to_vec(), part, adapters: RwLock::default() }))
    }

    /// The slot of a layer that has all of a weight, and no name.
    pub(crate) fn whole(dims: &[usize]) -> Self {
        Self::new("", dims, dims.iter().map(|size| 0..*size).collect())
    }

    /// The path of the layer's module; empty if the layer was built by hand.
    pub fn module(&self) -> &str {
        &self.0.module
    }

    /// The dimensions of the whole weight, `[N, K]` or `[E, N, K]`.
    pub fn dims(&self) -> &[usize] {
        &self.0.dims
    }

    /// Which part of the weight the layer has: of each dimension a range.
    pub fn part(&self) -> &[Range<usize>] {
        &self.0.part
    }

    /// Adds an adapter, active, of the layer's part of the weight.
    ///
    /// # Errors
    /// If its shapes do not fit, or there is one of that name.
    pub fn add(&self, name: &str, lora: Lora) -> Result<()> {
        lora.check(&self.0.part.iter().map(ExactSizeIterator::len).collect::<Vec<_>>())?;
        let mut adapters = self.write();
        if adapters.iter().any(|adapter| adapter.name == name) {
            return Err(Error::mismatch("adapter", "a name that is not taken", format!("`{name}` again")));
        }
        adapters.push(Named { name: name.to_owned(), lora, is_active: true });
        Ok(())
    }

    /// Removes an adapter, and returns it if there was one of that name.
    pub fn remove(&self, name: &str) -> Option<Lora> {
        let mut adapters = self.write();
        let index = adapters.iter().position(|adapter| adapter.name == name)?;
        Some(adapters.remove(index).lora)
    }

    /// The adapter of that name.
    pub fn get(&self, name: &str) -> Option<Lora> {
        self.read().iter().find(|adapter| adapter.name == name).map(|adapter| adapter.lora.clone())
    }

    /// The names of all adapters, in the order in which they were added.
    pub fn names(&self) -> Vec<String> {
        self.read().iter().map(|adapter| adapter.name.clone()).collect()
    }

    /// Switches an adapter on or off; false if there is none of that name.
    pub fn set_active(&self, name: &str, is_active: bool) -> bool {
        match self.write().iter_mut().find(|adapter| adapter.name == name) {
            Some(adapter) => {
                adapter.is_active = is_active;
                true
            }
            None => false,
        }
    }

    /// Whether any adapter is switched on.
    pub fn is_active(&self) -> bool {
        self.read().iter().any(|adapter| adapter.is_active)
    }

    /// The adapters that are switched on.
    pub(crate) fn active(&self) -> Vec<Lora> {
        self.read().iter().filter(|adapter| adapter.is_active).map(|adapter| adapter.lora.clone()).collect()
    }

    /// `y`, the output of the frozen layer for `x`, with what the active adapters make of it.
    pub(crate) fn apply(&self, x: &Tensor, y: Tensor, weight: &LayerWeight) -> candle_core::Result<Tensor> {
        let add = |y: Tensor, lora: Lora| &y + lora.forward(x, weight)?.to_dtype(y.dtype())?;
        self.active().into_iter().try_fold(y, add)
    }

    fn read(&self) -> RwLockReadGuard<'_, Vec<Named>> {
        self.0.adapters.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Vec<Named>> {
        self.0.adapters.write().unwrap_or_else(PoisonError::into_inner)
    }
}
