//! The emulator of CUDA C++.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void, CStr};
use std::ptr::NonNull;
use std::slice;

/// Bytes from one of several parameters to the next.
pub const PARAM_SLOT: usize = 16;

#[repr(C)]
struct RawKernel {
    _opaque: [u8; 0],
}

extern "C" {
    fn emulator_find_kernel(name: *const c_char) -> *const RawKernel;
    fn emulator_kernel_shape(kernel: *const RawKernel, params_size: *mut usize, threads: *mut c_uint);
    fn emulator_kernel_param_sizes(kernel: *const RawKernel) -> *const usize;
    fn emulator_launch(
        kernel: *const RawKernel,
        grid: *const c_uint,
        block: *const c_uint,
        shared_bytes: usize,
        params: *const c_void,
        schedule: c_int,
        seed: c_ulonglong,
        message: *mut c_char,
        capacity: usize,
    ) -> c_int;
}

/// A kernel that was compiled for the emulator.
#[derive(Clone, Copy)]
pub struct Kernel {
    raw: NonNull<RawKernel>,
    /// Bytes of its parameter struct.
    pub params_size: usize,
    /// Sizes of the parameters of a kernel that takes several, as candle's do; empty for one struct.
    pub param_sizes: &'static [usize],
    /// Threads in each block; 0 if it takes any number.
    pub threads: u32,
}

// SAFETY: kernels are constants of the program.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// The order in which threads and blocks run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// The first that can run, always.
    Forward,
    /// The last that can run, always.
    Reverse,
    /// Any that can run.
    Random {
        /// Makes the order.
        seed: u64,
    },
}

/// The parameter struct of a kernel, aligned as any struct may want to be.
#[derive(Clone)]
pub struct Params {
    words: Vec<u128>,
    size: usize,
}

impl Params {
    /// A copy of `bytes`.
    pub fn new(bytes: &[u8]) -> Self {
        let words = bytes.chunks(16).map(|chunk| {
            let mut word = [0; 16];
            word[..chunk.len()].copy_from_slice(chunk);
            u128::from_ne_bytes(word)
        });
        Self { words: words.collect(), size: bytes.len() }
    }

    /// How many bytes it has.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Its aligned 8-byte words, with their offsets: pointers among them.
    pub fn words(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        let halves = self.words.iter().flat_map(|word| {
            let bytes = word.to_ne_bytes();
            let (low, high) = bytes.split_at(8);
            [low, high].map(|half| half.try_into().map_or(0, u64::from_ne_bytes))
        });
        halves.enumerate().map(|(i, word)| (8 * i, word)).take(self.size / 8)
    }
}

impl Kernel {
    /// The kernel of this name.
    pub fn find(name: &CStr) -> Option<Self> {
        // SAFETY: a string that ends with zero.
        let raw = NonNull::new(unsafe { emulator_find_kernel(name.as_ptr()) }.cast_mut())?;
        let (mut params_size, mut threads) = (0, 0);
        // SAFETY: a kernel that was found, and places for the answers.
        unsafe { emulator_kernel_shape(raw.as_ptr(), &mut params_size, &mut threads) };
        // SAFETY: as above.
        let sizes = unsafe { emulator_kernel_param_sizes(raw.as_ptr()) };
        let count = if sizes.is_null() { 0 } else { params_size / PARAM_SLOT };
        // SAFETY: a constant of the program, with a size for each slot; nothing is read if there is none.
        let param_sizes = if count == 0 { &[] } else { unsafe { slice::from_raw_parts(sizes, count) } };
        Some(Self { raw, params_size, param_sizes, threads })
    }

    /// Runs a grid; describes what goes wrong.
    ///
    /// # Safety
    /// `params` is what the kernel takes, and what the kernel does with the pointers in it is sound.
    pub unsafe fn launch(
        self,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: usize,
        params: &Params,
        schedule: Schedule,
    ) -> Result<(), String> {
        if params.size() != self.params_size {
            return Err(format!(
                "{} bytes of parameters, the kernel takes {}",
                params.size(),
                self.params_size
            ));
        }
        let (order, seed) = match schedule {
            Schedule::Forward => (0, 0),
            Schedule::Reverse => (1, 0),
            Schedule::Random { seed } => (2, seed),
        };
        let mut message = [0u8; 4096];
        // SAFETY: all arguments are as the function wants them; the kernel is the caller's promise.
        let failed = unsafe {
            emulator_launch(
                self.raw.as_ptr(),
                grid.as_ptr(),
                block.as_ptr(),
                shared_bytes,
                params.words.as_ptr().cast(),
                order,
                seed,
                message.as_mut_ptr().cast(),
                message.len(),
            )
        };
        if failed == 0 {
            return Ok(());
        }
        let text = CStr::from_bytes_until_nul(&message).unwrap_or_default();
        Err(text.to_string_lossy().into_owned())
    }
}
