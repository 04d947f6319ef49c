//! Memory of the host that the device copies from and to by itself.

use super::done::Done;
use candle_core::cuda_backend::cudarc::driver::{result, CudaContext};
use candle_core::cuda_backend::WrapErr;
use candle_core::Result;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

/// Bytes at an address that the driver knows, which copies in a CUDA graph may use.
#[derive(Debug)]
pub(super) struct Pinned {
    done: Arc<Done>,
    bytes: NonNull<u8>,
    len: usize,
}

// SAFETY: memory that this alone owns; `&self` gives no access to it but its address.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Zeros, for work the last of which `done` knows.
    pub(super) fn new(context: &CudaContext, done: &Arc<Done>, len: usize) -> Result<Self> {
        context.bind_to_thread().w()?;
        // SAFETY: plain memory of the host, freed by `drop`; flags 0 are the default.
        let address = unsafe { result::malloc_host(len.max(1), 0) }.w()?;
        let Some(bytes) = NonNull::new(address.cast::<u8>()) else {
            candle_core::bail!("the driver gave no memory of the host")
        };
        // SAFETY: so many bytes were allocated.
        unsafe { bytes.write_bytes(0, len) };
        Ok(Self { done: done.clone(), bytes, len })
    }

    /// The bytes, while no copy is on its way.
    ///
    /// # Safety
    /// No copy from or to them has been submitted that has not been waited for.
    pub(super) unsafe fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: allocated and initialized by `new`, and nobody else's now.
        unsafe { slice::from_raw_parts_mut(self.bytes.as_ptr(), self.len) }
    }

    /// The last work that may touch them.
    pub(super) fn done(&self) -> &Arc<Done> {
        &self.done
    }

    pub(super) fn address(&self) -> *mut u8 {
        self.bytes.as_ptr()
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // Copies may be on their way, in a stream of whichever thread.
        self.done.wait();
        // SAFETY: allocated by `new`; no copy is on its way any more. Errors have nowhere to go.
        let _ = unsafe { result::free_host(self.bytes.as_ptr().cast()) };
    }
}
