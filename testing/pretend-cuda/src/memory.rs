//! Memory of the devices, which is memory of the host.
//!
//! Fresh memory holds NaN in every format. Freed memory is filled with NaN and kept for a while, so that
//! a pointer to it is recognized. Guards on both sides of an allocation are checked after each launch.

use std::alloc::{alloc, dealloc, Layout};
use std::collections::{BTreeMap, VecDeque};
use std::slice;
use std::sync::Mutex;

use crate::device::{self, DEVICES};
use crate::handles::lock;
use crate::order;
use crate::status::{fail, Result, ILLEGAL_ADDRESS, INVALID_VALUE, OUT_OF_MEMORY};

/// Alignment of every allocation.
const ALIGNMENT: usize = 256;
/// Bytes before and after an allocation. AddressSanitizer has its own.
const GUARD: usize = if cfg!(address_sanitizer) { 0 } else { ALIGNMENT };
/// A NaN in half, bfloat16, and float.
pub const POISON: [u8; 2] = [0xff, 0x7f];
/// Bytes of freed memory that are kept.
const KEPT: usize = 64 << 20;

/// Whose memory it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// A device.
    Device(usize),
    /// The host: pinned memory.
    Host,
}

impl std::fmt::Display for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Owner::Device(device) => write!(f, "memory of device {device}"),
            Owner::Host => write!(f, "pinned memory"),
        }
    }
}

/// A range of addresses: one allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Its first address.
    pub base: u64,
    /// Its bytes.
    pub size: usize,
    /// Whose it is.
    pub owner: Owner,
}

impl Region {
    /// Its bytes.
    ///
    /// # Safety
    /// The region is live and stays so, and nothing writes to it meanwhile.
    pub unsafe fn bytes<'a>(self) -> &'a [u8] {
        // SAFETY: an allocation of this size, initialized with poison; the rest is the caller's promise.
        unsafe { slice::from_raw_parts(self.base as *const u8, self.size) }
    }

    /// Its bytes.
    ///
    /// # Safety
    /// The region is live and stays so, and nothing else uses it meanwhile.
    pub unsafe fn bytes_mut<'a>(self) -> &'a mut [u8] {
        // SAFETY: as for `bytes`.
        unsafe { slice::from_raw_parts_mut(self.base as *mut u8, self.size) }
    }

    fn end(self) -> u64 {
        self.base + self.size as u64
    }

    fn guards(self) -> [Region; 2] {
        let guard = |base| Region { base, size: GUARD, owner: self.owner };
        [guard(self.base - GUARD as u64), guard(self.end())]
    }
}

struct Allocation {
    region: Region,
    freed: bool,
    /// Lives and dies as often as a graph wants it to.
    of_graph: bool,
}

#[derive(Default)]
struct Memory {
    allocations: BTreeMap<u64, Allocation>,
    used: [usize; DEVICES],
    freed: VecDeque<Region>,
    freed_bytes: usize,
}

static MEMORY_OF_ALL: Mutex<Memory> = Mutex::new(Memory {
    allocations: BTreeMap::new(),
    used: [0; DEVICES],
    freed: VecDeque::new(),
    freed_bytes: 0,
});

fn fill(bytes: &mut [u8]) {
    for (byte, poison) in bytes.iter_mut().zip(POISON.iter().cycle()) {
        *byte = *poison;
    }
}

/// Each on its own: an odd size would shift the pattern.
fn fill_guards(region: Region) {
    for guard in region.guards() {
        // SAFETY: the region is allocated, so are its guards; they are not for anyone else to use.
        fill(unsafe { guard.bytes_mut() });
    }
}

fn intact(guard: &[u8]) -> bool {
    guard.iter().zip(POISON.iter().cycle()).all(|(byte, poison)| byte == poison)
}

fn layout(size: usize) -> Result<Layout> {
    match size.checked_add(2 * GUARD).map(|bytes| Layout::from_size_align(bytes, ALIGNMENT)) {
        Some(Ok(layout)) => Ok(layout),
        _ => fail(OUT_OF_MEMORY, format!("{size} bytes are too many")),
    }
}

/// Memory of `size` bytes.
pub fn allocate(owner: Owner, size: usize) -> Result<u64> {
    if size == 0 {
        return fail(INVALID_VALUE, "an allocation of no bytes");
    }
    let layout = layout(size)?;
    let mut memory = lock(&MEMORY_OF_ALL);
    if let Owner::Device(device) = owner {
        let used = memory.used[device];
        let left = device::memory()?.saturating_sub(used);
        if size > left {
            return fail(OUT_OF_MEMORY, format!("{size} bytes: device {device} has {left} left"));
        }
        memory.used[device] += size;
    }
    // SAFETY: the layout is not empty.
    let start = unsafe { alloc(layout) };
    if start.is_null() {
        return fail(OUT_OF_MEMORY, format!("the host has no {size} bytes left"));
    }
    // SAFETY: memory just allocated with this size.
    fill(unsafe { slice::from_raw_parts_mut(start, layout.size()) });
    let region = Region { base: (start as usize + GUARD) as u64, size, owner };
    fill_guards(region);
    order::forget(region.base);
    memory.allocations.insert(region.base, Allocation { region, freed: false, of_graph: false });
    Ok(region.base)
}

impl Memory {
    fn find(&self, address: u64) -> Option<&Allocation> {
        let (_, allocation) = self.allocations.range(..=address).next_back()?;
        (address < allocation.region.end()).then_some(allocation)
    }

    fn live(&self, address: u64, what: &str) -> Result<Region> {
        match self.find(address) {
            Some(Allocation { region, freed: false, .. }) => Ok(*region),
            Some(Allocation { region, freed: true, .. }) => {
                fail(ILLEGAL_ADDRESS, format!("{what} is {} that was freed ({address:#x})", region.owner))
            }
            None => fail(ILLEGAL_ADDRESS, format!("{what} is no memory of a device ({address:#x})")),
        }
    }

    /// Keeps a region that was freed for a while.
    fn retire(&mut self, region: Region) {
        if let Owner::Device(device) = region.owner {
            self.used[device] -= region.size;
        }
        self.freed_bytes += region.size;
        self.freed.push_back(region);
        while self.freed_bytes > KEPT {
            let Some(oldest) = self.freed.pop_front() else { break };
            self.freed_bytes -= oldest.size;
            self.allocations.remove(&oldest.base);
            if let Ok(layout) = layout(oldest.size) {
                // SAFETY: allocated with this layout, and no longer known to anyone.
                unsafe { dealloc((oldest.base as usize - GUARD) as *mut u8, layout) };
            }
        }
    }
}

/// Gives memory back.
pub fn free(address: u64) -> Result<()> {
    let mut memory = lock(&MEMORY_OF_ALL);
    let region = memory.live(address, "what is to be freed")?;
    let Some(allocation) = memory.allocations.get_mut(&address) else {
        return fail(INVALID_VALUE, format!("{address:#x} is not the start of an allocation"));
    };
    allocation.freed = true;
    let of_graph = allocation.of_graph;
    let result = check_guards_of(region);
    // SAFETY: the region was live, and its owner has no more use for it.
    fill(unsafe { region.bytes_mut() });
    if !of_graph {
        memory.retire(region);
    }
    result
}

/// Memory of a graph: an address at which there is nothing until [`revive`].
pub fn reserve(device: usize, size: usize) -> Result<u64> {
    let address = allocate(Owner::Device(device), size)?;
    if let Some(allocation) = lock(&MEMORY_OF_ALL).allocations.get_mut(&address) {
        (allocation.freed, allocation.of_graph) = (true, true);
    }
    Ok(address)
}

/// Allocates what was reserved.
pub fn revive(address: u64) -> Result<()> {
    match lock(&MEMORY_OF_ALL).allocations.get_mut(&address) {
        Some(allocation) if allocation.freed && allocation.of_graph => {
            allocation.freed = false;
            order::forget(address);
            Ok(())
        }
        _ => fail(INVALID_VALUE, "memory of a graph is allocated already"),
    }
}

/// Whether what was reserved is allocated.
pub fn is_revived(address: u64) -> bool {
    lock(&MEMORY_OF_ALL).allocations.get(&address).is_some_and(|allocation| !allocation.freed)
}

/// Gives back what was reserved. What is allocated stays so until it is freed.
pub fn release(address: u64) {
    let mut memory = lock(&MEMORY_OF_ALL);
    if let Some(allocation) = memory.allocations.get_mut(&address) {
        allocation.of_graph = false;
        let (region, freed) = (allocation.region, allocation.freed);
        if freed {
            memory.retire(region);
        }
    }
}

/// The live allocation that `bytes` bytes at `address` lie in; `what` is for messages.
pub fn check(address: u64, bytes: usize, what: &str) -> Result<Region> {
    let region = lock(&MEMORY_OF_ALL).live(address, what)?;
    let left = (region.end() - address) as usize;
    if bytes > left {
        let message = format!("{what}: {bytes} bytes, but the allocation ends after {left}");
        return fail(ILLEGAL_ADDRESS, message);
    }
    Ok(region)
}

/// The allocation of `address`, if it lies in one: an error if that was freed.
pub fn allocation_at(address: u64, what: &str) -> Result<Option<Region>> {
    let memory = lock(&MEMORY_OF_ALL);
    match memory.find(address) {
        Some(_) => memory.live(address, what).map(Some),
        None => Ok(None),
    }
}

/// Whether this very allocation is live.
pub fn is_live(region: Region) -> bool {
    let memory = lock(&MEMORY_OF_ALL);
    memory.allocations.get(&region.base).is_some_and(|found| !found.freed && found.region == region)
}

/// Whether host memory at `address` is pinned.
pub fn is_pinned(address: u64) -> bool {
    let memory = lock(&MEMORY_OF_ALL);
    memory.find(address).is_some_and(|found| !found.freed && found.region.owner == Owner::Host)
}

/// Bytes allocated on a device.
pub fn used(device: usize) -> usize {
    lock(&MEMORY_OF_ALL).used[device]
}

fn check_guards_of(region: Region) -> Result<()> {
    for (guard, side) in region.guards().into_iter().zip(["before", "after"]) {
        // SAFETY: the region is live, so are its guards; they are not for anyone to write.
        if !intact(unsafe { guard.bytes() }) {
            let message =
                format!("overrun: bytes {side} an allocation of {} bytes were written", region.size);
            return fail(ILLEGAL_ADDRESS, message);
        }
    }
    Ok(())
}

/// An error if anything was written next to one of `regions`, which are live. It is told once.
pub fn check_guards(regions: &[Region]) -> Result<()> {
    for region in regions {
        let result = check_guards_of(*region);
        if result.is_err() {
            fill_guards(*region);
            return result;
        }
    }
    Ok(())
}
