//! The emulator of CUDA C++.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void, CStr};
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::slice;

/// Bytes from one of several parameters to the next.
pub const PARAM_SLOT: usize = 16;

#[repr(C)]
struct RawKernel {
    _opaque: [u8; 0],
}

#[repr(C)]
struct RawEarly {
    _opaque: [u8; 0],
}

/// `emulator::Grid`
#[repr(C)]
struct RawGrid {
    kernel: *const RawKernel,
    blocks: [c_uint; 3],
    threads: [c_uint; 3],
    shared_bytes: usize,
    params: *const c_void,
    schedule: c_int,
    seed: c_ulonglong,
    starts_early: c_int,
}

/// `emulator::Memory`
#[repr(C)]
pub struct Memory {
    /// Where it begins.
    pub start: *mut u8,
    /// How many bytes.
    pub size: usize,
}

extern "C" {
    fn emulator_find_kernel(name: *const c_char) -> *const RawKernel;
    fn emulator_static_shared_bytes() -> usize;
    fn emulator_kernel_shape(kernel: *const RawKernel, params_size: *mut usize, threads: *mut c_uint);
    fn emulator_start_early(
        grid: *const RawGrid,
        watched: *const Memory,
        count: usize,
        message: *mut c_char,
        capacity: usize,
    ) -> *mut RawEarly;
    fn emulator_drop_early(early: *mut RawEarly);
    fn emulator_kernel_param_sizes(kernel: *const RawKernel) -> *const usize;
    fn emulator_launch(
        grid: *const RawGrid,
        early: *mut RawEarly,
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

/// What is launched.
pub struct Grid {
    /// Blocks.
    pub blocks: [u32; 3],
    /// Threads of each.
    pub threads: [u32; 3],
    /// Bytes of dynamic shared memory of each.
    pub shared_bytes: usize,
    /// The kernel's parameters.
    pub params: Params,
    /// Whether it may start before earlier kernels have finished, for which every thread has to wait then.
    pub starts_early: bool,
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

/// Bytes of static shared memory of all kernels.
pub fn static_shared_bytes() -> usize {
    // SAFETY: takes nothing, changes nothing.
    unsafe { emulator_static_shared_bytes() }
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

    fn raw(self, grid: &Grid, schedule: Schedule) -> Result<RawGrid, String> {
        let params = &grid.params;
        if params.size() != self.params_size {
            let (given, taken) = (params.size(), self.params_size);
            return Err(format!("{given} bytes of parameters, the kernel takes {taken}"));
        }
        let (schedule, seed) = match schedule {
            Schedule::Forward => (0, 0),
            Schedule::Reverse => (1, 0),
            Schedule::Random { seed } => (2, seed),
        };
        Ok(RawGrid {
            kernel: self.raw.as_ptr(),
            blocks: grid.blocks,
            threads: grid.threads,
            shared_bytes: grid.shared_bytes,
            params: params.words.as_ptr().cast(),
            schedule,
            seed,
            starts_early: grid.starts_early.into(),
        })
    }

    /// Runs a grid; describes what goes wrong.
    ///
    /// # Safety
    /// `params` is what the kernel takes, and what the kernel does with the pointers in it is sound.
    pub unsafe fn launch(self, grid: &Grid, schedule: Schedule) -> Result<(), String> {
        let grid = self.raw(grid, schedule)?;
        // SAFETY: all arguments are as the function wants them; the kernel is the caller's promise.
        described(|message, capacity| unsafe {
            emulator_launch(&grid, std::ptr::null_mut(), message, capacity) == 0
        })
    }

    /// Runs some blocks up to where they wait for earlier kernels. They must not write to `watched`, the memory that the
    /// kernel can reach.
    ///
    /// # Safety
    /// As for [`launch`](Self::launch); `watched` is memory that nobody else uses meanwhile.
    pub unsafe fn start_early<'a>(
        self,
        grid: &'a Grid,
        schedule: Schedule,
        watched: &[Memory],
    ) -> Result<Early<'a>, String> {
        let raw = Box::new(self.raw(grid, schedule)?);
        let mut blocks = None;
        // SAFETY: as above. The grid stays in its box and the parameters in `grid`, as long as there are blocks.
        described(|message, capacity| unsafe {
            let early = emulator_start_early(&*raw, watched.as_ptr(), watched.len(), message, capacity);
            blocks = NonNull::new(early);
            blocks.is_some()
        })?;
        let blocks = blocks.ok_or("no blocks")?;
        Ok(Early { raw, blocks, _grid: PhantomData })
    }
}

/// A grid of which some blocks wait for earlier kernels.
pub struct Early<'a> {
    raw: Box<RawGrid>,
    blocks: NonNull<RawEarly>,
    _grid: PhantomData<&'a Grid>,
}

impl Early<'_> {
    /// Runs all that is left of the grid.
    ///
    /// # Safety
    /// As for [`Kernel::launch`], and this is the thread in which the blocks started.
    pub unsafe fn finish(self) -> Result<(), String> {
        // SAFETY: the grid that the blocks are of; the rest is the caller's promise.
        described(|message, capacity| unsafe {
            emulator_launch(&*self.raw, self.blocks.as_ptr(), message, capacity) == 0
        })
    }
}

impl Drop for Early<'_> {
    fn drop(&mut self) {
        // SAFETY: not dropped before.
        unsafe { emulator_drop_early(self.blocks.as_ptr()) };
    }
}

/// The description that `run` leaves of what went wrong, if it returns false.
fn described(run: impl FnOnce(*mut c_char, usize) -> bool) -> Result<(), String> {
    let mut message = [0u8; 4096];
    if run(message.as_mut_ptr().cast(), message.len()) {
        return Ok(());
    }
    let text = CStr::from_bytes_until_nul(&message).unwrap_or_default();
    Err(text.to_string_lossy().into_owned())
}
