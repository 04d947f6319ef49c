//! In which form weights were loaded.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// The form in which a weight of a checkpoint was loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum LoadedAs {
    /// It is not quantized.
    Dense,
    /// It is quantized, and computed on as it is packed.
    Packed,
    /// It is quantized, and was dequantized for a layer that needs a tensor of elements.
    Dequantized,
}

/// What was loaded so far. Clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct Loaded(Arc<Mutex<BTreeMap<String, LoadedAs>>>);

impl Loaded {
    /// Adds a weight by the path of its module. Of several forms the one that needs most memory counts.
    pub(super) fn add(&self, module: &str, form: LoadedAs) {
        let mut weights = self.lock();
        let known = weights.entry(module.to_owned()).or_insert(form);
        *known = form.max(*known);
    }

    /// All weights, by the paths of their modules.
    pub(super) fn weights(&self) -> BTreeMap<String, LoadedAs> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, LoadedAs>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
