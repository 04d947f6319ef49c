//! Modules and functions. Whatever a module's image is, its kernels are those compiled for the emulator.

use std::ffi::{c_int, c_uint};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::argument::{In, Out, Text};
use crate::device::{self, Card, MAX_THREADS, SHARED};
use crate::driver;
use crate::emulator::{self, Kernel};
use crate::handles::{Handle, Handles};
use crate::status::{fail, Result, INVALID_VALUE, NOT_FOUND, NOT_SUPPORTED};

struct Module {
    device: usize,
}

/// A kernel on a device.
pub struct Function {
    /// Its name.
    pub name: String,
    /// Its code.
    pub kernel: Kernel,
    /// Where its module was loaded.
    pub device: usize,
    max_shared: AtomicU32,
}

impl Function {
    /// Bytes of dynamic shared memory allowed by attribute.
    pub fn max_shared(&self) -> u32 {
        self.max_shared.load(Ordering::Relaxed)
    }
}

static MODULES: Handles<Module> = Handles::new("module");
/// Every function that was asked for.
pub static FUNCTIONS: Handles<Function> = Handles::new("function");

const MAX_THREADS_PER_BLOCK: c_int = 0;
const NUM_REGS: c_int = 4;
const PTX_VERSION: c_int = 5;
const BINARY_VERSION: c_int = 6;
const MAX_DYNAMIC_SHARED_SIZE_BYTES: c_int = 8;
const PREFERRED_SHARED_MEMORY_CARVEOUT: c_int = 9;

/// A module is refused if kernels have static shared memory: with that, a launch that asks for all that a block can have
/// would fail on a GPU, and which kernels have how much is not known here.
fn load(module: Out<Handle>) -> Result<()> {
    let bytes = emulator::static_shared_bytes();
    if bytes > 0 {
        return fail(NOT_SUPPORTED, format!("{bytes} bytes of static shared memory: all has to be dynamic"));
    }
    module.set(MODULES.insert(Module { device: device::current()? }))
}

fn resident_blocks(card: Card, threads: c_int, shared_bytes: usize) -> c_int {
    let by_threads = card.threads / threads.max(1) as u32;
    let by_shared = card.shared as usize / (shared_bytes + card.reserved as usize).max(1);
    by_threads.min(by_shared as u32).min(card.blocks) as c_int
}

driver! {
    /// Accepts any image.
    fn cuModuleLoadData(module: Out<Handle>, _image: In<u8>) {
        load(module)
    }

    /// Accepts any image.
    fn cuModuleLoadDataEx(
        module: Out<Handle>,
        _image: In<u8>,
        _options: c_uint,
        _names: In<c_int>,
        _values: In<u8>,
    ) {
        load(module)
    }

    /// Accepts any image.
    fn cuModuleLoadFatBinary(module: Out<Handle>, _image: In<u8>) {
        load(module)
    }

    /// The kernels stay.
    fn cuModuleUnload(module: Handle) {
        MODULES.remove(module).map(drop)
    }

    /// A kernel of the emulator.
    fn cuModuleGetFunction(function: Out<Handle>, module: Handle, name: Text) {
        let device = MODULES.get(module)?.device;
        let name = name.get()?;
        let Some(kernel) = Kernel::find(name) else {
            return fail(NOT_FOUND, format!("no kernel `{}` was compiled for the emulator", name.to_string_lossy()));
        };
        let name = name.to_string_lossy().into_owned();
        function.set(FUNCTIONS.insert(Function { name, kernel, device, max_shared: AtomicU32::new(SHARED) }))
    }

    /// Attributes, by the numbers of `CUfunction_attribute`.
    fn cuFuncGetAttribute(value: Out<c_int>, attribute: c_int, function: Handle) {
        let function = FUNCTIONS.get(function)?;
        value.set(match attribute {
            MAX_THREADS_PER_BLOCK if function.kernel.threads == 0 => MAX_THREADS as c_int,
            MAX_THREADS_PER_BLOCK => function.kernel.threads as c_int,
            NUM_REGS => (65536 / function.kernel.threads.max(1)).min(255) as c_int,
            PTX_VERSION | BINARY_VERSION => {
                let [major, minor] = device::card()?.compute_capability;
                (10 * major + minor) as c_int
            }
            MAX_DYNAMIC_SHARED_SIZE_BYTES => function.max_shared() as c_int,
            _ => 0,
        })
    }

    /// Only shared memory can be changed.
    fn cuFuncSetAttribute(function: Handle, attribute: c_int, value: c_int) {
        let function = FUNCTIONS.get(function)?;
        let most = device::card()?.shared_of_block();
        match (attribute, u32::try_from(value)) {
            (MAX_DYNAMIC_SHARED_SIZE_BYTES, Ok(bytes)) if bytes <= most => {
                function.max_shared.store(bytes, Ordering::Relaxed);
                Ok(())
            }
            (MAX_DYNAMIC_SHARED_SIZE_BYTES, _) => {
                fail(INVALID_VALUE, format!("{value} bytes of shared memory: a block can have {most}"))
            }
            (PREFERRED_SHARED_MEMORY_CARVEOUT, _) => Ok(()),
            _ => fail(NOT_SUPPORTED, format!("attribute {attribute} of a function")),
        }
    }

    /// Caches mean nothing.
    fn cuFuncSetCacheConfig(function: Handle, _config: c_int) {
        FUNCTIONS.get(function).map(drop)
    }

    /// Blocks that a multiprocessor holds, by threads and shared memory.
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: Out<c_int>,
        function: Handle,
        threads: c_int,
        shared_bytes: usize,
    ) {
        FUNCTIONS.get(function)?;
        blocks.set(resident_blocks(device::card()?, threads, shared_bytes))
    }

    /// The same.
    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        blocks: Out<c_int>,
        function: Handle,
        threads: c_int,
        shared_bytes: usize,
        _flags: c_uint,
    ) {
        FUNCTIONS.get(function)?;
        blocks.set(resident_blocks(device::card()?, threads, shared_bytes))
    }

    /// Shared memory that each of `blocks` on a multiprocessor can have.
    fn cuOccupancyAvailableDynamicSMemPerBlock(
        shared_bytes: Out<usize>,
        function: Handle,
        blocks: c_int,
        _threads: c_int,
    ) {
        FUNCTIONS.get(function)?;
        let card = device::card()?;
        let share = card.shared / blocks.max(1) as u32;
        shared_bytes.set(share.saturating_sub(card.reserved).min(card.shared_of_block()) as usize)
    }
}
