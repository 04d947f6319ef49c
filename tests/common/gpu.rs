//! CUDA devices for tests: real ones, or those of the pretend driver of `scripts/test-cuda.sh`.
#![allow(dead_code)] // each test binary uses its own part

use candle_core::Device;
use std::sync::LazyLock;

/// The first CUDA device, or none with a message.
pub fn device() -> Option<Device> {
    static FIRST: LazyLock<Option<Device>> = LazyLock::new(|| nth_device(0));
    FIRST.clone()
}

/// Whether memory is looked at, which is the same when something is computed once more.
pub fn is_about_memory() -> bool {
    std::env::var("PRETEND_CUDA_SCHEDULES").as_deref() == Ok("random")
}

pub fn nth_device(ordinal: usize) -> Option<Device> {
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
