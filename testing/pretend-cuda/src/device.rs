//! Devices, and which of them a thread works on.

use std::cell::Cell;
use std::env;
use std::ffi::{c_char, c_int, c_uint};
use std::sync::OnceLock;

use crate::argument::Out;
use crate::driver;
use crate::edge;
use crate::handles::Handle;
use crate::memory;
use crate::status::{fail, Result, INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE};
use crate::stream;

/// How many devices there are.
pub const DEVICES: usize = 4;
/// Threads of a block, at most.
pub const MAX_THREADS: u32 = 1024;
/// Bytes of shared memory of a block, unless it asks for more.
pub const SHARED: u32 = 48 << 10;
/// Blocks in each direction of a grid, at most.
pub const MAX_GRID: [u32; 3] = [i32::MAX as u32, 65535, 65535];

/// What differs between cards.
#[derive(Clone, Copy, Debug)]
pub struct Card {
    /// Major and minor.
    pub compute_capability: [u32; 2],
    /// Threads that a multiprocessor holds.
    pub threads: u32,
    /// Blocks that a multiprocessor holds.
    pub blocks: u32,
    /// Bytes of shared memory of a multiprocessor.
    pub shared: u32,
    /// Of these, what the system takes of each block.
    pub reserved: u32,
}

impl Card {
    /// Bytes of shared memory that a block may ask for.
    pub fn shared_of_block(&self) -> u32 {
        self.shared - self.reserved
    }
}

const fn card_of(
    compute_capability: [u32; 2],
    threads: u32,
    blocks: u32,
    shared: u32,
    reserved: u32,
) -> Card {
    Card { compute_capability, threads, blocks, shared: shared << 10, reserved: reserved << 10 }
}

/// By the KB of shared memory that a block may ask for: table 30 of the CUDA C++ Programming Guide.
const CARDS: [(&str, Card); 4] = [
    ("64", card_of([7, 5], 1024, 16, 64, 0)),
    ("99", card_of([8, 6], 1536, 16, 100, 1)),
    ("163", card_of([8, 0], 2048, 32, 164, 1)),
    ("227", card_of([9, 0], 2048, 32, 228, 1)),
];

/// The card that is pretended.
pub fn card() -> Result<Card> {
    static CARD: OnceLock<std::result::Result<Card, String>> = OnceLock::new();
    let from_environment = || {
        let name = env::var("PRETEND_CUDA_CARD").unwrap_or_else(|_| "227".into());
        let found = CARDS.iter().find(|(other, _)| *other == name);
        found
            .map(|(_, card)| *card)
            .ok_or(format!("PRETEND_CUDA_CARD is {name}; it can be 64, 99, 163, or 227"))
    };
    match CARD.get_or_init(from_environment) {
        Ok(card) => Ok(*card),
        Err(message) => fail(INVALID_VALUE, message.clone()),
    }
}

/// Handle of the (primary) context of device 0; the others follow.
const CONTEXT: Handle = 0x100;

thread_local! {
    static CURRENT: Cell<Option<usize>> = const { Cell::new(None) };
}

/// The device that the calling thread works on.
pub fn current() -> Result<usize> {
    match CURRENT.get() {
        Some(device) => Ok(device),
        None => fail(INVALID_CONTEXT, "no context is current on this thread"),
    }
}

fn device(ordinal: c_int) -> Result<usize> {
    match usize::try_from(ordinal) {
        Ok(device) if device < DEVICES => Ok(device),
        _ => fail(INVALID_DEVICE, format!("no device {ordinal}: there are {DEVICES}")),
    }
}

fn context_device(context: Handle) -> Result<usize> {
    match context.checked_sub(CONTEXT) {
        Some(device) if device < DEVICES => Ok(device),
        _ => fail(INVALID_CONTEXT, format!("{context:#x} is no context")),
    }
}

/// Attributes of an H200, or of the card that is pretended; zero for what a launch never asks.
fn attribute(number: c_int) -> Result<c_int> {
    let card = card()?;
    Ok((match number {
        1..=3 => MAX_THREADS,
        4 => 64,
        5 => MAX_GRID[0],
        6 => MAX_GRID[1],
        7 => MAX_GRID[2],
        8 => SHARED,
        10 => 32,         // lanes of a warp
        12 | 82 => 65536, // registers of a block, of a multiprocessor
        13 => 1_980_000,  // clock, kHz
        16 => 6,          // multiprocessors: so few that blocks take turns at small weights, too
        31 => 1,          // concurrent kernels
        36 => 3_201_000,  // memory clock, kHz
        37 => 6144,       // memory bus, bits
        38 => 50 << 20,   // second-level cache
        39 => card.threads,
        41 => 1, // one address space for host and devices
        75 => card.compute_capability[0],
        76 => card.compute_capability[1],
        81 => card.shared,
        97 => card.shared_of_block(),
        106 => card.blocks,
        111 => card.reserved,
        115 => 1, // memory pools
        _ => 0,
    }) as c_int)
}

/// Bytes of memory that each device has.
pub fn memory() -> Result<usize> {
    static BYTES: OnceLock<std::result::Result<usize, String>> = OnceLock::new();
    let from_environment = || match env::var("PRETEND_CUDA_MEMORY") {
        Err(_) => Ok(16 << 30),
        Ok(text) => text.parse().map_err(|_| format!("PRETEND_CUDA_MEMORY is {text}, not a number")),
    };
    match BYTES.get_or_init(from_environment) {
        Ok(bytes) => Ok(*bytes),
        Err(message) => fail(INVALID_VALUE, message.clone()),
    }
}

/// 1000 times the major version of CUDA that the driver belongs to, and 10 times the minor one.
pub fn driver_version() -> Result<c_int> {
    match env::var("PRETEND_CUDA_DRIVER") {
        Err(_) => Ok(13000),
        Ok(text) => text
            .parse()
            .or_else(|_| fail(INVALID_VALUE, format!("PRETEND_CUDA_DRIVER is {text}, not a number"))),
    }
}

driver! {
    /// Nothing to initialize.
    fn cuInit(flags: c_uint) {
        if flags != 0 {
            return fail(INVALID_VALUE, "flags are not zero");
        }
        Ok(())
    }

    /// CUDA 13.0, or as PRETEND_CUDA_DRIVER says.
    fn cuDriverGetVersion(version: Out<c_int>) {
        version.set(driver_version()?)
    }

    /// How many devices there are.
    fn cuDeviceGetCount(count: Out<c_int>) {
        count.set(DEVICES as c_int)
    }

    /// A device is its ordinal.
    fn cuDeviceGet(result: Out<c_int>, ordinal: c_int) {
        device(ordinal)?;
        result.set(ordinal)
    }

    /// The name, cut to `capacity` with its zero.
    fn cuDeviceGetName(name: Out<c_char>, capacity: c_int, ordinal: c_int) {
        let text = format!("pretend GPU {}", device(ordinal)?);
        let Some(room) = usize::try_from(capacity).ok().and_then(|n| n.checked_sub(1)) else {
            return fail(INVALID_VALUE, "no room for a name");
        };
        let bytes: Vec<c_char> = text.bytes().take(room).chain([0]).map(|byte| byte as c_char).collect();
        name.set_all(&bytes)
    }

    /// A number that no other device has.
    fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, ordinal: c_int) {
        uuid.set([device(ordinal)? as u8 + 1; 16])
    }

    /// Bytes of memory.
    fn cuDeviceTotalMem_v2(bytes: Out<usize>, ordinal: c_int) {
        device(ordinal)?;
        bytes.set(memory()?)
    }

    /// Attributes, by the numbers of `CUdevice_attribute`.
    fn cuDeviceGetAttribute(value: Out<c_int>, number: c_int, ordinal: c_int) {
        device(ordinal)?;
        value.set(attribute(number)?)
    }

    /// Devices reach each other's memory only by copies.
    fn cuDeviceCanAccessPeer(possible: Out<c_int>, from: c_int, to: c_int) {
        device(from)?;
        device(to)?;
        possible.set(0)
    }

    /// The one context of a device.
    fn cuDevicePrimaryCtxRetain(context: Out<Handle>, ordinal: c_int) {
        context.set(CONTEXT + device(ordinal)?)
    }

    /// The context stays.
    fn cuDevicePrimaryCtxRelease_v2(ordinal: c_int) {
        device(ordinal).map(drop)
    }

    /// Makes a context, or none, current on this thread.
    fn cuCtxSetCurrent(context: Handle) {
        CURRENT.set(if context == 0 { None } else { Some(context_device(context)?) });
        Ok(())
    }

    /// The context that is current on this thread, or null.
    fn cuCtxGetCurrent(context: Out<Handle>) {
        context.set(CURRENT.get().map_or(0, |device| CONTEXT + device))
    }

    /// The device that is current on this thread.
    fn cuCtxGetDevice(result: Out<c_int>) {
        result.set(current()? as c_int)
    }

    /// Everything submitted is done already.
    fn cuCtxSynchronize() {
        let device = current()?;
        stream::forbid_while_capturing(device, "cuCtxSynchronize")?;
        edge::host_waited(device);
        Ok(())
    }

    /// Priorities mean nothing.
    fn cuCtxGetStreamPriorityRange(least: Out<c_int>, greatest: Out<c_int>) {
        current()?;
        least.set_if_wanted(0)?;
        greatest.set_if_wanted(-5)
    }

    /// Bytes that are free, and all.
    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        free.set(memory()?.saturating_sub(memory::used(current()?)))?;
        total.set(memory()?)
    }
}
