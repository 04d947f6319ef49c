//! Launching kernels in the emulator.

use std::ffi::CString;

use pretend_cuda::emulator::{Grid, Kernel, Params, Schedule};

/// Orders that find what depends on order.
pub const SCHEDULES: [Schedule; 4] =
    [Schedule::Forward, Schedule::Reverse, Schedule::Random { seed: 1 }, Schedule::Random { seed: 2 }];

/// Lays out arguments as C does for structs of pointers, then numbers of four bytes.
macro_rules! params {
    ($($argument:expr),* $(,)?) => {{
        let mut bytes = Vec::new();
        $(bytes.extend_from_slice(&$crate::common::launch::Argument::bytes($argument));)*
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        pretend_cuda::emulator::Params::new(&bytes)
    }};
}

pub(crate) use params;

/// A field of a parameter struct.
pub trait Argument {
    fn bytes(self) -> Vec<u8>;
}
impl<T> Argument for *const T {
    fn bytes(self) -> Vec<u8> {
        (self as usize).to_ne_bytes().into()
    }
}
impl<T> Argument for *mut T {
    fn bytes(self) -> Vec<u8> {
        (self as usize).to_ne_bytes().into()
    }
}
impl Argument for u32 {
    fn bytes(self) -> Vec<u8> {
        self.to_ne_bytes().into()
    }
}

pub fn launch_grid(
    name: &str,
    blocks: [u32; 3],
    threads: [u32; 3],
    shared_bytes: usize,
    params: &Params,
    schedule: Schedule,
) -> Result<(), String> {
    let kernel = Kernel::find(&CString::new(name).unwrap()).unwrap_or_else(|| panic!("no kernel {name}"));
    let grid = Grid { blocks, threads, shared_bytes, params: params.clone(), starts_early: false };
    // SAFETY: every test gives its kernel memory that is large enough, and live.
    unsafe { kernel.launch(&grid, schedule) }
}

pub fn launch(
    name: &str,
    blocks: u32,
    threads: u32,
    shared: usize,
    params: &Params,
    schedule: Schedule,
) -> Result<(), String> {
    launch_grid(name, [blocks, 1, 1], [threads, 1, 1], shared, params, schedule)
}
