//! What functions of the driver return.

use std::cell::{Cell, RefCell};
use std::ffi::{c_char, c_int, CStr, CString};

use crate::argument::Out;

/// Why a function failed.
#[derive(Debug)]
pub struct Error {
    code: c_int,
    message: String,
}

/// What a function of this crate returns.
pub type Result<T> = std::result::Result<T, Error>;

macro_rules! codes {
    ($($name:ident = $code:literal, $cuda:literal;)*) => {
        $(#[doc = concat!("`", $cuda, "`")] pub const $name: c_int = $code;)*
        fn code_name(code: c_int) -> &'static CStr {
            match code {
                $($code => name(concat!($cuda, "\0")),)*
                _ => name("unrecognized error code\0"),
            }
        }
    };
}

fn name(with_nul: &'static str) -> &'static CStr {
    CStr::from_bytes_with_nul(with_nul.as_bytes()).unwrap_or_default()
}

codes! {
    SUCCESS = 0, "CUDA_SUCCESS";
    INVALID_VALUE = 1, "CUDA_ERROR_INVALID_VALUE";
    OUT_OF_MEMORY = 2, "CUDA_ERROR_OUT_OF_MEMORY";
    INVALID_DEVICE = 101, "CUDA_ERROR_INVALID_DEVICE";
    INVALID_CONTEXT = 201, "CUDA_ERROR_INVALID_CONTEXT";
    INVALID_HANDLE = 400, "CUDA_ERROR_INVALID_HANDLE";
    NOT_FOUND = 500, "CUDA_ERROR_NOT_FOUND";
    ILLEGAL_ADDRESS = 700, "CUDA_ERROR_ILLEGAL_ADDRESS";
    LAUNCH_FAILED = 719, "CUDA_ERROR_LAUNCH_FAILED";
    NOT_SUPPORTED = 801, "CUDA_ERROR_NOT_SUPPORTED";
    CAPTURE_UNSUPPORTED = 900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
    CAPTURE_INVALIDATED = 901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED";
    CAPTURE_UNMATCHED = 903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED";
    CAPTURE_UNJOINED = 904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED";
    CAPTURE_ISOLATION = 905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION";
    CAPTURE_IMPLICIT = 906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT";
    CAPTURED_EVENT = 907, "CUDA_ERROR_CAPTURED_EVENT";
    CAPTURE_WRONG_THREAD = 908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD";
}

/// An error with a message in full.
pub fn fail<T>(code: c_int, message: impl Into<String>) -> Result<T> {
    Err(Error { code, message: message.into() })
}

impl Error {
    /// The number that the driver returns.
    pub fn code(&self) -> c_int {
        self.code
    }

    /// What is wrong.
    pub fn message(&self) -> &str {
        &self.message
    }
}

thread_local! {
    static LAST: RefCell<Option<Error>> = const { RefCell::new(None) };
    /// Text that a caller of `cuGetErrorString` may still look at.
    static SHOWN: Cell<&'static CStr> = const { Cell::new(c"") };
}

/// Makes the number to return of a result, and keeps the message for `cuGetErrorString`. What goes
/// wrong on the device is printed as well.
pub fn report(function: &str, result: Result<()>) -> c_int {
    let Err(error) = result else { return SUCCESS };
    let error = Error { message: format!("{function}: {}", error.message), ..error };
    if matches!(error.code, LAUNCH_FAILED | ILLEGAL_ADDRESS) {
        eprintln!("pretend CUDA: {}", error.message);
    }
    let code = error.code;
    // Destructors of thread-local variables call the driver too, when this one may be gone.
    let _ = LAST.try_with(|last| last.replace(Some(error)));
    code
}

/// Names an error code.
#[no_mangle]
pub extern "C" fn cuGetErrorName(error: c_int, text: Out<*const c_char>) -> c_int {
    report("cuGetErrorName", text.set(code_name(error).as_ptr()))
}

/// The message of the last error of this thread, if it had this code; else the code's name.
#[no_mangle]
pub extern "C" fn cuGetErrorString(error: c_int, text: Out<*const c_char>) -> c_int {
    let message = LAST.try_with(|last| {
        let last = last.borrow();
        let last = last.as_ref().filter(|last| last.code == error)?;
        CString::new(last.message.replace('\0', "?")).ok()
    });
    // Callers keep the pointer, as the real one never goes away.
    let text_of_error = match message.ok().flatten() {
        Some(message) if message.as_c_str() != SHOWN.get() => {
            SHOWN.set(Box::leak(message.into_boxed_c_str()));
            SHOWN.get()
        }
        Some(_) => SHOWN.get(),
        None => code_name(error),
    };
    report("cuGetErrorString", text.set(text_of_error.as_ptr()))
}
