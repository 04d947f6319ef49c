//! What was accepted although something about it is odd.

use crate::Untrusted;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

/// More warnings than this are counted and no longer kept: nobody reads them, and a damaged file may give any number.
const MOST: usize = 1000;

/// Warnings in the order of their discovery, fit to be shown. Clones share the list.
#[derive(Clone, Default)]
pub(in crate::checkpoint) struct Warnings(Arc<Mutex<List>>);

#[derive(Default)]
struct List {
    /// Equal for warnings that say the same of several modules.
    keys: BTreeSet<String>,
    messages: Vec<String>,
    left_out: usize,
}

impl Warnings {
    pub(in crate::checkpoint) fn add(&self, message: String) {
        self.once(message.clone(), message);
    }

    /// Adds a warning unless there is one with this key.
    pub(in crate::checkpoint) fn once(&self, key: String, message: String) {
        let mut list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if list.messages.len() >= MOST {
            list.left_out += usize::from(!list.keys.contains(&key));
        } else if list.keys.insert(key) {
            let message = Untrusted::new(&message).to_string();
            log::warn!("{message}");
            list.messages.push(message);
        }
    }

    pub(in crate::checkpoint) fn list(&self) -> Vec<String> {
        let list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let more =
            (list.left_out > 0).then(|| format!("and {} more warnings, which are left out", list.left_out));
        list.messages.iter().cloned().chain(more).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_warnings_are_one_and_too_many_are_counted() {
        let warnings = Warnings::default();
        for number in 0..MOST + 20 {
            warnings.add(format!("\u{1b}{}", number / 2));
        }
        assert_eq!(warnings.list().len(), (MOST + 20) / 2);
        assert_eq!(warnings.list()[1], r"\u001b1");
        for number in 0..MOST {
            warnings.add(format!("other {number}"));
        }
        assert_eq!(warnings.list().len(), MOST + 1);
        assert_eq!(warnings.list()[MOST], "and 510 more warnings, which are left out");
    }
}
