//! A step as a CUDA graph: all its launches are one call of the driver.

use super::super::scratch::OwnStream;
use super::done::Done;
use candle_core::cuda_backend::cudarc::driver::{sys, CudaStream};
use candle_core::cuda_backend::WrapErr;
use candle_core::Result;
use std::ptr;
use std::sync::Arc;

/// Launches that were captured, to be launched together.
#[derive(Debug)]
pub(super) struct Graph {
    done: Arc<Done>,
    graph: sys::CUgraph,
    executable: sys::CUgraphExec,
}

// SAFETY: handles of the driver, which any thread may use; a graph is launched by one thread at a time, as that takes `&mut`.
unsafe impl Send for Graph {}
// SAFETY: as above; what takes `&self` does not touch the driver.
unsafe impl Sync for Graph {}

impl Graph {
    /// Captures what `submit` puts into the stream that it is given, for launches in `stream`, the last of which `done` knows.
    /// That stream itself may be one that cannot be captured. None if somebody ended the capture, as all do who wait for the
    /// whole device meanwhile, in whichever thread.
    pub(super) fn capture(
        stream: &Arc<CudaStream>,
        done: &Arc<Done>,
        submit: impl FnOnce(&CudaStream) -> Result<()>,
    ) -> Result<Option<Self>> {
        let own = OwnStream::new(stream.context())?;
        own.stream().begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).w()?;
        let submitted = submit(own.stream());
        let mut this = Self { done: done.clone(), graph: ptr::null_mut(), executable: ptr::null_mut() };
        // SAFETY: the stream is capturing; the graph is written to a variable.
        let ended = unsafe { sys::cuStreamEndCapture(own.stream().cu_stream(), &mut this.graph) };
        if ended == sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED {
            return Ok(None);
        }
        submitted?;
        ended.result().w()?;
        // SAFETY: the graph was captured just now; the executable one is written to a variable, and both are destroyed by `drop`.
        unsafe {
            sys::cuGraphInstantiateWithFlags(&mut this.executable, this.graph, 0).result().w()?;
            sys::cuGraphUpload(this.executable, stream.cu_stream()).result().w()?;
        }
        Ok(Some(this))
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
        // No launch may be on its way when it is destroyed, in a stream of whichever thread.
        self.done.wait();
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
