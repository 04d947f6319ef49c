//! The pretend driver, called as a program calls the real one. Every launch runs in all schedules.

use std::ffi::{c_int, c_uint, CStr, CString};
use std::mem::size_of_val;
use std::sync::Once;

use pretend_cuda::argument::{Host, In, Out, Text};
use pretend_cuda::device::*;
use pretend_cuda::event::*;
use pretend_cuda::graph::*;
use pretend_cuda::launch::*;
use pretend_cuda::module::*;
use pretend_cuda::status::*;
use pretend_cuda::stream::*;
use pretend_cuda::transfer::*;

type Handle = usize;
type Result<T, E> = std::result::Result<T, E>;

/// What `function` writes, if it returns success.
fn made<T: Default>(function: impl FnOnce(Out<T>) -> c_int) -> Result<T, c_int> {
    let mut result = T::default();
    match function(Out::from(&mut result)) {
        SUCCESS => Ok(result),
        error => Err(error),
    }
}

fn message(error: c_int) -> String {
    let mut text = std::ptr::null();
    assert_eq!(cuGetErrorString(error, Out::from(&mut text)), SUCCESS);
    // SAFETY: the driver gives a string that stays.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// One device, its context current on this thread, and a stream of its own.
struct Gpu {
    context: Handle,
    stream: Handle,
    module: Handle,
}

impl Gpu {
    fn new(device: c_int) -> Self {
        static ALL_SCHEDULES: Once = Once::new();
        ALL_SCHEDULES.call_once(|| std::env::set_var("PRETEND_CUDA_SCHEDULES", "all"));
        assert_eq!(cuInit(0), SUCCESS);
        let context = made(|out| cuDevicePrimaryCtxRetain(out, device)).unwrap();
        assert_eq!(cuCtxSetCurrent(context), SUCCESS);
        let stream = made(|out| cuStreamCreate(out, 1)).unwrap();
        let module = made(|out| cuModuleLoadData(out, In::from(&[0u8; 4][..]))).unwrap();
        Self { context, stream, module }
    }

    fn upload<T: Copy>(&self, values: &[T]) -> u64 {
        let address = self.room(size_of_val(values));
        let host = Host(values.as_ptr().cast_mut().cast());
        assert_eq!(cuMemcpyHtoDAsync_v2(address, host, size_of_val(values), self.stream), SUCCESS);
        address
    }

    fn room(&self, bytes: usize) -> u64 {
        made(|out| cuMemAllocAsync(out, bytes, self.stream)).unwrap()
    }

    fn download(&self, address: u64, count: usize) -> Vec<f32> {
        let mut values = vec![0f32; count];
        let host = Host(values.as_mut_ptr().cast());
        assert_eq!(cuMemcpyDtoHAsync_v2(host, address, 4 * count, self.stream), SUCCESS);
        values
    }

    fn function(&self, name: &str) -> Result<Handle, c_int> {
        let name = CString::new(name).unwrap();
        made(|out| cuModuleGetFunction(out, self.module, Text::from(name.as_c_str())))
    }

    fn launch<T: Copy>(&self, name: &str, blocks: c_uint, threads: c_uint, params: &T) -> c_int {
        let function = self.function(name).unwrap();
        let params = [In::from(params)];
        let params = In::from(&params[..]).cast();
        cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 64, self.stream, params, In::default())
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Reverse {
    x: u64,
    y: u64,
    n: u32,
}

fn tile() -> (Vec<f32>, Vec<f32>) {
    let x: Vec<f32> = (0..64).map(|i| i as f32).collect();
    let y = x.iter().rev().copied().collect();
    (x, y)
}

#[test]
fn two_devices_compute() {
    assert_eq!(made(|out| cuDeviceGetCount(out)), Ok(2));
    for device in [0, 1, 0] {
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
            shared_bytes: 0,
            stream: gpu.stream,
            attributes: In::from(&attribute),
            attribute_count: 1,
        };
        let pointers = [In::from(&params).cast()];
        cuLaunchKernelEx(In::from(&config), function, In::from(&pointers[..]), In::default())
    };
    assert_eq!(launch(4), NOT_SUPPORTED, "clusters");
    assert_eq!(launch(6), SUCCESS, "programmatic stream serialization");
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
fn graphs() {
    let gpu = Gpu::new(0);
    let (x, y) = tile();
    let (source, middle) = (gpu.upload(&x), gpu.room(256));
    let mut params = Reverse { x: middle, y: gpu.room(256), n: 64 };
    let result = params.y;
    assert_eq!(cuStreamEndCapture(gpu.stream, Out::from(&mut 0)), CAPTURE_UNMATCHED);
    assert_eq!(cuStreamBeginCapture_v2(gpu.stream, 1), SUCCESS);
    assert_eq!(made(|out| cuStreamIsCapturing(gpu.stream, out)), Ok(1));
    assert_eq!(cuMemcpyDtoDAsync_v2(middle, source, 256, gpu.stream), SUCCESS);
    assert_eq!(gpu.launch("toy_reverse", 1, 64, &params), SUCCESS);
    assert_eq!(cuMemsetD32Async(middle, 0, 64, gpu.stream), SUCCESS);
    // What was captured keeps its own copy.
    params.n = 0;
    std::hint::black_box(&params);
    let graph = made(|out| cuStreamEndCapture(gpu.stream, out)).unwrap();
    assert_eq!(made(|out| cuStreamIsCapturing(gpu.stream, out)), Ok(0));
    assert!(gpu.download(result, 64).iter().all(|x| x.is_nan()), "captured work has not run");

    let executable = made(|out| cuGraphInstantiateWithFlags(out, graph, 0)).unwrap();
    assert_eq!(cuGraphDestroy(graph), SUCCESS);
    for factor in [1.0, 2.0] {
        let x: Vec<f32> = x.iter().map(|x| x * factor).collect();
        let host = Host(x.as_ptr().cast_mut().cast());
        assert_eq!(cuMemcpyHtoDAsync_v2(source, host, 256, gpu.stream), SUCCESS);
        assert_eq!(cuGraphLaunch(executable, gpu.stream), SUCCESS);
        assert_eq!(gpu.download(result, 64), y.iter().map(|y| y * factor).collect::<Vec<_>>());
        assert_eq!(gpu.download(middle, 64), [0.0; 64]);
    }
    assert_eq!(cuMemFree_v2(middle), SUCCESS);
    assert_eq!(cuGraphLaunch(executable, gpu.stream), ILLEGAL_ADDRESS, "memory of the graph was freed");
    assert_eq!(cuGraphExecDestroy(executable), SUCCESS);
}

#[test]
fn memory_of_graphs() {
    let gpu = Gpu::new(1);
    let (x, y) = tile();
    let (source, result) = (gpu.upload(&x), gpu.room(256));
    let nowhere = |address| cuMemcpyDtoD_v2(result, address, 256);
    assert_eq!(cuStreamBeginCapture_v2(gpu.stream, 1), SUCCESS);
    let (inner, kept) = (gpu.room(256), gpu.room(4));
    assert_eq!(gpu.launch("toy_reverse", 1, 64, &Reverse { x: source, y: inner, n: 64 }), SUCCESS);
    assert_eq!(cuMemcpyDtoDAsync_v2(result, inner, 256, gpu.stream), SUCCESS);
    assert_eq!(cuMemcpyDtoDAsync_v2(kept, inner, 4, gpu.stream), SUCCESS);
    assert_eq!(cuMemFreeAsync(inner, gpu.stream), SUCCESS);
    let graph = made(|out| cuStreamEndCapture(gpu.stream, out)).unwrap();
    let [executable, freeing] =
        [0, 1].map(|flags| made(|out| cuGraphInstantiateWithFlags(out, graph, flags)).unwrap());
    assert_eq!(nowhere(inner), ILLEGAL_ADDRESS, "before the first launch");

    assert_eq!(cuGraphLaunch(executable, gpu.stream), SUCCESS);
    assert_eq!(gpu.download(result, 64), y);
    assert_eq!(gpu.download(kept, 1), y[..1]);
    assert_eq!(nowhere(inner), ILLEGAL_ADDRESS, "the graph freed it");
    assert_eq!(cuGraphLaunch(executable, gpu.stream), INVALID_VALUE, "a kept allocation");
    assert_eq!(cuMemFreeAsync(kept, gpu.stream), SUCCESS);
    assert_eq!(cuGraphLaunch(executable, gpu.stream), SUCCESS);
    assert_eq!(cuGraphLaunch(freeing, gpu.stream), SUCCESS, "frees at launch");
    for executable in [executable, freeing] {
        assert_eq!(cuGraphExecDestroy(executable), SUCCESS);
    }
    assert_eq!(cuGraphDestroy(graph), SUCCESS);
    assert_eq!(gpu.download(kept, 1), y[..1], "outlives the graph");
    assert_eq!(cuMemFree_v2(kept), SUCCESS);
    assert_eq!(cuMemFree_v2(kept), ILLEGAL_ADDRESS);
}

/// While capturing, `wrong` is refused with `error`, and no graph comes of it.
fn refused_in_capture(error: c_int, wrong: impl Fn(&Gpu) -> c_int) {
    let gpu = Gpu::new(0);
    assert_eq!(cuStreamBeginCapture_v2(gpu.stream, 1), SUCCESS);
    assert_eq!(wrong(&gpu), error);
    assert_eq!(made(|out| cuStreamIsCapturing(gpu.stream, out)), Ok(2));
    assert_eq!(gpu.launch("toy_trap", 1, 32, &(0u64, 40)), CAPTURE_INVALIDATED);
    assert_eq!(cuStreamEndCapture(gpu.stream, Out::from(&mut 0)), CAPTURE_INVALIDATED);
    assert_eq!(cuStreamSynchronize(gpu.stream), SUCCESS);
}

#[test]
fn captures_that_fail() {
    let gpu = Gpu::new(0);
    let address = gpu.room(16);
    refused_in_capture(CAPTURE_UNSUPPORTED, |_| cuMemAlloc_v2(Out::from(&mut 0), 16));
    refused_in_capture(INVALID_VALUE, |gpu| cuMemFreeAsync(address, gpu.stream));
    refused_in_capture(CAPTURE_UNSUPPORTED, |_| cuMemFree_v2(address));
    refused_in_capture(CAPTURE_UNSUPPORTED, |gpu| cuStreamSynchronize(gpu.stream));
    refused_in_capture(CAPTURE_UNSUPPORTED, |_| cuCtxSynchronize());
    refused_in_capture(CAPTURE_UNSUPPORTED, |_| cuMemsetD8_v2(address, 0, 16));
    refused_in_capture(CAPTURE_UNSUPPORTED, |gpu| {
        cuMemcpyHtoDAsync_v2(address, Host([0u8; 16].as_mut_ptr().cast()), 16, gpu.stream)
    });
    let event = made(|out| cuEventCreate(out, 0)).unwrap();
    assert_eq!(cuEventRecord(event, gpu.stream), SUCCESS);
    refused_in_capture(CAPTURE_ISOLATION, |gpu| cuStreamWaitEvent(gpu.stream, event, 0));
    assert_eq!(cuStreamBeginCapture_v2(0, 1), CAPTURE_IMPLICIT);
    assert_eq!(cuMemFree_v2(address), SUCCESS);
}

#[test]
fn captures_of_other_threads() {
    // Only a capture in global mode forbids what other threads do, so none is begun here: tests run at once.
    let gpu = Gpu::new(0);
    assert_eq!(cuStreamBeginCapture_v2(gpu.stream, 1), SUCCESS);
    let elsewhere = std::thread::spawn(|| {
        let gpu = Gpu::new(0);
        cuMemFree_v2(gpu.room(16))
    });
    assert_eq!(elsewhere.join().unwrap(), SUCCESS);
    let stream = gpu.stream;
    let other = std::thread::spawn(move || cuStreamEndCapture(stream, Out::from(&mut 0)));
    assert_eq!(other.join().unwrap(), CAPTURE_WRONG_THREAD);
    assert_eq!(cuStreamEndCapture(gpu.stream, Out::from(&mut 0)), SUCCESS);
}

#[test]
fn pinned_memory_in_captures() {
    let gpu = Gpu::new(0);
    let pinned = made(|out| cuMemHostAlloc(out, 4, 0)).unwrap();
    let address = gpu.room(4);
    assert_eq!(cuStreamBeginCapture_v2(gpu.stream, 2), SUCCESS);
    assert_eq!(cuMemcpyHtoDAsync_v2(address, Host(pinned as *mut _), 4, gpu.stream), SUCCESS);
    let graph = made(|out| cuStreamEndCapture(gpu.stream, out)).unwrap();
    let executable = made(|out| cuGraphInstantiateWithFlags(out, graph, 0)).unwrap();
    for value in [3f32, 4.0] {
        // SAFETY: four bytes of pinned memory, aligned.
        unsafe { (pinned as *mut f32).write(value) };
        assert_eq!(cuGraphLaunch(executable, gpu.stream), SUCCESS);
        assert_eq!(gpu.download(address, 1), [value]);
    }
    assert_eq!(cuMemFreeHost(pinned), SUCCESS);
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
