//! Device memory that launches share and that is kept: partial sums, arrival counters, dequantized weights, and what is known
//! in the course of a draw.
//!
//! A workspace belongs to one thread and one stream, whose order keeps launches from each other's
//! results. (The stream of [`candle_core::Device::new_cuda`] is another one on each thread.)
//!
//! A CUDA graph remembers addresses. So memory is never given back while a graph may use it: buffers that
//! were outgrown are kept, and a workspace that took part in a capture outlives its thread. Nothing is
//! allocated during a capture, where memory would belong to the graph; running the step once before
//! capturing it, on the same thread, brings all buffers to their size.

use super::scratch::{Scratch, SideStream};
use candle_core::cuda_backend::cudarc::driver::{sys, CudaSlice, CudaStream, DevicePtr};
use candle_core::cuda_backend::WrapErr;
use candle_core::{bail, Result};
use std::cell::RefCell;
use std::sync::Arc;

/// The smallest buffer. Sizes are powers of two, so that outgrown ones together are no more than the last.
const SMALLEST_BUFFER: usize = 1 << 20;

thread_local! {
    static WORKSPACES: RefCell<Vec<Workspace>> = const { RefCell::new(Vec::new()) };
}

pub(super) struct Workspace {
    stream: Arc<CudaStream>,
    /// Sums of parts of k.
    partial: Buffer,
    /// How many parts have been summed, for each block; zero between launches.
    arrivals: Buffer,
    /// What launches of a draw tell each other; zero between draws.
    draws: Buffer,
    /// x as tile kernels take it.
    x_of_tiles: Buffer,
    /// Weights dequantized for a dense GEMM.
    scratch: [Buffer; 2],
    /// Dequantizes, if there is more than one part.
    side: Option<SideStream>,
    captured: bool,
}

#[derive(Default)]
struct Buffer {
    /// The last one is in use, the others were outgrown.
    slices: Vec<CudaSlice<u8>>,
    address: u64,
    bytes: usize,
}

/// Lends the workspace of this thread and stream to `work`.
pub(super) fn with<R>(stream: &Arc<CudaStream>, work: impl FnOnce(&mut Workspace) -> Result<R>) -> Result<R> {
    WORKSPACES.with_borrow_mut(|workspaces| {
        let mine = |workspace: &Workspace| Arc::ptr_eq(&workspace.stream, stream);
        let index = match workspaces.iter().position(mine) {
            Some(index) => index,
            None => {
                workspaces.retain_mut(Workspace::is_needed);
                workspaces.push(Workspace::new(stream));
                workspaces.len() - 1
            }
        };
        let Some(workspace) = workspaces.get_mut(index) else { bail!("no workspace") };
        workspace.captured |= workspace.is_capturing()?;
        work(workspace)
    })
}

impl Workspace {
    fn new(stream: &Arc<CudaStream>) -> Self {
        Self {
            stream: stream.clone(),
            partial: Buffer::default(),
            arrivals: Buffer::default(),
            draws: Buffer::default(),
            x_of_tiles: Buffer::default(),
            scratch: Default::default(),
            side: None,
            captured: false,
        }
    }

    /// Room for as many f32 and u32.
    pub(super) fn split_sums(&mut self, partial: usize, arrivals: usize) -> Result<(*mut f32, *mut u32)> {
        let stream = self.stream.clone();
        let partial = self.partial.at_least(partial * size_of::<f32>(), &stream)?;
        let arrivals = self.arrivals.at_least(arrivals * size_of::<u32>(), &stream)?;
        Ok((partial as *mut f32, arrivals as *mut u32))
    }

    /// Says that a draw has ended halfway: what it has left behind is used no more.
    pub(super) fn abandon_draw(&mut self) {
        self.draws.bytes = 0;
    }

    /// Room for bytes that are zero between draws, and for others.
    pub(super) fn draws(&mut self, zeros: usize, others: usize) -> Result<(u64, u64)> {
        let stream = self.stream.clone();
        Ok((self.draws.at_least(zeros, &stream)?, self.partial.at_least(others, &stream)?))
    }

    /// Room for parts of a weight of `bytes`; if there are several, two at a time.
    pub(super) fn scratch(&mut self, bytes: usize, several: bool) -> Result<Scratch<'_>> {
        let [first, second] = &mut self.scratch;
        let first = first.at_least(bytes, &self.stream)?;
        if !several {
            return Ok(Scratch { addresses: [first; 2], side: None });
        }
        let second = second.at_least(bytes, &self.stream)?;
        let side = match self.side.take() {
            Some(side) => side,
            None => SideStream::new(self.stream.context())?,
        };
        Ok(Scratch { addresses: [first, second], side: Some(self.side.insert(side)) })
    }

    fn is_capturing(&self) -> Result<bool> {
        Ok(self.stream.capture_status().w()? != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Room for x as tile kernels take it.
    pub(super) fn x_of_tiles(&mut self, bytes: usize) -> Result<u64> {
        self.x_of_tiles.at_least(bytes, &self.stream)
    }

    fn buffers(&mut self) -> [&mut Buffer; 6] {
        let [first, second] = &mut self.scratch;
        [&mut self.partial, &mut self.arrivals, &mut self.draws, &mut self.x_of_tiles, first, second]
    }

    /// Whether somebody beside this workspace holds the stream: a device, a tensor, a graph.
    fn is_needed(&mut self) -> bool {
        let held_here: usize = self.buffers().iter().map(|buffer| buffer.slices.len()).sum();
        Arc::strong_count(&self.stream) > held_here + 1
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        if self.captured {
            for buffer in self.buffers() {
                std::mem::take(&mut buffer.slices).into_iter().for_each(std::mem::forget);
            }
        }
    }
}

impl Buffer {
    /// The address of at least `bytes` bytes, zero when they are new.
    fn at_least(&mut self, bytes: usize, stream: &Arc<CudaStream>) -> Result<u64> {
        if bytes > self.bytes {
            let status = stream.capture_status().w()?;
            if status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
                bail!(
                    "a CUDA graph is being captured, in which memory cannot be kept; run the same step once \
                     on this thread before capturing it"
                );
            }
            let bytes = bytes.next_power_of_two().max(SMALLEST_BUFFER);
            let slice = stream.alloc_zeros::<u8>(bytes).w()?;
            // Used in this stream only, whose order is all the synchronization there has to be.
            self.address = slice.device_ptr(stream).0;
            self.slices.push(slice);
            self.bytes = bytes;
        }
        Ok(self.address)
    }
}
