//! A CUDA driver for a machine that has no GPU.
//!
//! The library built from this crate stands in for `libcuda`, `libcublas`, and the others that a
//! CUDA program links. It has four devices, whose memory is memory of the host. A kernel that is launched
//! runs in the emulator of `emulator/`, compiled from the same source as the real one. Work is done when
//! it is submitted, on the thread that submits it, so what real streams might do at the same time
//! happens one after another here, but for this:
//!
//! A kernel launched with programmatic stream serialization starts early. Some of its blocks run up to
//! `griddepcontrol.wait` with memory in which everything is poison that the kernel ahead of it changed, and go on once
//! that is complete. Before its wait a thread must not write to memory, nor let the next kernel start, nor end.
//!
//! A kernel, or a product of cuBLAS, that uses what work of another stream writes, or writes what that reads, without
//! waiting for it by an event or on the host, fails: on a GPU the two may run at the same time.
//!
//! Wrong use is an error, more often than with the real driver: memory of another device or memory that
//! was freed, a block of another size than the kernel's, more shared memory than the card has or the kernel
//! asked for, writes next to an allocation, host synchronization while a stream captures. `cuGetErrorString` gives the last error of a
//! thread in full.
//!
//! `pretend_cuda_calls`, which no real driver has, says how often this thread has called functions of the driver.
//!
//! | variable | |
//! |---|---|
//! | `PRETEND_CUDA_SCHEDULES` | `forward` (default), `reverse`, `random`: the order in which threads and blocks run. `two`: every launch runs in the random one and, by turns, in one of the others; `some`: two of five launches do; `all`: in each of the three; a difference in any bit of device memory is an error |
//! | `PRETEND_CUDA_SEED` | of the random order |
//! | `PRETEND_CUDA_MEMORY` | bytes of each device, 16 GiB if it is not set |
//! | `PRETEND_CUDA_CARD` | KB of shared memory that a block may ask for: `64` (compute capability 7.5), `99` (8.6), `163` (8.0), `227` (9.0, default) |
//! | `PRETEND_CUDA_DRIVER` | the version of CUDA of the driver, 13000 if not set; before 12030 a graph takes no early starts |
//! | `PRETEND_CUDA_KERNELS` | at build time: the folder of the kernels, instead of `cuda/` |
//! | `PRETEND_CUDA_SANITIZE` | at build time: sanitizers for emulator and kernels, such as `address,undefined` |
#![deny(missing_docs, unsafe_op_in_unsafe_fn)]
// The functions of CUDA keep their names and their arguments.
#![allow(non_snake_case, clippy::too_many_arguments)]

pub mod argument;
pub mod calls;
pub mod cublas;
pub mod curand;
pub mod device;
mod edge;
pub mod emulator;
pub mod event;
pub mod graph;
mod handles;
pub mod launch;
pub mod memory;
pub mod module;
pub mod nccl;
mod order;
mod product;
mod schedules;
pub mod status;
pub mod stream;
mod stubs;
pub mod transfer;

/// Defines functions of the driver: what they return is [`status::report`]ed.
macro_rules! driver {
    ($($(#[$meta:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        $(#[$meta])*
        #[no_mangle]
        pub extern "C" fn $name($($argument: $type),*) -> std::ffi::c_int {
            $crate::calls::count(stringify!($name));
            let run = move || -> $crate::status::Result<()> { $body };
            $crate::status::report(stringify!($name), run())
        }
    )*};
}
pub(crate) use driver;
