//! Capturing work, and doing it again.

mod common;

use std::ffi::c_int;

use common::gpu::{made, tile, Gpu, Reverse};
use pretend_cuda::argument::{Host, Out};
use pretend_cuda::device::*;
use pretend_cuda::event::*;
use pretend_cuda::graph::*;
use pretend_cuda::status::*;
use pretend_cuda::stream::*;
use pretend_cuda::transfer::*;

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
    refused_in_capture(CAPTURE_UNSUPPORTED, |_| cuMemsetD8_v2(address, 0, 16));
    let event = made(|out| cuEventCreate(out, 0)).unwrap();
    assert_eq!(cuEventRecord(event, gpu.stream), SUCCESS);
    refused_in_capture(CAPTURE_ISOLATION, |gpu| cuStreamWaitEvent(gpu.stream, event, 0));
    assert_eq!(cuStreamBeginCapture_v2(0, 1), CAPTURE_IMPLICIT);
    assert_eq!(cuMemFree_v2(address), SUCCESS);
}

/// Whoever waits for a context, in whichever thread, ends the captures of all its streams.
#[test]
fn a_context_with_a_capture() {
    // A device that no other test of this file has.
    let gpu = Gpu::new(3);
    for mode in [1, 2] {
        assert_eq!(cuStreamBeginCapture_v2(gpu.stream, mode), SUCCESS);
        let wait =
            |device| std::thread::spawn(move || (Gpu::new(device), cuCtxSynchronize()).1).join().unwrap();
        assert_eq!(wait(2), SUCCESS, "another device");
        assert_eq!(made(|out| cuStreamIsCapturing(gpu.stream, out)), Ok(1));
        assert_eq!(wait(3), CAPTURE_UNSUPPORTED, "mode {mode}");
        assert_eq!(made(|out| cuStreamIsCapturing(gpu.stream, out)), Ok(2));
        assert_eq!(gpu.launch("toy_trap", 1, 32, &(0u64, 40)), CAPTURE_INVALIDATED);
        assert_eq!(cuStreamEndCapture(gpu.stream, Out::from(&mut 0)), CAPTURE_INVALIDATED);
        assert_eq!(wait(3), SUCCESS);
    }
}

#[test]
fn captures_of_other_threads() {
    // Only a capture in global mode forbids what other threads do, so none is begun here: tests run at once.
    let gpu = Gpu::new(0);
    assert_eq!(cuStreamBeginCapture_v2(gpu.stream, 1), SUCCESS);
    let elsewhere = std::thread::spawn(|| {
        let gpu = Gpu::new(0);
        (cuMemFree_v2(gpu.room(16)), cuStreamSynchronize(gpu.stream))
    });
    assert_eq!(elsewhere.join().unwrap(), (SUCCESS, SUCCESS));
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

/// They are captured, and read nothing; what they are of may be gone when the graph is launched.
#[test]
fn pageable_memory_in_captures() {
    let gpu = Gpu::new(0);
    let address = gpu.upload(&[1f32]);
    for reads in [false, true] {
        let mut value = 2f32;
        let host = Host((&raw mut value).cast());
        assert_eq!(cuStreamBeginCapture_v2(gpu.stream, 1), SUCCESS);
        match reads {
            true => assert_eq!(cuMemcpyDtoHAsync_v2(host, address, 4, gpu.stream), SUCCESS),
            false => assert_eq!(cuMemcpyHtoDAsync_v2(address, host, 4, gpu.stream), SUCCESS),
        }
        let graph = made(|out| cuStreamEndCapture(gpu.stream, out)).unwrap();
        let executable = made(|out| cuGraphInstantiateWithFlags(out, graph, 0)).unwrap();
        assert_eq!(cuGraphLaunch(executable, gpu.stream), NOT_SUPPORTED);
        assert_eq!((value, gpu.download(address, 1)), (2., vec![1.]));
    }
}
