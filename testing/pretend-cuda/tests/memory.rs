//! What lies in memory that nobody wrote, and next to it.

mod common;

use common::gpu::{made, Gpu, Reverse};
use pretend_cuda::graph::*;
use pretend_cuda::status::*;
use pretend_cuda::stream::*;
use pretend_cuda::transfer::*;

/// Bytes of freed memory that the driver keeps.
const KEPT: usize = 64 << 20;

fn all_nan(numbers: &[f32]) {
    assert!(numbers.iter().all(|x| x.is_nan()), "{numbers:?}");
}

// AddressSanitizer ends the program at such a read.
#[cfg(not(address_sanitizer))]
#[test]
fn reads_next_to_an_allocation() {
    let gpu = Gpu::new(0);
    // The last of 64 numbers lies behind the allocation, or half of it does.
    for bytes in [252, 254] {
        let (x, y) = (gpu.room(bytes), gpu.room(256));
        assert_eq!(cuMemsetD8Async(x, 0, bytes, gpu.stream), SUCCESS);
        assert_eq!(gpu.launch("toy_reverse", 1, 64, &Reverse { x, y, n: 64 }), SUCCESS);
        let y = gpu.download(y, 64);
        all_nan(&y[..1]);
        assert_eq!(y[1..], [0.0; 63]);
        // The first one lies before it.
        let (x, y) = (gpu.room(bytes), gpu.room(256));
        assert_eq!(cuMemsetD8Async(x, 0, bytes, gpu.stream), SUCCESS);
        assert_eq!(gpu.launch("toy_reverse", 1, 64, &Reverse { x: x - 4, y, n: 64 }), SUCCESS);
        all_nan(&gpu.download(y, 64)[63..]);
    }
}

#[test]
fn what_a_kernel_leaves_out() {
    let gpu = Gpu::new(0);
    let params = Reverse { x: gpu.upload(&[1f32; 64]), y: gpu.room(256), n: 60 };
    assert_eq!(gpu.launch("toy_reverse", 1, 64, &params), SUCCESS);
    let y = gpu.download(params.y, 64);
    assert!(y[..60].iter().all(|y| !y.is_nan()));
    all_nan(&y[60..]);
}

#[test]
fn memory_that_is_used_again() {
    let gpu = Gpu::new(0);
    let size = 8 << 20;
    let mut seen = std::collections::BTreeSet::new();
    let mut again = 0;
    // Freed memory is kept for a while; which address comes back when is up to the allocator.
    for _ in 0..40 * KEPT / size {
        let address = gpu.room(size);
        again += usize::from(!seen.insert(address));
        all_nan(&gpu.download(address, 8));
        all_nan(&gpu.download(address + size as u64 - 32, 8));
        assert_eq!(cuMemsetD8Async(address, 0, size, gpu.stream), SUCCESS);
        assert_eq!(cuMemFreeAsync(address, gpu.stream), SUCCESS);
        if again > 2 {
            break;
        }
    }
    assert!(again > 0, "no address came back: the test shows nothing");
}

#[test]
fn memory_of_a_graph_that_is_launched_again() {
    let gpu = Gpu::new(0);
    let result = gpu.room(16);
    assert_eq!(cuStreamBeginCapture_v2(gpu.stream, 1), SUCCESS);
    let inner = gpu.room(16);
    assert_eq!(cuMemcpyDtoDAsync_v2(result, inner, 16, gpu.stream), SUCCESS);
    assert_eq!(cuMemsetD8Async(inner, 0, 16, gpu.stream), SUCCESS);
    assert_eq!(cuMemFreeAsync(inner, gpu.stream), SUCCESS);
    let graph = made(|out| cuStreamEndCapture(gpu.stream, out)).unwrap();
    let executable = made(|out| cuGraphInstantiateWithFlags(out, graph, 0)).unwrap();
    for _ in 0..2 {
        assert_eq!(cuGraphLaunch(executable, gpu.stream), SUCCESS);
        all_nan(&gpu.download(result, 4));
    }
}

// AddressSanitizer would end the process.
#[cfg(not(address_sanitizer))]
#[test]
fn writes_next_to_an_allocation_that_is_freed() {
    let gpu = Gpu::new(0);
    use common::gpu::message;
    for offset in [-1i64, -256, 6, 200] {
        let address = gpu.room(6);
        // SAFETY: a guard of the allocation. Nobody may write it, which is what is tested.
        unsafe { (address.wrapping_add_signed(offset) as *mut u8).write(1) };
        assert_eq!(cuMemFree_v2(address), ILLEGAL_ADDRESS, "{offset}");
        assert!(message(ILLEGAL_ADDRESS).contains("an allocation of 6 bytes were written"));
    }
}
