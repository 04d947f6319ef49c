//! For tests (feature `testing`): which bytes of weights a thread has read from files.

use std::cell::RefCell;
use std::ops::Range;
use std::path::{Path, PathBuf};

thread_local! {
    static READS: RefCell<Vec<(PathBuf, Range<usize>)>> = const { RefCell::new(Vec::new()) };
}

pub(super) fn record(path: &Path, range: &Range<usize>) {
    READS.with_borrow_mut(|reads| reads.push((path.to_owned(), range.clone())));
}

/// Those of this thread since it was last asked.
pub fn take() -> Vec<(PathBuf, Range<usize>)> {
    READS.take()
}
