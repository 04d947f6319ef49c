//! The adapters of all layers of a model.

use super::AdapterSlot;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The slots of all layers that one [`VarBuilder`](crate::VarBuilder) has built, by the paths of their modules: what a
/// model's adapters are added to, switched by, and removed from. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Adapters(Arc<Mutex<BTreeMap<String, AdapterSlot>>>);

/// The shape of a new adapter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoraConfig {
    /// Rows of A and columns of B.
    pub rank: usize,
    /// What the update is multiplied by is `alpha / rank`, or with `rs_lora` `alpha / sqrt(rank)`.
    pub alpha: f64,
    /// Whether the scale is that of rsLoRA.
    pub rs_lora: bool,
    /// Whether rows have DoRA's magnitudes.
    pub dora: bool,
}

impl LoraConfig {
    /// What `B A` is multiplied by.
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        self.alpha / if self.rs_lora { rank.sqrt() } else { rank }
    }
}

impl Adapters {
    /// The slot of a layer, made at the first call for its module.
    pub(crate) fn register(&self, module: &str, dims: &[usize], part: Vec<Range<usize>>) -> AdapterSlot {
        let new = || AdapterSlot::new(module, dims, part);
        self.lock().entry(module.to_owned()).or_insert_with(new).clone()
    }

    /// All slots, by the paths of their modules.
    pub fn slots(&self) -> Vec<AdapterSlot> {
        self.lock().values().cloned().collect()
    }

    /// The slot of a module.
    pub fn slot(&self, module: &str) -> Option<AdapterSlot> {
        self.lock().get(module).cloned()
    }

    /// Removes an adapter from all modules; false if none has it.
    pub fn remove(&self, name: &str) -> bool {
        self.slots().iter().fold(false, |found, slot| slot.remove(name).is_some() || found)
    }

    /// Switches an adapter on or off in all modules; false if none has it.
    pub fn set_active(&self, name: &str, is_active: bool) -> bool {
        self.slots().iter().fold(false, |found, slot| slot.set_active(name, is_active) || found)
    }

    /// Whether any adapter is switched on.
    pub fn is_active(&self) -> bool {
        self.lock().values().any(AdapterSlot::is_active)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, AdapterSlot>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
