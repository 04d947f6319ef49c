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
macro_rules! missing {
    () => {{
        eprintln!("pretend CUDA: kernels that candle links do not exist here; `set_force_dmmv` makes it load others for GGML blocks");
        std::process::abort()
    }};
}

include!(concat!(env!("OUT_DIR"), "/stubs.rs"));
