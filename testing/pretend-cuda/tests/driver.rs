//! The pretend driver, called as a program calls the real one. Every launch runs in all schedules.

mod common;

use std::ffi::{c_int, c_uint};

use common::gpu::{made, message, tile, Gpu, Handle, Reverse};
use pretend_cuda::argument::{In, Out};
use pretend_cuda::device::*;
use pretend_cuda::event::*;
use pretend_cuda::launch::*;
use pretend_cuda::module::*;
use pretend_cuda::status::*;
use pretend_cuda::stream::*;
use pretend_cuda::transfer::*;

#[test]
fn several_devices_compute() {
    assert_eq!(made(|out| cuDeviceGetCount(out)), Ok(4));
    for device in [0, 3, 0] {
        let gpu = Gpu::new(device);
        let (x, y) = tile();
        let params = Reverse { x: gpu.upload(&x), y: gpu.room(256), n: 64 };
        assert_eq!(gpu.launch("toy_reverse", 1, 64, &params), SUCCESS);
        assert_eq!(gpu.download(params.y, 64), y);
        assert_eq!(cuMemFreeAsync(params.x, gpu.stream), SUCCESS);
        assert_eq!(cuMemFree_v2(params.y), SUCCESS);
        assert_eq!(cuStreamDestroy_v2(gpu.stream), SUCCESS);
    }
}

#[test]
fn launches_with_attributes() {
    let gpu = Gpu::new(0);
    let (x, y) = tile();
    let params = Reverse { x: gpu.upload(&x), y: gpu.room(256), n: 64 };
    let function = gpu.function("toy_reverse").unwrap();
    let launch = |id| {
        let attribute = LaunchAttribute { id, pad: [0; 4], value: [1; 8] };
        let config = LaunchConfig {
            grid: [1; 3],
            block: [64, 1, 1],
            shared_bytes: 256,
            stream: gpu.stream,
            attributes: In::from(&attribute),
            attribute_count: 1,
        };
        let pointers = [In::from(&params).cast()];
        cuLaunchKernelEx(In::from(&config), function, In::from(&pointers[..]), In::default())
    };
    assert_eq!(launch(4), NOT_SUPPORTED, "clusters");
    assert_eq!(launch(8), SUCCESS, "priority");
    assert_eq!(gpu.download(params.y, 64), y);
}

#[test]
fn results_that_depend_on_the_order_of_threads() {
    let gpu = Gpu::new(1);
    let (x, _) = tile();
    let params = Reverse { x: gpu.upload(&x), y: gpu.room(256), n: 64 };
    assert_eq!(gpu.launch("toy_reverse_without_barrier", 1, 64, &params), LAUNCH_FAILED);
    let told = message(LAUNCH_FAILED);
    for word in ["toy_reverse_without_barrier", "order of threads", "barrier", "offset 8"] {
        assert!(told.contains(word), "{word:?} is not in: {told}");
    }

    // Sums of floats by atomics, in the order in which blocks happen to run.
    let numbers: Vec<f32> = (0..100).map(|i| 1.0 / (i as f32 + 1.0)).collect();
    let order = gpu.upload(&[0f32]);
    let mut params = [gpu.upload(&numbers), gpu.room(400), gpu.room(4), gpu.upload(&[0u32]), order];
    assert_eq!(gpu.launch("toy_last_block", 100, 1, &params), LAUNCH_FAILED);
    params[4] = 0;
    let before = gpu.upload(&[0u32]);
    params[3] = before;
    assert_eq!(gpu.launch("toy_last_block", 100, 1, &params), SUCCESS);
    assert_eq!(gpu.download(params[2], 1), [numbers.iter().sum::<f32>()]);
}

#[test]
fn faults_of_kernels() {
    let gpu = Gpu::new(0);
    let params = (gpu.room(256), 5i32);
    assert_eq!(gpu.launch("toy_divergent_shuffle", 1, 64, &params), LAUNCH_FAILED);
    assert!(message(LAUNCH_FAILED).contains("divergent warp"), "{}", message(LAUNCH_FAILED));
    assert_eq!(message(INVALID_VALUE), "CUDA_ERROR_INVALID_VALUE", "the last error was another");
    // Not for ever, unlike the real one.
    let (x, y) = tile();
    let params = Reverse { x: gpu.upload(&x), y: gpu.room(256), n: 64 };
    assert_eq!(gpu.launch("toy_reverse", 1, 64, &params), SUCCESS);
    assert_eq!(gpu.download(params.y, 64), y);
}

// AddressSanitizer would end the process.
#[cfg(not(address_sanitizer))]
#[test]
fn overruns_of_device_memory() {
    let gpu = Gpu::new(0);
    for at in [64, -1, 100] {
        let params = (gpu.room(256), at);
        assert_eq!(gpu.launch("toy_global_overrun", 1, 32, &params), ILLEGAL_ADDRESS, "{at}");
        assert!(message(ILLEGAL_ADDRESS).contains("256 bytes were written"), "{}", message(ILLEGAL_ADDRESS));
    }
    assert_eq!(gpu.launch("toy_global_overrun", 1, 32, &(gpu.room(256), 63)), SUCCESS);
}

#[test]
fn launches_that_are_refused() {
    let gpu = Gpu::new(0);
    assert_eq!(gpu.function("no_such_kernel"), Err(NOT_FOUND));
    let (x, _) = tile();
    let params = Reverse { x: gpu.upload(&x), y: gpu.room(256), n: 64 };
    let function = gpu.function("toy_reverse").unwrap();
    let pointers = [In::from(&params).cast()];
    let launch = |blocks: [c_uint; 3], threads: [c_uint; 3], shared| {
        let params = In::from(&pointers[..]);
        let ([x, y, z], [a, b, c]) = (blocks, threads);
        cuLaunchKernel(function, x, y, z, a, b, c, shared, gpu.stream, params, In::default())
    };
    let block = [64, 1, 1];
    assert_eq!(launch([1; 3], [32, 1, 1], 0), INVALID_VALUE, "another block size");
    assert_eq!(launch([1; 3], [64, 1, 0], 0), INVALID_VALUE, "no threads");
    assert_eq!(launch([1, 0, 1], block, 0), INVALID_VALUE, "no blocks");
    assert_eq!(launch([1, 65536, 1], block, 0), INVALID_VALUE, "too many blocks");
    assert_eq!(launch([1; 3], block, 48 << 10), SUCCESS);
    assert_eq!(launch([1; 3], block, (48 << 10) + 1), INVALID_VALUE, "shared memory without the attribute");
    assert_eq!(cuFuncSetAttribute(function, 8, 228 << 10), INVALID_VALUE);
    assert_eq!(cuFuncSetAttribute(function, 8, 227 << 10), SUCCESS);
    assert_eq!(launch([1; 3], block, 227 << 10), SUCCESS);
    assert_eq!(launch([1; 3], block, (227 << 10) + 1), INVALID_VALUE);
    let nothing = cuLaunchKernel(function, 1, 1, 1, 64, 1, 1, 0, gpu.stream, In::default(), In::default());
    assert_eq!(nothing, INVALID_VALUE, "no parameters");

    assert_eq!(cuMemFree_v2(params.x), SUCCESS);
    assert_eq!(launch([1; 3], block, 0), ILLEGAL_ADDRESS, "freed memory");
    assert!(message(ILLEGAL_ADDRESS).contains("offset 0 is memory of device 0 that was freed"));
    assert_eq!(cuMemFree_v2(params.x), ILLEGAL_ADDRESS, "freed twice");
}

#[test]
fn shared_memory_of_cards() {
    // A process has cards of one kind.
    let name = "PRETEND_CUDA_CARD";
    if std::env::var_os(name).is_none() {
        for card in ["64", "99", "163", "227"] {
            let mut test = std::process::Command::new(std::env::current_exe().unwrap());
            let run = test.args(["shared_memory_of_cards", "--exact"]).env(name, card).output().unwrap();
            assert!(run.status.success(), "{card}: {}", String::from_utf8_lossy(&run.stdout));
        }
        return;
    }
    let gpu = Gpu::new(0);
    let attribute = |number| made(|out| cuDeviceGetAttribute(out, number, 0)).unwrap();
    let (per_block, opt_in, per_multiprocessor) = (attribute(8), attribute(97), attribute(81));
    let [major, minor] = [75, 76].map(attribute);
    let expected = match std::env::var(name).unwrap().as_str() {
        "64" => (64, 64, 7, 5),
        "99" => (99, 100, 8, 6),
        "163" => (163, 164, 8, 0),
        _ => (227, 228, 9, 0),
    };
    assert_eq!((opt_in >> 10, per_multiprocessor >> 10, major, minor), expected);
    assert_eq!(per_block, 48 << 10);

    let (x, y) = tile();
    let params = Reverse { x: gpu.upload(&x), y: gpu.room(256), n: 64 };
    let function = gpu.function("toy_reverse").unwrap();
    let pointers = [In::from(&params).cast()];
    let launch = |shared_bytes: c_int| {
        let pointers = In::from(&pointers[..]);
        let none = In::default();
        cuLaunchKernel(function, 1, 1, 1, 64, 1, 1, shared_bytes as c_uint, gpu.stream, pointers, none)
    };
    let allow = |bytes| cuFuncSetAttribute(function, 8, bytes);
    assert_eq!(launch(per_block), SUCCESS);
    assert_eq!(launch(per_block + 1), INVALID_VALUE, "without the attribute");
    assert_eq!(allow(opt_in + 1), INVALID_VALUE, "more than the card has");
    assert_eq!(launch(opt_in), INVALID_VALUE, "the attribute was refused");
    assert_eq!(allow(opt_in - 4), SUCCESS);
    assert_eq!(launch(opt_in - 4), SUCCESS);
    assert_eq!(launch(opt_in), INVALID_VALUE, "more than the attribute");
    assert_eq!(allow(opt_in), SUCCESS);
    assert_eq!(launch(opt_in), SUCCESS);
    assert_eq!(launch(opt_in + 1), INVALID_VALUE);
    assert_eq!(gpu.download(params.y, 64), y);
    let blocks = made(|out| cuOccupancyMaxActiveBlocksPerMultiprocessor(out, function, 64, opt_in as usize));
    assert_eq!(blocks, Ok(1));
}

#[test]
fn devices_are_kept_apart() {
    let (first, second) = (Gpu::new(0), Gpu::new(1));
    let (x, _) = tile();
    // The second is current.
    let params = Reverse { x: second.upload(&x), y: second.room(256), n: 64 };
    assert_eq!(second.launch("toy_reverse", 1, 64, &params), SUCCESS);
    assert_eq!(first.launch("toy_reverse", 1, 64, &params), INVALID_HANDLE, "a stream of another device");
    let mixed = Gpu { module: first.module, ..Gpu::new(1) };
    assert_eq!(mixed.launch("toy_reverse", 1, 64, &params), INVALID_HANDLE, "a module of another device");
    assert_eq!(cuCtxSetCurrent(first.context), SUCCESS);
    assert_eq!(first.launch("toy_reverse", 1, 64, &params), ILLEGAL_ADDRESS, "memory of another device");
    assert!(message(ILLEGAL_ADDRESS).contains("is memory of device 1"), "{}", message(ILLEGAL_ADDRESS));
}

#[test]
fn the_driver_is_there_until_a_thread_is_gone() {
    use std::cell::Cell;
    use std::sync::atomic::{AtomicI32, Ordering};
    const PER_THREAD: Handle = 2;
    static FREED: AtomicI32 = AtomicI32::new(-1);
    struct Memory(u64);
    impl Drop for Memory {
        fn drop(&mut self) {
            let again = cuMemFreeAsync(self.0, PER_THREAD);
            assert!(message(cuMemFreeAsync(self.0, PER_THREAD)).contains("ADDRESS"), "freed twice");
            FREED.store(again, Ordering::Relaxed);
        }
    }
    thread_local!(static KEPT: Cell<Option<Memory>> = const { Cell::new(None) });
    let thread = std::thread::spawn(|| {
        // Its destructor comes after those of the driver, which are registered later.
        KEPT.set(None);
        let gpu = Gpu::new(0);
        assert_eq!(gpu.launch("toy_trap", 1, 64, &(0u64, 0)), INVALID_VALUE);
        KEPT.set(Some(Memory(made(|out| cuMemAllocAsync(out, 4, PER_THREAD)).unwrap())));
    });
    thread.join().unwrap();
    assert_eq!(FREED.load(Ordering::Relaxed), SUCCESS);
}

#[test]
fn memory_is_checked() {
    let gpu = Gpu::new(0);
    let address = gpu.room(16);
    assert!(gpu.download(address, 4).iter().all(|x| x.is_nan()), "fresh memory is not a number");
    assert_eq!(cuMemsetD32Async(address, 2f32.to_bits(), 3, gpu.stream), SUCCESS);
    assert_eq!(gpu.download(address, 3), [2.0; 3]);
    assert_eq!(cuMemsetD8_v2(address + 1, 0, 16), ILLEGAL_ADDRESS, "one byte too many");
    assert_eq!(cuMemcpyDtoD_v2(address, address, 17), ILLEGAL_ADDRESS);
    assert_eq!(cuMemAlloc_v2(Out::from(&mut 0), 0), INVALID_VALUE);
    assert_eq!(cuMemAlloc_v2(Out::from(&mut 0), 17 << 30), OUT_OF_MEMORY);
    assert_eq!(cuMemcpyDtoD_v2(address, 4096, 1), ILLEGAL_ADDRESS);
}

#[test]
fn events() {
    let gpu = Gpu::new(0);
    let [start, end] = [(), ()].map(|()| made(|out| cuEventCreate(out, 0)).unwrap());
    assert_eq!(
        made::<f32>(|out| cuEventElapsedTime_v2(out, start, end)),
        Err(INVALID_HANDLE),
        "not recorded"
    );
    assert_eq!(cuEventRecord(start, gpu.stream), SUCCESS);
    std::thread::sleep(std::time::Duration::from_millis(2));
    assert_eq!(cuEventRecord(end, gpu.stream), SUCCESS);
    assert_eq!(cuEventSynchronize(end), SUCCESS);
    assert!(made::<f32>(|out| cuEventElapsedTime_v2(out, start, end)).unwrap() >= 2.0);
    assert_eq!(cuStreamBeginCapture_v2(gpu.stream, 1), SUCCESS);
    assert_eq!(cuEventRecord(end, gpu.stream), SUCCESS);
    assert_eq!(cuStreamWaitEvent(gpu.stream, end, 0), SUCCESS, "of the same capture");
    assert_eq!(cuEventSynchronize(end), CAPTURED_EVENT);
    assert_eq!(cuStreamEndCapture(gpu.stream, Out::from(&mut 0)), SUCCESS);
    assert_eq!(cuEventDestroy_v2(start), SUCCESS);
    assert_eq!(cuEventRecord(start, gpu.stream), INVALID_HANDLE, "destroyed");
}
