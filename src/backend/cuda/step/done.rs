//! How far the work of steps is, wherever it was submitted.

use candle_core::cuda_backend::cudarc::driver::{sys, CudaContext, CudaEvent, CudaStream};
use candle_core::cuda_backend::WrapErr;
use candle_core::Result;
use std::sync::Arc;

/// The end of what was submitted last. Who waits for it waits for no more: to wait for the whole device would end captures of
/// streams that other threads have begun.
#[derive(Debug)]
pub(super) struct Done(CudaEvent);

impl Done {
    /// Of nothing so far.
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self> {
        context.new_event(Some(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)).map(Self).w()
    }

    /// What was submitted to `stream` is the last.
    pub(super) fn record(&self, stream: &CudaStream) -> Result<()> {
        self.0.record(stream).w()
    }

    /// What `stream` is given from here on starts after it.
    pub(super) fn before(&self, stream: &CudaStream) -> Result<()> {
        stream.wait(&self.0).w()
    }

    /// Returns when it is done. Errors have nowhere to go; the context is the thread's then.
    pub(super) fn wait(&self) {
        let _ = self.0.synchronize();
    }
}
