//! Which work comes before which. Streams work side by side on a GPU, but for what events and the host make them wait for:
//! memory that a kernel or a product of cuBLAS changes must not be used by work of another stream that waits for
//! neither.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Mutex;

use crate::handles::lock;
use crate::memory::Region;
use crate::status::{fail, Result, LAUNCH_FAILED};

/// How many pieces of each stream's work are done.
#[derive(Clone, Default)]
pub struct Clock(HashMap<u64, u64>);

impl Clock {
    fn join(&mut self, other: &Clock) {
        for (stream, done) in &other.0 {
            let mine = self.0.entry(*stream).or_default();
            *mine = (*mine).max(*done);
        }
    }

    fn has_done(&self, stream: u64, piece: u64) -> bool {
        self.0.get(&stream).is_some_and(|done| *done >= piece)
    }
}

/// The last pieces of work that used an allocation: its writer, and who read that, by stream.
#[derive(Default)]
struct Uses {
    written: Option<(u64, u64)>,
    read: HashMap<u64, u64>,
}

static USES: Mutex<Option<HashMap<u64, Uses>>> = Mutex::new(None);
/// What the host has waited for. All threads count as one, so that too little is found rather than too much.
static HOST: Mutex<Option<Clock>> = Mutex::new(None);
/// The device of each stream, and its last piece of work.
static SUBMITTED: Mutex<Option<HashMap<u64, (usize, u64)>>> = Mutex::new(None);

/// The place of a stream's work among that of others.
pub struct Order {
    device: usize,
    stream: u64,
    /// What is done before the piece of work that is being submitted starts, and this piece.
    done: Clock,
}

impl Order {
    /// Of a new stream.
    pub fn new(device: usize) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self { device, stream: NEXT.fetch_add(1, Ordering::Relaxed), done: Clock::default() }
    }

    /// A piece of work is submitted.
    pub fn next(&mut self) {
        self.done.join(lock(&HOST).get_or_insert_default());
        let piece = self.done.0.entry(self.stream).or_default();
        *piece += 1;
        lock(&SUBMITTED).get_or_insert_default().insert(self.stream, (self.device, *piece));
    }

    /// What is done when all that was submitted so far is.
    pub fn done(&self) -> &Clock {
        &self.done
    }

    /// What is submitted from here on comes after that.
    pub fn wait_for(&mut self, done: &Clock) {
        self.done.join(done);
    }

    /// Whether this stream waited for all the work of another one.
    pub fn follows(&self, other: &Order) -> bool {
        other.done.0.get(&other.stream).is_none_or(|piece| self.done.has_done(other.stream, *piece))
    }

    /// The piece of work uses memory.
    pub fn uses(&self, region: Region, writes: bool) -> Result<()> {
        let mut uses = lock(&USES);
        let uses = uses.get_or_insert_default().entry(region.base).or_default();
        let waited = |(stream, piece): (u64, u64)| stream == self.stream || self.done.has_done(stream, piece);
        let races = |who: &str| {
            let does = if writes { "writes" } else { "reads" };
            let message = format!(
                "{does} {} bytes that a kernel of another stream {who}, without waiting for it",
                region.size
            );
            fail(LAUNCH_FAILED, message)
        };
        if !uses.written.is_none_or(waited) {
            return races("writes");
        }
        if writes && !uses.read.iter().all(|(stream, piece)| waited((*stream, *piece))) {
            return races("reads");
        }
        let piece = self.done.0.get(&self.stream).copied().unwrap_or_default();
        if writes {
            *uses = Uses { written: Some((self.stream, piece)), read: HashMap::new() };
        } else {
            uses.read.insert(self.stream, piece);
        }
        Ok(())
    }
}

/// The host waited for that.
pub fn host_waited_for(done: &Clock) {
    lock(&HOST).get_or_insert_default().join(done);
}

/// The host waited for all work of a device.
pub fn host_waited(device: usize) {
    let submitted = lock(&SUBMITTED);
    let of_device = submitted.iter().flatten().filter(|(_, (of, _))| *of == device);
    host_waited_for(&Clock(of_device.map(|(stream, (_, piece))| (*stream, *piece)).collect()));
}

/// An allocation begins there: nobody has used it.
pub fn forget(base: u64) {
    lock(&USES).get_or_insert_default().remove(&base);
}
