//! Functions that exist so that programs link and start, but do nothing.

macro_rules! stub {
    ($name:ident, $answer:expr) => {
        #[no_mangle]
        extern "C" fn $name() -> std::ffi::c_int {
            $answer
        }
    };
}

macro_rules! unsupported {
    ($status:literal) => {
        $status
    };
}

// Kernels that candle links, instead of loading modules, return nothing that could tell an error.
include!(concat!(env!("OUT_DIR"), "/stubs.rs"));
