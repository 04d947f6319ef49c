//! How often functions of the driver are called.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{c_char, CStr};

thread_local! {
    static CALLS: RefCell<BTreeMap<&'static str, usize>> = const { RefCell::new(BTreeMap::new()) };
}

/// Counts a call by this thread.
pub fn count(function: &'static str) {
    // Destructors of other thread-local variables call the driver, too.
    let _ = CALLS.try_with(|calls| *calls.borrow_mut().entry(function).or_default() += 1);
}

/// Calls by this thread of a function; without a name of all but those that read or set which context is the thread's.
///
/// # Safety
/// `function` is null or a text that ends with a zero.
#[no_mangle]
pub unsafe extern "C" fn pretend_cuda_calls(function: *const c_char) -> usize {
    let counted = |name: &str| {
        if function.is_null() {
            return !matches!(name, "cuCtxGetCurrent" | "cuCtxSetCurrent");
        }
        // SAFETY: as the caller promises.
        let function = unsafe { CStr::from_ptr(function) };
        function.to_bytes() == name.as_bytes()
    };
    let sum = |calls: &RefCell<BTreeMap<&'static str, usize>>| {
        calls.borrow().iter().filter(|(name, _)| counted(name)).map(|(_, count)| count).sum()
    };
    CALLS.try_with(sum).unwrap_or_default()
}
