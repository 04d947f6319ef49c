//! The folder of an output that is not complete yet: `journal.json` and, below `model`, the files that are finished.

use std::path::{Path, PathBuf};

pub(super) fn journal_in(root: &Path) -> PathBuf {
    root.join("journal.json")
}

pub(super) fn model_in(root: &Path) -> PathBuf {
    root.join("model")
}

/// Whether anything was begun in this folder.
pub(super) fn is_begun(root: &Path) -> bool {
    model_in(root).exists() || journal_in(root).exists()
}
