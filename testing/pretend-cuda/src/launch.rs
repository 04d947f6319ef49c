//! Launching kernels.

use std::ffi::{c_int, c_uint};
use std::sync::Arc;

use crate::argument::In;
use crate::device::{self, MAX_GRID, MAX_THREADS, SHARED};
use crate::driver;
use crate::edge::Edge;
use crate::emulator::{Grid, Kernel, Memory, Params, Schedule, PARAM_SLOT};
use crate::handles::Handle;
use crate::memory::{self, Owner, Region};
use crate::module::{Function, FUNCTIONS};
use crate::schedules;
use crate::status::{
    fail, Result, ILLEGAL_ADDRESS, INVALID_HANDLE, INVALID_VALUE, LAUNCH_FAILED, NOT_SUPPORTED,
};
use crate::stream::{self, Work};

/// A kernel with everything it is launched with.
pub struct Launch {
    function: Arc<Function>,
    grid: Grid,
}

impl Launch {
    /// Checks what the driver checks.
    fn new(function: Arc<Function>, grid: Grid) -> Result<Self> {
        let Grid { blocks, threads: block, shared_bytes, .. } = &grid;
        let threads = block.iter().try_fold(1u32, |product, n| product.checked_mul(*n));
        let takes_any = function.kernel.threads == 0;
        if !threads.is_some_and(|n| {
            if takes_any {
                (1..=MAX_THREADS).contains(&n)
            } else {
                n == function.kernel.threads
            }
        }) {
            let message =
                format!("blocks of {block:?} threads, the kernel is for {}", function.kernel.threads);
            return fail(INVALID_VALUE, format!("kernel `{}`: {message}", function.name));
        }
        if blocks.iter().zip(MAX_GRID).any(|(n, most)| *n == 0 || *n > most) {
            let message = format!("a grid of {blocks:?} blocks: at least 1, at most {MAX_GRID:?}");
            return fail(INVALID_VALUE, format!("kernel `{}`: {message}", function.name));
        }
        let most = function.max_shared().max(SHARED);
        if *shared_bytes > most as usize {
            let message =
                format!("{shared_bytes} bytes of shared memory, {most} are allowed: set the attribute");
            return fail(INVALID_VALUE, format!("kernel `{}`: {message}", function.name));
        }
        Ok(Self { function, grid })
    }

    /// The kernel's name.
    pub fn name(&self) -> &str {
        &self.function.name
    }

    /// The region, by the first parameter that points into it.
    pub fn describe(&self, region: Region) -> String {
        let in_region = |word: u64| word.wrapping_sub(region.base) < region.size as u64;
        let offset =
            self.grid.params.words().find(|(_, word)| in_region(*word)).map_or(0, |(offset, _)| offset);
        format!("the {} bytes that the parameter at offset {offset} points to", region.size)
    }

    /// The allocations that parameters point to. Kernels get at memory in no other way.
    fn touched(&self) -> Result<Vec<Region>> {
        let mut regions: Vec<Region> = Vec::new();
        for (offset, word) in self.grid.params.words() {
            let what = format!("kernel `{}`: the parameter at offset {offset}", self.name());
            let Some(region) = memory::allocation_at(word, &what)? else { continue };
            let here = Owner::Device(self.function.device);
            if region.owner != here && region.owner != Owner::Host {
                return fail(
                    ILLEGAL_ADDRESS,
                    format!("{what} is {}, the kernel runs on {here:?}", region.owner),
                );
            }
            if !regions.contains(&region) {
                regions.push(region);
            }
        }
        Ok(regions)
    }

    fn failed(&self, message: String, schedule: Schedule) -> Result<()> {
        fail(LAUNCH_FAILED, format!("{message} [{schedule:?}]"))
    }

    /// Whether the kernel is one of candle's: those take several parameters.
    pub fn is_of_candle(&self) -> bool {
        !self.function.kernel.param_sizes.is_empty()
    }

    /// Runs the grid once.
    pub fn run(&self, schedule: Schedule) -> Result<()> {
        // SAFETY: the caller of the driver gave the kernel's parameter struct; pointers to memory of devices
        // were found live.
        let result = unsafe { self.function.kernel.launch(&self.grid, schedule) };
        result.or_else(|message| self.failed(message, schedule))
    }

    /// Runs the grid once, after the work that `edge` stands for. If it may start early, some blocks do.
    pub fn run_after(&self, schedule: Schedule, touched: &[Region], edge: &Edge) -> Result<()> {
        if !self.grid.starts_early {
            return self.run(schedule);
        }
        let watched = |region: &Region| Memory { start: region.base as *mut u8, size: region.size };
        let watched: Vec<_> = touched.iter().map(watched).collect();
        let hidden = edge.hide();
        // SAFETY: as above.
        let early = unsafe { self.function.kernel.start_early(&self.grid, schedule, &watched) };
        hidden.show();
        // SAFETY: as above.
        early.and_then(|early| unsafe { early.finish() }).or_else(|message| self.failed(message, schedule))
    }

    /// Runs it in every order asked for.
    fn execute(&self, edge: &mut Edge) -> Result<()> {
        let touched = self.touched()?;
        schedules::run(self, &touched, edge)?;
        memory::check_guards(&touched)
            .or_else(|error| fail(error.code(), format!("kernel `{}`: {}", self.name(), error.message())))
    }
}

/// The parameter struct, or several parameters in slots.
fn parameter_bytes(kernel: &Kernel, params: In<In<u8>>) -> Result<Vec<u8>> {
    let read = |i: usize, bytes: &mut [u8]| {
        let from = params.get(i)?;
        bytes.iter_mut().enumerate().try_for_each(|(i, byte)| from.get(i).map(|value| *byte = value))
    };
    let mut bytes = vec![0; kernel.params_size];
    if kernel.param_sizes.is_empty() {
        read(0, &mut bytes)?;
    }
    for (i, (slot, size)) in bytes.chunks_mut(PARAM_SLOT).zip(kernel.param_sizes).enumerate() {
        read(i, &mut slot[..*size])?;
    }
    Ok(bytes)
}

fn launch(
    function: Handle,
    [blocks, threads]: [[u32; 3]; 2],
    shared_bytes: u32,
    starts_early: bool,
    stream: Handle,
    params: In<In<u8>>,
    extra: In<u8>,
) -> Result<()> {
    let function = FUNCTIONS.get(function)?;
    let stream = stream::find(stream)?;
    if function.device != stream.device {
        let message = format!("kernel `{}` was loaded on device {}", function.name, function.device);
        return fail(INVALID_HANDLE, format!("{message}, the stream is of device {}", stream.device));
    }
    if !extra.is_null() {
        return fail(NOT_SUPPORTED, "parameters in a buffer (`extra`)");
    }
    if starts_early && stream.capture_id().is_some() && device::driver_version()? < EARLY_START_IN_GRAPHS {
        return fail(NOT_SUPPORTED, "programmatic stream serialization in a graph, before CUDA 12.3");
    }
    let bytes = parameter_bytes(&function.kernel, params)?;
    let (shared_bytes, params) = (shared_bytes as usize, Params::new(&bytes));
    let launch = Launch::new(function, Grid { blocks, threads, shared_bytes, params, starts_early })?;
    stream.submit(Work::of_kernels(move |edge| launch.execute(edge)))
}

/// `CUlaunchConfig`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LaunchConfig {
    /// Blocks.
    pub grid: [c_uint; 3],
    /// Threads of a block.
    pub block: [c_uint; 3],
    /// Bytes of dynamic shared memory.
    pub shared_bytes: c_uint,
    /// Where to launch.
    pub stream: Handle,
    /// Attributes.
    pub attributes: In<LaunchAttribute>,
    /// How many.
    pub attribute_count: c_uint,
}

/// `CUlaunchAttribute`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LaunchAttribute {
    /// Which.
    pub id: c_int,
    /// Nothing.
    pub pad: [u8; 4],
    /// A union.
    pub value: [u64; 8],
}

/// Attributes that change nothing here: none, synchronization policy, priority.
const HARMLESS_ATTRIBUTES: [c_int; 3] = [0, 3, 8];
/// It may start before earlier kernels have finished.
const PROGRAMMATIC_STREAM_SERIALIZATION: c_int = 6;
/// The first driver that captures it: CUDA 12.3.
const EARLY_START_IN_GRAPHS: c_int = 12030;

driver! {
    /// Launches a kernel.
    fn cuLaunchKernel(
        function: Handle,
        grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared_bytes: c_uint,
        stream: Handle,
        params: In<In<u8>>,
        extra: In<u8>,
    ) {
        let shape = [[grid_x, grid_y, grid_z], [block_x, block_y, block_z]];
        launch(function, shape, shared_bytes, false, stream, params, extra)
    }

    /// Launches a kernel with attributes.
    fn cuLaunchKernelEx(config: In<LaunchConfig>, function: Handle, params: In<In<u8>>, extra: In<u8>) {
        let config = config.get(0)?;
        let mut starts_early = false;
        for i in 0..config.attribute_count as usize {
            let LaunchAttribute { id, value, .. } = config.attributes.get(i)?;
            if id == PROGRAMMATIC_STREAM_SERIALIZATION {
                // An `int` at the start of the union.
                starts_early = value[0] as u32 != 0;
            } else if !HARMLESS_ATTRIBUTES.contains(&id) {
                return fail(NOT_SUPPORTED, format!("launch attribute {id}"));
            }
        }
        let shape = [config.grid, config.block];
        launch(function, shape, config.shared_bytes, starts_early, config.stream, params, extra)
    }
}
