//! What lies between a kernel and the next one in its stream.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::device::DEVICES;
use crate::memory::{self, Region, POISON};
use crate::order::{self, Order};
use crate::status::Result;

/// How often the host waited for all work of a device.
static WAITS: [AtomicU64; DEVICES] = [const { AtomicU64::new(0) }; DEVICES];

/// From here on no kernel of the device starts before an earlier one has finished: the host waited for those.
pub fn host_waited(device: usize) {
    WAITS[device].fetch_add(1, Ordering::Relaxed);
    order::host_waited(device);
}

/// The work before the next kernel of a stream, if that is a kernel: what it changed, with the bytes before.
pub struct Edge {
    device: usize,
    waits: u64,
    changed: Vec<(Region, Vec<u8>)>,
    /// The work of this stream and that of others.
    pub order: Order,
}

/// The bytes of live regions that a kernel changed, while they are hidden.
pub struct Hidden(Vec<(Region, Vec<u8>)>);

/// A copy of each region.
pub fn copies(regions: &[Region]) -> Vec<Vec<u8>> {
    // SAFETY: the regions were just found live; a program that frees or writes them in another thread, while
    // it uses them in a launch, is wrong on a GPU too.
    regions.iter().map(|region| unsafe { region.bytes() }.to_vec()).collect()
}

impl Edge {
    /// Of a stream in which nothing runs.
    pub fn new(device: usize) -> Self {
        Self { device, waits: 0, changed: Vec::new(), order: Order::new(device) }
    }

    /// Work that is no kernel: what comes next starts after it.
    pub fn cut(&mut self) {
        self.changed.clear();
    }

    /// A kernel ran, before which `regions` held `before`.
    pub fn ran(&mut self, regions: &[Region], before: Vec<Vec<u8>>) -> Result<()> {
        self.changed.clear();
        self.waits = WAITS[self.device].load(Ordering::Relaxed);
        for (region, before) in regions.iter().copied().zip(before) {
            // SAFETY: as in `copies`.
            let writes = unsafe { region.bytes() != before.as_slice() };
            self.order.uses(region, writes)?;
            if writes {
                self.changed.push((region, before));
            }
        }
        Ok(())
    }

    /// Memory as a kernel may find it that starts before the one ahead of it has finished: of what that changes,
    /// nothing can be relied on.
    pub fn hide(&self) -> Hidden {
        let mut hidden = Vec::new();
        if self.waits != WAITS[self.device].load(Ordering::Relaxed) {
            return Hidden(hidden);
        }
        for (region, before) in &self.changed {
            // What was freed since is poison already.
            if !memory::is_live(*region) {
                continue;
            }
            // SAFETY: the region is live. Who else may use it waits for the kernel that wrote it, by an event or on the
            // host, either of which cuts the edge.
            let bytes = unsafe { region.bytes_mut() };
            hidden.push((*region, bytes.to_vec()));
            for ((byte, before), poison) in bytes.iter_mut().zip(before).zip(POISON.iter().cycle()) {
                if byte != before {
                    *byte = *poison;
                }
            }
        }
        Hidden(hidden)
    }
}

impl Hidden {
    /// The kernel ahead has finished.
    pub fn show(self) {
        for (region, bytes) in self.0 {
            // SAFETY: as in `hide`; nothing ran meanwhile that frees memory.
            unsafe { region.bytes_mut() }.copy_from_slice(&bytes);
        }
    }
}
