//! What was accepted although something about it is odd.

use std::sync::{Arc, Mutex, PoisonError};

/// Warnings in the order of their discovery. Clones share the list.
#[derive(Clone, Default)]
pub(in crate::checkpoint) struct Warnings(Arc<Mutex<Vec<Warning>>>);

struct Warning {
    /// Equal for warnings that say the same of several modules.
    key: String,
    message: String,
}

impl Warnings {
    pub(in crate::checkpoint) fn add(&self, message: String) {
        self.once(message.clone(), message);
    }

    /// Adds a warning unless there is one with this key.
    pub(in crate::checkpoint) fn once(&self, key: String, message: String) {
        let mut list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if list.iter().all(|warning| warning.key != key) {
            log::warn!("{message}");
            list.push(Warning { key, message });
        }
    }

    pub(in crate::checkpoint) fn list(&self) -> Vec<String> {
        let list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        list.iter().map(|warning| warning.message.clone()).collect()
    }
}
