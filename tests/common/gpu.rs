//! CUDA devices for tests: real ones, or those of the pretend driver of `scripts/test-cuda.sh`.
#![allow(dead_code)] // each test binary uses its own part

use candle_core::cuda_backend::cudarc::driver::CudaContext;
use candle_core::Device;
use std::sync::{LazyLock, PoisonError, RwLock, RwLockReadGuard};

/// The first CUDA device, or none with a message.
pub fn device() -> Option<Device> {
    static FIRST: LazyLock<Option<Device>> = LazyLock::new(|| nth_device(0));
    FIRST.clone()
}

/// Read where a stream is captured, written where somebody waits for a whole device, which would end that.
static CAPTURES: RwLock<()> = RwLock::new(());

/// While it lives, no test of this program waits for a whole device.
pub fn captures() -> RwLockReadGuard<'static, ()> {
    CAPTURES.read().unwrap_or_else(PoisonError::into_inner)
}

/// Does what waits for a whole device, while no test of this program captures.
pub fn between_captures<T>(wait: impl FnOnce() -> T) -> T {
    let _none = CAPTURES.write().unwrap_or_else(PoisonError::into_inner);
    wait()
}

/// The first CUDA device, with a stream of its own, for which cudarc waits for the device.
pub fn device_with_own_stream() -> Option<Device> {
    device()?;
    Some(between_captures(|| Device::new_cuda_with_stream(0).unwrap()))
}

/// Whether memory is looked at, of which a part of what a test computes shows enough.
pub fn is_about_memory() -> bool {
    std::env::var("PRETEND_CUDA_SCHEDULES").as_deref() == Ok("random")
}

/// Of cases that use the same memory in the same way all, or the one whose turn it is where memory is looked at.
pub fn alike<T>(cases: &[T], turn: usize) -> &[T] {
    match is_about_memory() {
        true => &cases[turn % cases.len()..][..1],
        false => cases,
    }
}

/// Whether what is computed once more can be seen to have the same bits: not where each launch has to have them in two orders of
/// threads, nor where memory is looked at.
pub fn repeats() -> bool {
    let schedules = std::env::var("PRETEND_CUDA_SCHEDULES");
    !is_about_memory() && !matches!(schedules.as_deref(), Ok("some" | "two"))
}

/// Device `ordinal`, or none with a message. `CANDLE_QUANT_REQUIRE_CUDA` asks for one device: a machine may have no more.
pub fn nth_device(ordinal: usize) -> Option<Device> {
    let count = CudaContext::device_count().unwrap_or(0);
    if ordinal > 0 && ordinal as i32 >= count {
        eprintln!("skipped, for there is no CUDA device {ordinal} but {count} in all");
        return None;
    }
    match Device::new_cuda(ordinal) {
        Ok(device) => Some(device),
        Err(error) if std::env::var("CANDLE_QUANT_REQUIRE_CUDA").as_deref() == Ok("1") => {
            panic!("CANDLE_QUANT_REQUIRE_CUDA is set, and there is no CUDA device {ordinal}: {error}")
        }
        Err(error) => {
            eprintln!("skipped, for there is no CUDA device {ordinal}: {error}");
            None
        }
    }
}

/// Calls of functions of the driver by this thread so far, if it is the pretended one, which counts: of one function, or of
/// all.
pub fn driver_calls(function: Option<&std::ffi::CStr>) -> Option<usize> {
    use std::ffi::{c_char, c_int, c_void};
    extern "C" {
        fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
        fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
    }
    const RTLD_LAZY: c_int = 1;
    // SAFETY: functions of the C library with texts that end with zeros. What the pretended driver has by this name takes null or
    // such a text, and returns a number.
    unsafe {
        let library = dlopen(c"libcuda.so.1".as_ptr(), RTLD_LAZY);
        let found = if library.is_null() { library } else { dlsym(library, c"pretend_cuda_calls".as_ptr()) };
        if found.is_null() {
            return None;
        }
        let calls: unsafe extern "C" fn(*const c_char) -> usize = std::mem::transmute(found);
        Some(calls(function.map_or(std::ptr::null(), |name| name.as_ptr())))
    }
}
