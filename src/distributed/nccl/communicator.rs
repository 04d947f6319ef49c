//! A communicator of NCCL, which the thread of its rank uses and any thread may end.

use super::super::collective::StreamCollective;
use super::{nccl_rank, not_done};
use crate::{Error, Result};
use candle_core::cuda_backend::cudarc::driver::sys::CUdeviceptr;
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::cuda_backend::cudarc::nccl::result::{self, NcclError};
use candle_core::cuda_backend::cudarc::nccl::sys;
use candle_core::DType;
use std::ffi::{c_char, c_void};
use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex, PoisonError};

/// NCCL's side of a rank, until a failure.
#[derive(Debug)]
pub(super) struct Communicator(Mutex<Option<Live>>);

impl Communicator {
    pub(super) fn new(live: Live) -> Self {
        Self(Mutex::new(Some(live)))
    }

    /// None after [`abort`](Communicator::abort), which does not come while this works.
    pub(super) fn with<T>(&self, work: impl FnOnce(&Live) -> T) -> Option<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(work)
    }

    /// Ends what is under way on the GPU, with any result, and so those that wait for it. NCCL may wait until all graphs that
    /// hold operations are dropped, by those whom the lock must not keep from that.
    pub(super) fn abort(&self) {
        let live = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(live);
    }
}

/// A communicator, and the stream of its rank's device.
#[derive(Debug)]
pub(super) struct Live {
    comm: sys::ncclComm_t,
    stream: Arc<CudaStream>,
    index: usize,
}

// SAFETY: NCCL allows calls for a communicator from any thread, one at a time.
unsafe impl Send for Live {}

/// Where an operation reads and writes, how many elements, and of which dtype.
#[derive(Clone, Copy)]
pub(super) struct Buffers {
    pub(super) from: CUdeviceptr,
    pub(super) to: CUdeviceptr,
    pub(super) count: usize,
    pub(super) dtype: sys::ncclDataType_t,
}

impl Live {
    /// Waits for all ranks of the group with this id. The context of the stream is the thread's.
    pub(super) fn connect(
        id: [c_char; 128],
        stream: Arc<CudaStream>,
        index: usize,
        world_size: usize,
    ) -> Result<Self> {
        let (rank, ranks) = (nccl_rank(index)?, nccl_rank(world_size)?);
        let mut comm = MaybeUninit::uninit();
        // SAFETY: the handle is written where it belongs, unless that fails.
        let comm = unsafe {
            result::comm_init_rank(comm.as_mut_ptr(), ranks, sys::ncclUniqueId { internal: id }, rank)
                .map_err(|error| super::failed("connecting", &error))?;
            comm.assume_init()
        };
        Ok(Self { comm, stream, index })
    }

    pub(super) fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// The stream of the rank's device, for the operations below.
    pub(super) fn own_stream(&self) -> sys::cudaStream_t {
        self.stream.cu_stream().cast()
    }

    /// # Safety
    /// As that of all operations: buffers are device memory of so many elements, those of all ranks where each receives
    /// or brings a share for each; nothing else uses them until the stream has passed.
    pub(super) unsafe fn all_reduce(&self, of: Buffers, stream: sys::cudaStream_t) -> Result<()> {
        let Buffers { from, to, count, dtype } = of;
        let sum = sys::ncclRedOp_t::ncclSum;
        // SAFETY: the caller promises it.
        done(unsafe {
            result::all_reduce(from as *const _, to as *mut _, count, dtype, sum, self.comm, stream)
        })
    }

    /// # Safety
    /// As that of [`all_reduce`](Self::all_reduce).
    unsafe fn gather_even(&self, of: Buffers, stream: sys::cudaStream_t) -> Result<()> {
        let Buffers { from, to, count, dtype } = of;
        // SAFETY: the caller promises it.
        done(unsafe { result::all_gather(from as *const _, to as *mut _, count, dtype, self.comm, stream) })
    }

    /// # Safety
    /// As that of [`all_reduce`](Self::all_reduce).
    pub(super) unsafe fn reduce_scatter(&self, of: Buffers, stream: sys::cudaStream_t) -> Result<()> {
        let Buffers { from, to, count, dtype } = of;
        let sum = sys::ncclRedOp_t::ncclSum;
        // SAFETY: the caller promises it.
        done(unsafe {
            result::reduce_scatter(from as *const _, to as *mut _, count, dtype, sum, self.comm, stream)
        })
    }

    /// Only `root` has to have something to send.
    ///
    /// # Safety
    /// As that of [`all_reduce`](Self::all_reduce).
    pub(super) unsafe fn broadcast(&self, of: Buffers, root: usize, stream: sys::cudaStream_t) -> Result<()> {
        let Buffers { from, to, count, dtype } = of;
        let root = nccl_rank(root)?;
        // SAFETY: the caller promises it.
        done(unsafe {
            result::broadcast(from as *const _, to as *mut _, count, dtype, root, self.comm, stream)
        })
    }

    /// Only `root` has to have room for what is received.
    ///
    /// # Safety
    /// As that of [`all_reduce`](Self::all_reduce).
    pub(super) unsafe fn reduce(&self, of: Buffers, root: usize, stream: sys::cudaStream_t) -> Result<()> {
        let Buffers { from, to, count, dtype } = of;
        let (root, sum) = (nccl_rank(root)?, sys::ncclRedOp_t::ncclSum);
        // SAFETY: the caller promises it.
        done(unsafe {
            result::reduce(from as *const _, to as *mut _, count, dtype, sum, root, self.comm, stream)
        })
    }

    /// What each rank has, `counts` elements of `size` bytes, one behind the other.
    ///
    /// # Safety
    /// As that of [`all_reduce`](Self::all_reduce).
    pub(super) unsafe fn gather(
        &self,
        (of, size): (Buffers, usize),
        counts: &[usize],
        stream: sys::cudaStream_t,
    ) -> Result<()> {
        let is_even = counts.windows(2).all(|pair| pair.first() == pair.last());
        if is_even {
            // SAFETY: the caller promises it.
            return unsafe { self.gather_even(of, stream) };
        }
        // NCCL knows only shares of one size.
        together(|| {
            let mut to = of.to;
            counts.iter().enumerate().try_for_each(|(root, count)| {
                let part = Buffers { to, count: *count, ..of };
                to += (count * size) as CUdeviceptr;
                // SAFETY: the caller promises it.
                unsafe { self.broadcast(part, root, stream) }
            })
        })
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        // SAFETY: nobody uses the handle any more. An error says that it has ended already.
        let _ = unsafe { result::comm_abort(self.comm) };
    }
}

fn done<T>(told: std::result::Result<T, NcclError>) -> Result<()> {
    told.map(drop).map_err(not_done)
}

/// Operations that NCCL does as one.
pub(super) fn together(operations: impl FnOnce() -> Result<()>) -> Result<()> {
    done(result::group_start())?;
    let told = operations();
    done(result::group_end())?;
    told
}

impl StreamCollective for Live {
    unsafe fn all_reduce_sum(
        &self,
        numbers: u64,
        count: usize,
        dtype: DType,
        stream: *mut c_void,
    ) -> Result<()> {
        let of = Buffers { from: numbers, to: numbers, count, dtype: nccl_dtype(dtype)? };
        // SAFETY: the caller promises it.
        unsafe { self.all_reduce(of, stream.cast()) }
    }

    unsafe fn all_gather(
        &self,
        [parts, rows]: [u64; 2],
        row_count: usize,
        counts: &[usize],
        dtype: DType,
        stream: *mut c_void,
    ) -> Result<()> {
        let (own, all) = (counts.get(self.index).copied().unwrap_or_default(), counts.iter().sum::<usize>());
        let size = dtype.size_in_bytes();
        let dtype = nccl_dtype(dtype)?;
        together(|| {
            (0..row_count).try_for_each(|row| {
                let at = |address: u64, width: usize| address + (row * width * size) as u64;
                let of = Buffers { from: at(parts, own), to: at(rows, all), count: own, dtype };
                // SAFETY: the caller promises it.
                unsafe { self.gather((of, size), counts, stream.cast()) }
            })
        })
    }
}

fn nccl_dtype(dtype: DType) -> Result<sys::ncclDataType_t> {
    #[allow(clippy::wildcard_enum_match_arm, reason = "activations have no others")]
    match dtype {
        DType::F32 => Ok(sys::ncclDataType_t::ncclFloat32),
        DType::F16 => Ok(sys::ncclDataType_t::ncclFloat16),
        DType::BF16 => Ok(sys::ncclDataType_t::ncclBfloat16),
        other => Err(Error::mismatch("activations", "F32, F16 or BF16", format!("{other:?}"))),
    }
}
