//! Streams side by side: work that uses the same memory waits, by an event or on the host.

mod common;

use std::ffi::c_int;

use common::gpu::{made, message, tile, Gpu, Handle, Reverse};
use pretend_cuda::argument::Out;
use pretend_cuda::event::*;
use pretend_cuda::graph::*;
use pretend_cuda::status::*;
use pretend_cuda::stream::*;

/// A device with two streams, and three buffers: what each kernel reverses is the next one.
struct Streams {
    gpu: Gpu,
    second: Handle,
    event: Handle,
    buffers: [u64; 3],
}

impl Streams {
    /// On a device of the test's own: what the host waits for in one thread counts for all.
    fn new(device: c_int) -> Self {
        let gpu = Gpu::new(device);
        let second = made(|out| cuStreamCreate(out, 1)).unwrap();
        let event = made(|out| cuEventCreate(out, 2)).unwrap();
        let buffers = [gpu.upload(&tile().0), gpu.room(256), gpu.room(256)];
        assert_eq!(cuStreamSynchronize(gpu.stream), SUCCESS);
        Self { gpu, second, event, buffers }
    }

    /// A kernel in the first or the second stream.
    fn reverse(&mut self, in_second: bool, from: usize, to: usize) -> c_int {
        let params = Reverse { x: self.buffers[from], y: self.buffers[to], n: 64 };
        let first = self.gpu.stream;
        if in_second {
            self.gpu.stream = self.second;
        }
        let status = self.gpu.launch("toy_reverse", 1, 64, &params);
        self.gpu.stream = first;
        status
    }

    /// What comes next in the second stream waits for the first one.
    fn second_waits(&self) {
        assert_eq!(cuEventRecord(self.event, self.gpu.stream), SUCCESS);
        assert_eq!(cuStreamWaitEvent(self.second, self.event, 0), SUCCESS);
    }

    fn first_waits(&self) {
        assert_eq!(cuEventRecord(self.event, self.second), SUCCESS);
        assert_eq!(cuStreamWaitEvent(self.gpu.stream, self.event, 0), SUCCESS);
    }
}

#[test]
fn a_reader_waits_for_its_writer() {
    let mut streams = Streams::new(0);
    assert_eq!(streams.reverse(false, 0, 1), SUCCESS);
    let status = streams.reverse(true, 1, 2);
    assert_eq!(status, LAUNCH_FAILED);
    let message = message(status);
    assert!(
        message.contains("toy_reverse` reads 256 bytes that a kernel of another stream writes"),
        "{message}"
    );

    let mut streams = Streams::new(0);
    assert_eq!(streams.reverse(false, 0, 1), SUCCESS);
    streams.second_waits();
    assert_eq!(streams.reverse(true, 1, 2), SUCCESS);
    assert_eq!(cuStreamSynchronize(streams.second), SUCCESS);
    assert_eq!(streams.gpu.download(streams.buffers[2], 64), tile().0);
}

#[test]
fn a_writer_waits_for_readers_and_writers() {
    let mut streams = Streams::new(1);
    assert_eq!(streams.reverse(false, 0, 1), SUCCESS);
    streams.second_waits();
    // The first kernel's source, and its result: the second stream waited for it.
    assert_eq!(streams.reverse(true, 2, 0), SUCCESS);
    assert_eq!(streams.reverse(true, 2, 1), SUCCESS);
    // The first stream has not waited for those.
    let status = streams.reverse(false, 0, 2);
    assert!(
        message(status).contains("reads 256 bytes that a kernel of another stream writes"),
        "{}",
        message(status)
    );

    let mut streams = Streams::new(1);
    assert_eq!(streams.reverse(false, 0, 1), SUCCESS);
    let status = streams.reverse(true, 2, 0);
    assert!(
        message(status).contains("writes 256 bytes that a kernel of another stream reads"),
        "{}",
        message(status)
    );
}

/// An event stands for what was submitted before it was recorded, no more.
#[test]
fn an_event_is_a_point_in_time() {
    let mut streams = Streams::new(2);
    assert_eq!(cuEventRecord(streams.event, streams.gpu.stream), SUCCESS);
    assert_eq!(streams.reverse(false, 0, 1), SUCCESS);
    assert_eq!(cuStreamWaitEvent(streams.second, streams.event, 0), SUCCESS);
    assert_eq!(streams.reverse(true, 1, 2), LAUNCH_FAILED);
}

#[test]
fn the_host_waits_for_both() {
    for wait in [
        |streams: &Streams| cuStreamSynchronize(streams.gpu.stream),
        |_: &Streams| pretend_cuda::device::cuCtxSynchronize(),
    ] {
        let mut streams = Streams::new(3);
        assert_eq!(streams.reverse(false, 0, 1), SUCCESS);
        assert_eq!(wait(&streams), SUCCESS);
        assert_eq!(streams.reverse(true, 1, 2), SUCCESS);
    }
}

/// A stream that waits for captured work takes part in the capture, until the first one waits for it.
#[test]
fn a_second_stream_in_a_graph() {
    let mut streams = Streams::new(2);
    for joins in [true, false] {
        assert_eq!(cuStreamBeginCapture_v2(streams.gpu.stream, 1), SUCCESS);
        assert_eq!(streams.reverse(false, 0, 1), SUCCESS);
        streams.second_waits();
        assert_eq!(made(|out| cuStreamIsCapturing(streams.second, out)), Ok(1));
        assert_eq!(streams.reverse(true, 1, 2), SUCCESS);
        if joins {
            streams.first_waits();
        }
        let mut graph = 0;
        let ended = cuStreamEndCapture(streams.gpu.stream, Out::from(&mut graph));
        assert_eq!(made(|out| cuStreamIsCapturing(streams.second, out)), Ok(0));
        if !joins {
            assert_eq!(ended, CAPTURE_UNJOINED);
            assert_eq!(
                cuStreamWaitEvent(streams.second, streams.event, 0),
                CAPTURED_EVENT,
                "the capture has ended"
            );
            continue;
        }
        assert_eq!(ended, SUCCESS);
        let executable = made(|out| cuGraphInstantiateWithFlags(out, graph, 0)).unwrap();
        assert_eq!(cuGraphLaunch(executable, streams.gpu.stream), SUCCESS);
        assert_eq!(streams.gpu.download(streams.buffers[2], 64), tile().0);
    }
}
