//! Formats that were chosen for single weights, instead of those that the rules of a recipe leave open.

use super::spec::Spec;
use std::collections::BTreeMap;

/// What weights become that the rules of a recipe leave open.
#[derive(Clone, Debug)]
pub(in crate::convert) enum Choice {
    /// All of them this.
    All(Spec),
    /// The weights of these names these, for the reason that is given.
    Each(BTreeMap<String, Spec>, String),
}

/// The rule of a weight that is left open while all become the same.
pub(in crate::convert) const OPEN: &str = "left open";

impl Choice {
    /// What a weight becomes, and the rule that says so; `None` if it is not chosen.
    pub(super) fn of(&self, name: &str, is_open: bool) -> Option<(Spec, &str)> {
        match self {
            Self::All(spec) => is_open.then_some((*spec, OPEN)),
            Self::Each(formats, reason) => Some((*formats.get(name)?, reason)),
        }
    }

    pub(super) fn note(&self) -> Option<String> {
        match self {
            Self::All(_) => None,
            Self::Each(formats, reason) => {
                Some(format!("{} formats are chosen {reason}, by errors that were measured", formats.len()))
            }
        }
    }
}
