//! A communicator of NCCL, which the thread of its rank uses and any thread may end.

use candle_core::cuda_backend::cudarc::nccl::Comm;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::{Mutex, PoisonError};

#[derive(Debug)]
struct Owned(Comm);

// SAFETY: NCCL allows calls for a communicator from any thread, one at a time. `Comm` has its stream besides,
// which is `Send`.
unsafe impl Send for Owned {}

/// NCCL's side of a rank, until a failure.
#[derive(Debug)]
pub(super) struct Communicator(Mutex<Option<Owned>>);

impl Communicator {
    pub(super) fn new(comm: Comm) -> Self {
        Self(Mutex::new(Some(Owned(comm))))
    }

    /// None after [`abort`](Communicator::abort).
    pub(super) fn with<T>(&self, work: impl FnOnce(&Comm) -> T) -> Option<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(|Owned(comm)| work(comm))
    }

    /// Ends what is under way on the GPU, with any result, and so those that wait for it.
    pub(super) fn abort(&self) {
        let comm = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        // cudarc aborts when it drops, and panics if NCCL does not like it; the group has failed already.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(comm)));
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.abort();
    }
}
