//! Streams, and capturing what is submitted to them.

use std::cell::Cell;
use std::ffi::{c_int, c_uint};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::thread::{self, ThreadId};
use std::time::Duration;

use crate::argument::Out;
use crate::device::{self, DEVICES};
use crate::driver;
use crate::edge::Edge;
use crate::event::EVENTS;
use crate::graph::{Graph, GraphMemory, GRAPHS};
use crate::handles::{lock, Handle, Handles};
use crate::memory::{self, Owner};
use crate::order::{self, Clock};
use crate::status::{
    fail, Result, CAPTURED_EVENT, CAPTURE_IMPLICIT, CAPTURE_INVALIDATED, CAPTURE_ISOLATION, CAPTURE_UNJOINED,
    CAPTURE_UNMATCHED, CAPTURE_UNSUPPORTED, CAPTURE_WRONG_THREAD, INVALID_HANDLE, INVALID_VALUE,
};

/// Something for a stream to do, as often as it is asked to.
#[derive(Clone)]
pub struct Work(Arc<Task>);

type Task = dyn Fn(&mut Edge) -> Result<()> + Send + Sync;

impl Work {
    /// Of kernels.
    pub fn of_kernels(work: impl Fn(&mut Edge) -> Result<()> + Send + Sync + 'static) -> Self {
        Self(Arc::new(work))
    }

    /// Of anything else, before and after which the work of a stream is not let overlap.
    pub fn new(work: impl Fn() -> Result<()> + Send + Sync + 'static) -> Self {
        Self::of_kernels(move |edge| {
            edge.cut();
            work()
        })
    }

    /// Does it.
    pub fn run(&self, edge: &mut Edge) -> Result<()> {
        self.0(edge)
    }
}

/// Does what is submitted, at once and one after another.
pub struct Stream {
    /// Its device.
    pub device: usize,
    capturable: bool,
    /// Locked while the stream works.
    edge: Mutex<Edge>,
    capture: Mutex<Option<Capture>>,
    /// The stream whose capture this one takes part in, since it waited for work of that, and which capture.
    joined: Mutex<Option<(Weak<Stream>, u64)>>,
}

struct Capture {
    id: u64,
    mode: Mode,
    thread: ThreadId,
    work: Vec<Work>,
    memory: GraphMemory,
    /// Streams that take part in it.
    joined: Vec<Arc<Stream>>,
    broken: bool,
}

/// Which calls of other functions a capture forbids.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Unsafe ones, in any thread.
    Global,
    /// Unsafe ones, in its thread.
    ThreadLocal,
    /// None.
    Relaxed,
}

static STREAMS: Handles<Stream> = Handles::new("stream");
/// Streams that are capturing, or were.
static CAPTURING: Mutex<Vec<Weak<Stream>>> = Mutex::new(Vec::new());
/// `CU_STREAM_PER_THREAD`; null and `CU_STREAM_LEGACY`, which is 1, are the default stream of the device.
const PER_THREAD_HANDLE: Handle = 2;

thread_local! {
    /// Never dropped: destructors of other thread-local variables may still free memory in these streams.
    static PER_THREAD: Cell<Option<&'static [Arc<Stream>]>> = const { Cell::new(None) };
}

impl Stream {
    fn new(device: usize, capturable: bool) -> Self {
        Self {
            device,
            capturable,
            edge: Mutex::new(Edge::new(device)),
            capture: Mutex::default(),
            joined: Mutex::default(),
        }
    }

    fn one_per_device(capturable: bool) -> Vec<Arc<Stream>> {
        (0..DEVICES).map(|device| Arc::new(Stream::new(device, capturable))).collect()
    }

    /// Does `work`, or keeps it for the graph that is being captured.
    pub fn submit(&self, work: Work) -> Result<()> {
        if device::current()? != self.device {
            let message = format!("the stream is of device {}, which is not current", self.device);
            return fail(INVALID_HANDLE, message);
        }
        let mut edge = lock(&self.edge);
        edge.order.next();
        let origin = self.origin();
        let capture = &origin.as_deref().unwrap_or(self).capture;
        if let Some(capture) = lock(capture).as_mut() {
            capture.check()?;
            capture.work.push(work);
            return Ok(());
        }
        work.run(&mut edge)
    }

    /// The stream whose capture this one takes part in.
    fn origin(&self) -> Option<Arc<Stream>> {
        let joined = lock(&self.joined);
        let (origin, id) = joined.as_ref()?;
        origin.upgrade().filter(|origin| origin.capture_id() == Some(*id))
    }

    /// Takes part in a capture from here on.
    fn join(self: &Arc<Self>, id: u64) -> Result<()> {
        if !self.capturable {
            return fail(CAPTURE_IMPLICIT, "the default stream cannot take part in a capture");
        }
        let origin =
            lock(&CAPTURING).iter().filter_map(Weak::upgrade).find(|stream| stream.capture_id() == Some(id));
        let Some(origin) = origin else {
            return fail(CAPTURED_EVENT, "the event was recorded in a capture that has ended");
        };
        *lock(&self.joined) = Some((Arc::downgrade(&origin), id));
        lock(&origin.capture).iter_mut().for_each(|capture| capture.joined.push(self.clone()));
        Ok(())
    }

    /// What is done when all that was submitted so far is.
    pub fn done(&self) -> Clock {
        lock(&self.edge).order.done().clone()
    }

    /// The host waited for all that was submitted.
    pub fn host_waited(&self) {
        self.cut();
        order::host_waited_for(&self.done());
    }

    /// What is submitted from here on starts after all that was submitted before.
    pub fn cut(&self) {
        lock(&self.edge).cut();
    }

    /// Memory of the stream's device; of the graph, while capturing.
    pub fn allocate(&self, bytes: usize) -> Result<u64> {
        if let Some(origin) = self.origin() {
            return origin.allocate(bytes);
        }
        let mut capture = lock(&self.capture);
        let Some(capture) = capture.as_mut() else {
            return memory::allocate(Owner::Device(self.device), bytes);
        };
        capture.check()?;
        let (address, work) = capture.memory.allocate(self.device, bytes)?;
        capture.work.push(work);
        Ok(address)
    }

    /// Frees memory; while capturing, that of the graph only.
    pub fn free(&self, address: u64) -> Result<()> {
        if let Some(origin) = self.origin() {
            return origin.free(address);
        }
        let mut capture = lock(&self.capture);
        let Some(capture) = capture.as_mut() else { return memory::free(address) };
        capture.check()?;
        let Some(work) = capture.memory.free(address) else {
            capture.broken = true;
            return fail(INVALID_VALUE, "a capture frees memory that it did not allocate");
        };
        capture.work.push(work);
        Ok(())
    }

    /// The capture that is going on.
    pub fn capture_id(&self) -> Option<u64> {
        let own = lock(&self.capture).as_ref().map(|capture| capture.id);
        own.or_else(|| self.origin().and_then(|origin| origin.capture_id()))
    }

    /// An error while capturing, which ends the capture too.
    pub fn forbid_in_capture(&self, what: &str) -> Result<()> {
        self.break_capture(CAPTURE_UNSUPPORTED, format!("{what} on a stream that is capturing"))
    }

    fn break_capture(&self, code: c_int, message: String) -> Result<()> {
        let origin = self.origin();
        let mut capture = lock(&origin.as_deref().unwrap_or(self).capture);
        match capture.as_mut() {
            None => Ok(()),
            Some(capture) => {
                capture.broken = true;
                fail(code, message)
            }
        }
    }
}

impl Capture {
    fn check(&self) -> Result<()> {
        if self.broken {
            return fail(CAPTURE_INVALIDATED, "something before made this capture invalid");
        }
        Ok(())
    }

    fn forbids_unsafe_calls(&self) -> bool {
        match self.mode {
            Mode::Global => true,
            Mode::ThreadLocal => self.thread == thread::current().id(),
            Mode::Relaxed => false,
        }
    }
}

/// The stream that `handle` stands for.
pub fn find(handle: Handle) -> Result<Arc<Stream>> {
    if handle > PER_THREAD_HANDLE {
        return STREAMS.get(handle);
    }
    let device = device::current()?;
    if handle == PER_THREAD_HANDLE {
        let streams = PER_THREAD.get().unwrap_or_else(|| Stream::one_per_device(true).leak());
        PER_THREAD.set(Some(streams));
        return Ok(streams[device].clone());
    }
    static LEGACY: OnceLock<Vec<Arc<Stream>>> = OnceLock::new();
    Ok(LEGACY.get_or_init(|| Stream::one_per_device(false))[device].clone())
}

/// An error if a capture forbids calls that might synchronize; that ends the capture too.
pub fn forbid_in_capture(what: &str) -> Result<()> {
    let streams: Vec<_> = lock(&CAPTURING).iter().filter_map(Weak::upgrade).collect();
    for stream in streams {
        if let Some(capture) = lock(&stream.capture).as_mut() {
            if capture.forbids_unsafe_calls() {
                capture.broken = true;
                return fail(CAPTURE_UNSUPPORTED, format!("{what} while a stream is capturing"));
            }
        }
    }
    Ok(())
}

/// An error if a stream of the device is capturing, in whichever thread and mode; that ends all these captures too.
pub fn forbid_while_capturing(device: usize, what: &str) -> Result<()> {
    let streams: Vec<_> = lock(&CAPTURING).iter().filter_map(Weak::upgrade).collect();
    let mut found = false;
    for stream in streams.into_iter().filter(|stream| stream.device == device) {
        if let Some(capture) = lock(&stream.capture).as_mut() {
            (capture.broken, found) = (true, true);
        }
    }
    match found {
        true => fail(CAPTURE_UNSUPPORTED, format!("{what} while a stream of the context is capturing")),
        false => Ok(()),
    }
}

fn create(stream: Out<Handle>, flags: c_uint) -> Result<()> {
    if flags > 1 {
        return fail(INVALID_VALUE, format!("flags of a stream: {flags}"));
    }
    stream.set(STREAMS.insert(Stream::new(device::current()?, true)))
}

driver! {
    /// A stream of the current device.
    fn cuStreamCreate(stream: Out<Handle>, flags: c_uint) {
        create(stream, flags)
    }

    /// Priorities mean nothing.
    fn cuStreamCreateWithPriority(stream: Out<Handle>, flags: c_uint, _priority: c_int) {
        create(stream, flags)
    }

    /// Forgets a stream.
    fn cuStreamDestroy_v2(stream: Handle) {
        STREAMS.remove(stream).map(drop)
    }

    /// Everything submitted is done already.
    fn cuStreamSynchronize(stream: Handle) {
        let stream = find(stream)?;
        stream.forbid_in_capture("cuStreamSynchronize")?;
        stream.host_waited();
        Ok(())
    }

    /// Everything submitted is done already.
    fn cuStreamQuery(stream: Handle) {
        let stream = find(stream)?;
        stream.forbid_in_capture("cuStreamQuery")?;
        stream.host_waited();
        Ok(())
    }

    /// Captured work does not wait for other work; who waits for captured work takes part in the capture.
    fn cuStreamWaitEvent(stream: Handle, event: Handle, _flags: c_uint) {
        let (stream, event) = (find(stream)?, EVENTS.get(event)?);
        stream.cut();
        let event = event.recorded();
        match (stream.capture_id(), event.capture) {
            (None, None) => (),
            (None, Some(id)) => stream.join(id)?,
            (Some(capture), Some(id)) if capture == id => (),
            (Some(_), None) if event.time.is_none() => (),
            (Some(_), _) => {
                let message = "a capture waits for work outside of it";
                stream.break_capture(CAPTURE_ISOLATION, message.into())?;
            }
        }
        lock(&stream.edge).order.wait_for(&event.done);
        Ok(())
    }

    /// From here on, submitted work is kept for a graph.
    fn cuStreamBeginCapture_v2(stream: Handle, mode: c_int) {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let stream = find(stream)?;
        if !stream.capturable {
            return fail(CAPTURE_IMPLICIT, "the default stream cannot capture");
        }
        let mode = match mode {
            0 => Mode::Global,
            1 => Mode::ThreadLocal,
            2 => Mode::Relaxed,
            _ => return fail(INVALID_VALUE, format!("capture mode {mode}")),
        };
        let mut capture = lock(&stream.capture);
        if capture.is_some() {
            return fail(INVALID_VALUE, "the stream is capturing already");
        }
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        *capture = Some(Capture {
            id,
            mode,
            thread: thread::current().id(),
            work: Vec::new(),
            memory: GraphMemory::default(),
            joined: Vec::new(),
            broken: false,
        });
        drop(capture);
        let mut capturing = lock(&CAPTURING);
        capturing.retain(|other| other.strong_count() > 0 && !other.ptr_eq(&Arc::downgrade(&stream)));
        capturing.push(Arc::downgrade(&stream));
        drop(capturing);
        // So that others get to run while this goes on, as they do while a GPU's driver records.
        thread::sleep(Duration::from_millis(5));
        Ok(())
    }

    /// Makes a graph of what was submitted.
    fn cuStreamEndCapture(stream: Handle, graph: Out<Handle>) {
        let stream = find(stream)?;
        let order = &lock(&stream.edge).order;
        let mut current = lock(&stream.capture);
        match current.as_ref() {
            None => return fail(CAPTURE_UNMATCHED, "the stream is not capturing"),
            Some(capture) if capture.mode != Mode::Relaxed && capture.thread != thread::current().id() => {
                return fail(CAPTURE_WRONG_THREAD, "the capture was begun in another thread");
            }
            Some(_) => (),
        }
        let Some(capture) = current.take() else { return Ok(()) };
        let unjoined = capture.joined.iter().any(|other| !order.follows(&lock(&other.edge).order));
        let joined = match unjoined {
            true => fail(CAPTURE_UNJOINED, "a stream takes part in the capture for which the first one does not wait"),
            false => Ok(()),
        };
        if let Err(error) = capture.check().and(joined) {
            graph.set(0)?;
            return Err(error);
        }
        graph.set(GRAPHS.insert(Graph { device: stream.device, work: capture.work, memory: Arc::new(capture.memory) }))
    }

    /// Whether the stream is capturing.
    fn cuStreamIsCapturing(stream: Handle, status: Out<c_int>) {
        let stream = find(stream)?;
        let origin = stream.origin();
        let capture = lock(&origin.as_ref().unwrap_or(&stream).capture);
        status.set(match capture.as_ref() {
            None => 0,
            Some(Capture { broken: false, .. }) => 1,
            Some(Capture { broken: true, .. }) => 2,
        })
    }
}
