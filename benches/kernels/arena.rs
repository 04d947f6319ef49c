//! Memory for what candle allocates inside a captured graph.
//!
//! candle takes the memory of every result from the stream. Captured, each of these allocations becomes a
//! node between the kernels, and its time part of theirs. The two functions here have the names of the
//! driver's and come before them in this program: while a graph is captured they hand out memory that was
//! there before.

use candle_core::cuda_backend::cudarc::driver::sys::{cudaError_enum, CUdeviceptr, CUresult, CUstream};
use std::ffi::{c_char, c_void, CStr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

static BEGIN: AtomicU64 = AtomicU64::new(0);
static END: AtomicU64 = AtomicU64::new(0);
static NEXT: AtomicU64 = AtomicU64::new(0);
static IN_USE: AtomicBool = AtomicBool::new(false);

const ALIGNMENT: u64 = 512;

/// Hands out `memory` in captures from now on. It must not be freed.
pub fn provide(memory: CUdeviceptr, bytes: usize) {
    BEGIN.store(memory, SeqCst);
    NEXT.store(memory, SeqCst);
    END.store(memory + bytes as u64, SeqCst);
}

/// While this lives, allocations come from the arena.
pub struct Capture;

impl Capture {
    pub fn begin() -> Self {
        NEXT.store(BEGIN.load(SeqCst), SeqCst);
        IN_USE.store(true, SeqCst);
        Self
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        IN_USE.store(false, SeqCst);
    }
}

extern "C" {
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// The driver's own function of this name.
fn driver_function(name: &CStr) -> *mut c_void {
    const NEXT_AFTER_THIS_PROGRAM: *mut c_void = -1isize as *mut c_void;
    // SAFETY: dlsym reads a C string and returns an address or null.
    let function = unsafe { dlsym(NEXT_AFTER_THIS_PROGRAM, name.as_ptr()) };
    assert!(!function.is_null(), "the CUDA driver has no {name:?}");
    function
}

/// # Safety
/// As `cuMemAllocAsync` of the driver.
#[no_mangle]
unsafe extern "C" fn cuMemAllocAsync(address: *mut CUdeviceptr, bytes: usize, stream: CUstream) -> CUresult {
    if !IN_USE.load(SeqCst) {
        type Function = unsafe extern "C" fn(*mut CUdeviceptr, usize, CUstream) -> CUresult;
        // SAFETY: this is the driver's declaration of the function, called with the caller's arguments.
        return unsafe {
            std::mem::transmute::<*mut c_void, Function>(driver_function(c"cuMemAllocAsync"))(
                address, bytes, stream,
            )
        };
    }
    let size = (bytes as u64).div_ceil(ALIGNMENT) * ALIGNMENT;
    let (begin, end) = (BEGIN.load(SeqCst), END.load(SeqCst));
    let next = NEXT.load(SeqCst);
    // What was handed out long ago is no longer in use.
    let start = if next + size > end { begin } else { next };
    if start + size > end {
        return cudaError_enum::CUDA_ERROR_OUT_OF_MEMORY;
    }
    NEXT.store(start + size, SeqCst);
    // SAFETY: the caller passes a place for the address.
    unsafe { *address = start };
    cudaError_enum::CUDA_SUCCESS
}

/// # Safety
/// As `cuMemFreeAsync` of the driver.
#[no_mangle]
unsafe extern "C" fn cuMemFreeAsync(address: CUdeviceptr, stream: CUstream) -> CUresult {
    if (BEGIN.load(SeqCst)..END.load(SeqCst)).contains(&address) {
        return cudaError_enum::CUDA_SUCCESS;
    }
    type Function = unsafe extern "C" fn(CUdeviceptr, CUstream) -> CUresult;
    // SAFETY: this is the driver's declaration of the function, called with the caller's arguments.
    unsafe {
        std::mem::transmute::<*mut c_void, Function>(driver_function(c"cuMemFreeAsync"))(address, stream)
    }
}
