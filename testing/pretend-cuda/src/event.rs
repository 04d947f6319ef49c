//! Events: points in the work of a stream.

use std::ffi::{c_float, c_uint};
use std::sync::Mutex;
use std::time::Instant;

use crate::argument::Out;
use crate::device;
use crate::driver;
use crate::handles::{lock, Handle, Handles};
use crate::order::{self, Clock};
use crate::status::{fail, Result, CAPTURED_EVENT, INVALID_HANDLE};
use crate::stream;

/// What an event was recorded for last.
#[derive(Clone, Default)]
pub struct Event {
    /// When, outside of captures.
    pub time: Option<Instant>,
    /// The capture in which it was recorded.
    pub capture: Option<u64>,
    /// What had to be done by then.
    pub done: Clock,
}

/// An event that callers hold.
pub struct Recorder {
    device: usize,
    timing: bool,
    event: Mutex<Event>,
}

impl Recorder {
    /// What it was recorded for last.
    pub fn recorded(&self) -> Event {
        lock(&self.event).clone()
    }

    fn host_waited(&self) -> Result<()> {
        let event = self.recorded();
        if event.capture.is_some() {
            return fail(CAPTURED_EVENT, "the event was recorded in a capture: the host cannot wait for it");
        }
        order::host_waited_for(&event.done);
        Ok(())
    }
}

/// Every event.
pub static EVENTS: Handles<Recorder> = Handles::new("event");

const DISABLE_TIMING: c_uint = 2;

fn record(event: Handle, stream: Handle) -> Result<()> {
    let (event, stream) = (EVENTS.get(event)?, stream::find(stream)?);
    if event.device != stream.device {
        let message = format!("an event of device {} on a stream of device {}", event.device, stream.device);
        return fail(INVALID_HANDLE, message);
    }
    let capture = stream.capture_id();
    if capture.is_none() {
        stream.cut();
    }
    let done = stream.done();
    *lock(&event.event) = Event { time: capture.is_none().then(Instant::now), capture, done };
    Ok(())
}

driver! {
    /// An event of the current device.
    fn cuEventCreate(event: Out<Handle>, flags: c_uint) {
        let (device, timing) = (device::current()?, flags & DISABLE_TIMING == 0);
        event.set(EVENTS.insert(Recorder { device, timing, event: Mutex::default() }))
    }

    /// Forgets an event.
    fn cuEventDestroy_v2(event: Handle) {
        EVENTS.remove(event).map(drop)
    }

    /// Marks where the stream is.
    fn cuEventRecord(event: Handle, stream: Handle) {
        record(event, stream)
    }

    /// Marks where the stream is.
    fn cuEventRecordWithFlags(event: Handle, stream: Handle, _flags: c_uint) {
        record(event, stream)
    }

    /// Everything submitted is done already.
    fn cuEventQuery(event: Handle) {
        EVENTS.get(event)?.host_waited()
    }

    /// Everything submitted is done already.
    fn cuEventSynchronize(event: Handle) {
        EVENTS.get(event)?.host_waited()
    }

    /// Milliseconds between two events.
    fn cuEventElapsedTime_v2(milliseconds: Out<c_float>, start: Handle, end: Handle) {
        let (start, end) = (EVENTS.get(start)?, EVENTS.get(end)?);
        match (start.recorded().time, end.recorded().time) {
            (Some(from), Some(to)) if start.timing && end.timing => {
                milliseconds.set(to.saturating_duration_since(from).as_secs_f32() * 1e3)
            }
            _ => fail(INVALID_HANDLE, "an event that was not recorded, or does not take the time"),
        }
    }
}
