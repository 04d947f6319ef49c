//! Allocating, copying, and filling memory.

use std::ffi::{c_uchar, c_uint, c_ushort};
use std::{ptr, slice};

use crate::argument::{Host, Out};
use crate::device;
use crate::driver;
use crate::edge;
use crate::handles::Handle;
use crate::memory::{self, Owner};
use crate::status::{fail, Result, INVALID_VALUE, NOT_SUPPORTED};
use crate::stream::{self, Work};

/// An address, of the host or of a device.
type Address = u64;

fn copy(to: Address, from: Address, bytes: usize) {
    // SAFETY: device memory was checked to hold `bytes`; the caller of the driver promised that of host memory.
    unsafe { ptr::copy(from as *const u8, to as *mut u8, bytes) };
}

/// Which ends of a copy are on a device.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    HostToDevice,
    DeviceToHost,
    DeviceToDevice,
}

#[derive(Clone, Copy)]
struct Copy {
    direction: Direction,
    to: Address,
    from: Address,
    bytes: usize,
}

impl Copy {
    fn run(self) -> Result<()> {
        if self.bytes == 0 {
            return Ok(());
        }
        if self.direction != Direction::DeviceToHost {
            memory::check(self.to, self.bytes, "what is copied to")?;
        } else if self.to == 0 {
            return fail(INVALID_VALUE, "a copy to null");
        }
        if self.direction != Direction::HostToDevice {
            memory::check(self.from, self.bytes, "what is copied from")?;
        } else if self.from == 0 {
            return fail(INVALID_VALUE, "a copy from null");
        }
        copy(self.to, self.from, self.bytes);
        Ok(())
    }

    /// Whether memory of the host takes part that may be gone later.
    fn is_pageable(self) -> bool {
        match self.direction {
            Direction::HostToDevice => !memory::is_pinned(self.from),
            Direction::DeviceToHost => !memory::is_pinned(self.to),
            Direction::DeviceToDevice => false,
        }
    }

    /// A capture takes any copy, and the memory of the host is as it is. A graph with a copy that may touch what is gone is
    /// not launched here.
    fn submit(self, stream: Handle) -> Result<()> {
        let stream = stream::find(stream)?;
        if stream.capture_id().is_some() && self.is_pageable() {
            let message = "a graph copies from or to pageable host memory";
            return stream.submit(Work::new(move || fail(NOT_SUPPORTED, message)));
        }
        stream.submit(Work::new(move || self.run()))?;
        if self.direction == Direction::DeviceToHost && !memory::is_pinned(self.to) {
            stream.host_waited();
        }
        Ok(())
    }

    fn run_now(self, function: &str) -> Result<()> {
        let device = device::current()?;
        stream::forbid_in_capture(function)?;
        edge::host_waited(device);
        self.run()
    }
}

/// A pattern of some bytes, so many times.
#[derive(Clone, Copy)]
struct Fill<const N: usize> {
    to: Address,
    pattern: [u8; N],
    count: usize,
}

impl<const N: usize> Fill<N> {
    fn run(self) -> Result<()> {
        if self.count == 0 {
            return Ok(());
        }
        let Some(bytes) = self.count.checked_mul(N) else { return fail(INVALID_VALUE, "too many bytes") };
        memory::check(self.to, bytes, "what is filled")?;
        // SAFETY: device memory that was just checked to hold this many bytes.
        let memory = unsafe { slice::from_raw_parts_mut(self.to as *mut [u8; N], self.count) };
        memory.fill(self.pattern);
        Ok(())
    }

    fn submit(self, stream: Handle) -> Result<()> {
        stream::find(stream)?.submit(Work::new(move || self.run()))
    }

    fn run_now(self, function: &str) -> Result<()> {
        let device = device::current()?;
        stream::forbid_in_capture(function)?;
        edge::host_waited(device);
        self.run()
    }
}

use Direction::{DeviceToDevice, DeviceToHost, HostToDevice};

driver! {
    /// Memory of the current device.
    fn cuMemAlloc_v2(address: Out<Address>, bytes: usize) {
        stream::forbid_in_capture("cuMemAlloc")?;
        address.set(memory::allocate(Owner::Device(device::current()?), bytes)?)
    }

    /// Memory of the stream's device; of the graph, while capturing.
    fn cuMemAllocAsync(address: Out<Address>, bytes: usize, stream: Handle) {
        address.set(stream::find(stream)?.allocate(bytes)?)
    }

    /// Pinned memory.
    fn cuMemHostAlloc(address: Out<Address>, bytes: usize, _flags: c_uint) {
        stream::forbid_in_capture("cuMemHostAlloc")?;
        address.set(memory::allocate(Owner::Host, bytes)?)
    }

    /// Pinned memory.
    fn cuMemAllocHost_v2(address: Out<Address>, bytes: usize) {
        stream::forbid_in_capture("cuMemAllocHost")?;
        address.set(memory::allocate(Owner::Host, bytes)?)
    }

    /// Frees memory, after everything submitted.
    fn cuMemFree_v2(address: Address) {
        stream::forbid_in_capture("cuMemFree")?;
        if address == 0 { Ok(()) } else { memory::free(address) }
    }

    /// Frees memory, after what the stream was given before.
    fn cuMemFreeAsync(address: Address, stream: Handle) {
        let stream = stream::find(stream)?;
        if address == 0 { Ok(()) } else { stream.free(address) }
    }

    /// Frees pinned memory.
    fn cuMemFreeHost(address: Address) {
        stream::forbid_in_capture("cuMemFreeHost")?;
        memory::free(address)
    }

    /// The allocation that an address lies in.
    fn cuMemGetAddressRange_v2(base: Out<Address>, bytes: Out<usize>, address: Address) {
        let region = memory::check(address, 1, "the address")?;
        base.set_if_wanted(region.base)?;
        bytes.set_if_wanted(region.size)
    }

    /// A copy to a device.
    fn cuMemcpyHtoDAsync_v2(to: Address, from: Host, bytes: usize, stream: Handle) {
        Copy { direction: HostToDevice, to, from: from.address(), bytes }.submit(stream)
    }

    /// A copy from a device.
    fn cuMemcpyDtoHAsync_v2(to: Host, from: Address, bytes: usize, stream: Handle) {
        Copy { direction: DeviceToHost, to: to.address(), from, bytes }.submit(stream)
    }

    /// A copy on a device.
    fn cuMemcpyDtoDAsync_v2(to: Address, from: Address, bytes: usize, stream: Handle) {
        Copy { direction: DeviceToDevice, to, from, bytes }.submit(stream)
    }

    /// A copy from device to device.
    fn cuMemcpyPeerAsync(
        to: Address,
        _to_context: Handle,
        from: Address,
        _from_context: Handle,
        bytes: usize,
        stream: Handle,
    ) {
        Copy { direction: DeviceToDevice, to, from, bytes }.submit(stream)
    }

    /// A copy to a device.
    fn cuMemcpyHtoD_v2(to: Address, from: Host, bytes: usize) {
        Copy { direction: HostToDevice, to, from: from.address(), bytes }.run_now("cuMemcpyHtoD")
    }

    /// A copy from a device.
    fn cuMemcpyDtoH_v2(to: Host, from: Address, bytes: usize) {
        Copy { direction: DeviceToHost, to: to.address(), from, bytes }.run_now("cuMemcpyDtoH")
    }

    /// A copy on a device.
    fn cuMemcpyDtoD_v2(to: Address, from: Address, bytes: usize) {
        Copy { direction: DeviceToDevice, to, from, bytes }.run_now("cuMemcpyDtoD")
    }

    /// Fills memory with bytes.
    fn cuMemsetD8Async(to: Address, value: c_uchar, count: usize, stream: Handle) {
        Fill { to, pattern: value.to_ne_bytes(), count }.submit(stream)
    }

    /// Fills memory with 16-bit numbers.
    fn cuMemsetD16Async(to: Address, value: c_ushort, count: usize, stream: Handle) {
        Fill { to, pattern: value.to_ne_bytes(), count }.submit(stream)
    }

    /// Fills memory with 32-bit numbers.
    fn cuMemsetD32Async(to: Address, value: c_uint, count: usize, stream: Handle) {
        Fill { to, pattern: value.to_ne_bytes(), count }.submit(stream)
    }

    /// Fills memory with bytes.
    fn cuMemsetD8_v2(to: Address, value: c_uchar, count: usize) {
        Fill { to, pattern: value.to_ne_bytes(), count }.run_now("cuMemsetD8")
    }

    /// Fills memory with 16-bit numbers.
    fn cuMemsetD16_v2(to: Address, value: c_ushort, count: usize) {
        Fill { to, pattern: value.to_ne_bytes(), count }.run_now("cuMemsetD16")
    }

    /// Fills memory with 32-bit numbers.
    fn cuMemsetD32_v2(to: Address, value: c_uint, count: usize) {
        Fill { to, pattern: value.to_ne_bytes(), count }.run_now("cuMemsetD32")
    }
}
