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

include!(concat!(env!("OUT_DIR"), "/stubs.rs"));
