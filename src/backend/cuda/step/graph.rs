//! A step as a CUDA graph: all its launches are one call of the driver.

use super::super::scratch::OwnStream;
use candle_core::cuda_backend::cudarc::driver::{sys, CudaContext, CudaStream};
use candle_core::cuda_backend::WrapErr;
use candle_core::Result;
use std::ptr;
use std::sync::Arc;

/// Launches that were captured, to be launched together.
#[derive(Debug)]
pub(super) struct Graph {
    context: Arc<CudaContext>,
    graph: sys::CUgraph,
    executable: sys::CUgraphExec,
}

// SAFETY: handles of the driver, which any thread may use; a graph is launched by one thread at a time, as that takes `&mut`.
unsafe impl Send for Graph {}
// SAFETY: as above; what takes `&self` does not touch the driver.
unsafe impl Sync for Graph {}

impl Graph {
    /// Captures what `submit` puts into the stream that it is given, for launches in `stream`. That one itself may be one that
    /// cannot be captured.
    pub(super) fn capture(
        stream: &Arc<CudaStream>,
        submit: impl FnOnce(&CudaStream) -> Result<()>,
    ) -> Result<Self> {
        let own = OwnStream::new(stream.context())?;
        own.stream().begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).w()?;
        let submitted = submit(own.stream());
        let context = stream.context().clone();
        let mut this = Self { context, graph: ptr::null_mut(), executable: ptr::null_mut() };
        // SAFETY: the stream is capturing; the graph is written to a variable.
        let ended = unsafe { sys::cuStreamEndCapture(own.stream().cu_stream(), &mut this.graph) };
        submitted?;
        ended.result().w()?;
        // SAFETY: the graph was captured just now; the executable one is written to a variable, and both are destroyed by `drop`.
        unsafe {
            sys::cuGraphInstantiateWithFlags(&mut this.executable, this.graph, 0).result().w()?;
            sys::cuGraphUpload(this.executable, stream.cu_stream()).result().w()?;
        }
        Ok(this)
    }

    /// Launches all.
    ///
    /// # Safety
    /// What the captured launches ask for has to hold now; the context of the stream is the thread's.
    pub(super) unsafe fn launch(&mut self, stream: &CudaStream) -> Result<()> {
        // SAFETY: the graph exists as long as this does; the caller answers for what its launches touch.
        unsafe { sys::cuGraphLaunch(self.executable, stream.cu_stream()) }.result().w()
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // Errors have nowhere to go. No launch may be on its way when it is destroyed, in a stream of whichever thread.
        let _ = self.context.bind_to_thread();
        let _ = self.context.synchronize();
        // SAFETY: made in `capture`, and used by nobody any more.
        unsafe {
            if !self.executable.is_null() {
                let _ = sys::cuGraphExecDestroy(self.executable);
            }
            if !self.graph.is_null() {
                let _ = sys::cuGraphDestroy(self.graph);
            }
        }
    }
}
