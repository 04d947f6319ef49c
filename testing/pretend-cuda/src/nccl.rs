//! NCCL between threads and between processes of one machine.
//!
//! Whoever makes an id starts a hub, to which every rank is connected over TCP: it takes what all ranks bring to
//! an operation, and returns what each gets. An operation is done when its function returns; inside a group too.
//! As with the real one, nobody is told when a rank is gone: the others wait.

use std::cell::Cell;
use std::ffi::c_int;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::Mutex;
use std::{slice, thread};

use half::{bf16, f16};

use crate::argument::Out;
use crate::handles::{lock, Handle, Handles};
use crate::memory;
use crate::status::{fail, Result, INVALID_VALUE, LAUNCH_FAILED};
use crate::stream::{self, Work};

/// `ncclUniqueId`: the port of the hub.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId([u8; 128]);

/// An address of a device.
type Address = u64;

struct Communicator {
    world_size: usize,
    hub: Mutex<TcpStream>,
    /// The same connection, to be closed while somebody waits for an answer.
    to_close: TcpStream,
}

static COMMUNICATORS: Handles<Communicator> = Handles::new("NCCL communicator");

thread_local! {
    static GROUPS: Cell<usize> = const { Cell::new(0) };
}

const SUM: c_int = 0;
const ALL_REDUCE: u64 = 0;
const BROADCAST: u64 = 1;
const REDUCE: u64 = 2;
const ALL_GATHER: u64 = 3;
const REDUCE_SCATTER: u64 = 4;

/// What a rank brings: an operation, its dtype and root, and the number of bytes that follow.
type Header = [u64; 4];

fn write_message(mut to: &TcpStream, header: Header, bytes: &[u8]) -> io::Result<()> {
    let header: Vec<u8> = header.iter().flat_map(|number| number.to_le_bytes()).collect();
    to.write_all(&[&header, bytes].concat())
}

fn read_message(mut from: &TcpStream) -> io::Result<(Header, Vec<u8>)> {
    let mut header = Header::default();
    for number in &mut header {
        let mut bytes = [0; 8];
        from.read_exact(&mut bytes)?;
        *number = u64::from_le_bytes(bytes);
    }
    let mut bytes = vec![0; header[3] as usize];
    from.read_exact(&mut bytes)?;
    Ok((header, bytes))
}

/// Serves one group until a rank is gone or does something else than the others. Connections stay open then.
fn serve(listener: TcpListener) -> io::Result<()> {
    let mut ranks: Vec<Option<TcpStream>> = Vec::new();
    while ranks.is_empty() || ranks.iter().any(Option::is_none) {
        let (stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        let ([rank, world_size, ..], _) = read_message(&stream)?;
        ranks.resize_with(world_size as usize, || None);
        ranks[rank as usize] = Some(stream);
    }
    let ranks: Vec<TcpStream> = ranks.into_iter().flatten().collect();
    for rank in &ranks {
        write_message(rank, [0; 4], &[])?;
    }
    let served = (|| loop {
        let brought = ranks.iter().map(read_message).collect::<io::Result<Vec<_>>>()?;
        let [operation, dtype, root, _] = brought[0].0;
        if brought.iter().any(|([other, ..], _)| *other != operation) {
            return Err(io::Error::other("ranks are at different operations"));
        }
        let parts: Vec<&[u8]> = brought.iter().map(|(_, bytes)| bytes.as_slice()).collect();
        let sum = || sum(dtype, &parts).ok_or_else(|| io::Error::other("unlike parts of a sum"));
        let given: Vec<Vec<u8>> = match operation {
            ALL_REDUCE => vec![sum()?; ranks.len()],
            BROADCAST => vec![parts[root as usize].to_vec(); ranks.len()],
            REDUCE => {
                let mut given = vec![Vec::new(); ranks.len()];
                given[root as usize] = sum()?;
                given
            }
            ALL_GATHER => vec![parts.concat(); ranks.len()],
            _ => {
                let sum = sum()?;
                sum.chunks(sum.len().div_ceil(ranks.len()).max(1)).map(<[u8]>::to_vec).collect()
            }
        };
        for (rank, bytes) in ranks.iter().zip(given) {
            write_message(rank, [0, 0, 0, bytes.len() as u64], &bytes)?;
        }
    })();
    // The last one closes without a word, and then nobody waits.
    while ranks.iter().any(|rank| matches!((&mut { rank }).read(&mut [0; 64]), Ok(1..))) {}
    served
}

/// In the order of ranks, rounded to the dtype after each addition.
fn sum(dtype: u64, parts: &[&[u8]]) -> Option<Vec<u8>> {
    macro_rules! of {
        ($type:ty, |$a:ident, $b:ident| $sum:expr) => {{
            const SIZE: usize = size_of::<$type>();
            let values = |part: &[u8]| -> Option<Vec<$type>> {
                part.chunks(SIZE).map(|bytes| Some(<$type>::from_le_bytes(bytes.try_into().ok()?))).collect()
            };
            let mut total = values(parts.first()?)?;
            for part in &parts[1..] {
                let part = values(part)?;
                if part.len() != total.len() {
                    return None;
                }
                for ($a, $b) in total.iter_mut().zip(part) {
                    *$a = $sum;
                }
            }
            total.iter().flat_map(|value| value.to_le_bytes()).collect()
        }};
    }
    Some(match dtype {
        0 => of!(i8, |a, b| a.wrapping_add(b)),
        1 => of!(u8, |a, b| a.wrapping_add(b)),
        2 => of!(i32, |a, b| a.wrapping_add(b)),
        3 => of!(u32, |a, b| a.wrapping_add(b)),
        4 => of!(i64, |a, b| a.wrapping_add(b)),
        5 => of!(u64, |a, b| a.wrapping_add(b)),
        6 => of!(f16, |a, b| f16::from_f32(a.to_f32() + b.to_f32())),
        7 => of!(f32, |a, b| *a + b),
        8 => of!(f64, |a, b| *a + b),
        9 => of!(bf16, |a, b| bf16::from_f32(a.to_f32() + b.to_f32())),
        _ => return None,
    })
}

fn size_of_dtype(dtype: c_int) -> Result<usize> {
    match dtype {
        0 | 1 => Ok(1),
        6 | 9 => Ok(2),
        2 | 3 | 7 => Ok(4),
        4 | 5 | 8 => Ok(8),
        _ => fail(INVALID_VALUE, format!("dtype {dtype}")),
    }
}

/// Brings `sent` elements to an operation, and writes what comes back.
struct Call {
    operation: u64,
    dtype: c_int,
    root: c_int,
    from: Address,
    sent: usize,
    to: Address,
    received: usize,
}

impl Call {
    fn submit(self, communicator: Handle, stream: Handle) -> Result<()> {
        let communicator = COMMUNICATORS.get(communicator)?;
        let stream = stream::find(stream)?;
        stream.submit(Work::new(move || self.run(&communicator)))
    }

    fn run(&self, communicator: &Communicator) -> Result<()> {
        let size = size_of_dtype(self.dtype)?;
        let (sent, received) = (self.sent * size, self.received * size);
        let bytes: &[u8] = match sent {
            0 => &[],
            _ => {
                memory::check(self.from, sent, "what NCCL sends")?;
                // SAFETY: device memory that was just checked to hold this many bytes; the stream waits for this.
                unsafe { slice::from_raw_parts(self.from as *const u8, sent) }
            }
        };
        let hub = lock(&communicator.hub);
        let header = [self.operation, self.dtype as u64, self.root as u64, sent as u64];
        let answer = write_message(&hub, header, bytes).and_then(|()| read_message(&hub));
        let Ok((_, answer)) = answer else { return fail(LAUNCH_FAILED, "the communicator was aborted") };
        if received == 0 {
            return Ok(());
        }
        if answer.len() != received {
            let message = format!("{} bytes came where {received} were expected", answer.len());
            return fail(INVALID_VALUE, message);
        }
        memory::check(self.to, received, "what NCCL receives")?;
        // SAFETY: device memory that was just checked to hold this many bytes; the stream waits for this.
        unsafe { slice::from_raw_parts_mut(self.to as *mut u8, received) }.copy_from_slice(&answer);
        Ok(())
    }
}

/// Defines functions of NCCL.
macro_rules! nccl {
    ($($(#[$meta:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        $(#[$meta])*
        #[no_mangle]
        pub extern "C" fn $name($($argument: $type),*) -> c_int {
            let run = move || -> Result<()> { $body };
            match run() {
                Ok(()) => 0,
                Err(error) => {
                    eprintln!("pretend CUDA: {}: {}", stringify!($name), error.message());
                    // ncclInvalidArgument
                    4
                }
            }
        }
    )*};
}

fn connect(id: UniqueId, rank: u64, world_size: u64) -> io::Result<TcpStream> {
    let port = u16::from_le_bytes([id.0[0], id.0[1]]);
    let hub = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    hub.set_nodelay(true)?;
    write_message(&hub, [rank, world_size, 0, 0], &[])?;
    read_message(&hub)?;
    Ok(hub)
}

fn check_sum(operation: c_int) -> Result<()> {
    match operation {
        SUM => Ok(()),
        other => fail(INVALID_VALUE, format!("reduction {other} is not there")),
    }
}

nccl! {
    /// Starts a hub.
    fn ncclGetUniqueId(id: Out<UniqueId>) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|hub| Ok((hub.local_addr()?, hub)));
        let Ok((address, listener)) = listener else { return fail(INVALID_VALUE, "no port for a hub") };
        thread::spawn(move || {
            if let Err(error) = serve(listener) {
                eprintln!("pretend CUDA: NCCL: {error}");
            }
        });
        let mut bytes = [0; 128];
        bytes[..2].copy_from_slice(&address.port().to_le_bytes());
        id.set(UniqueId(bytes))
    }

    /// Waits for all ranks.
    fn ncclCommInitRank(communicator: Out<Handle>, world_size: c_int, id: UniqueId, rank: c_int) {
        crate::device::current()?;
        if !(0..world_size).contains(&rank) {
            return fail(INVALID_VALUE, format!("rank {rank} of {world_size}"));
        }
        let hub = connect(id, rank as u64, world_size as u64).and_then(|hub| Ok((hub.try_clone()?, hub)));
        let Ok((to_close, hub)) = hub else { return fail(INVALID_VALUE, "no connection to the hub") };
        let world_size = world_size as usize;
        communicator.set(COMMUNICATORS.insert(Communicator { world_size, hub: Mutex::new(hub), to_close }))
    }

    /// Ends what is under way.
    fn ncclCommAbort(communicator: Handle) {
        let communicator = COMMUNICATORS.remove(communicator)?;
        // It may be closed.
        let _ = communicator.to_close.shutdown(Shutdown::Both);
        Ok(())
    }

    /// Operations come one after another in a group too.
    fn ncclGroupStart() {
        GROUPS.set(GROUPS.get() + 1);
        Ok(())
    }

    /// Every start has an end.
    fn ncclGroupEnd() {
        match GROUPS.get().checked_sub(1) {
            None => fail(INVALID_VALUE, "no group was started"),
            Some(rest) => {
                GROUPS.set(rest);
                Ok(())
            }
        }
    }

    /// The sum of all, for all.
    fn ncclAllReduce(
        from: Address,
        to: Address,
        count: usize,
        dtype: c_int,
        reduction: c_int,
        communicator: Handle,
        stream: Handle,
    ) {
        check_sum(reduction)?;
        Call { operation: ALL_REDUCE, dtype, root: 0, from, sent: count, to, received: count }
            .submit(communicator, stream)
    }

    /// The sum of all, for `root`.
    fn ncclReduce(
        from: Address,
        to: Address,
        count: usize,
        dtype: c_int,
        reduction: c_int,
        root: c_int,
        communicator: Handle,
        stream: Handle,
    ) {
        check_sum(reduction)?;
        let received = if to == 0 { 0 } else { count };
        Call { operation: REDUCE, dtype, root, from, sent: count, to, received }.submit(communicator, stream)
    }

    /// What `root` has, for all.
    fn ncclBroadcast(
        from: Address,
        to: Address,
        count: usize,
        dtype: c_int,
        root: c_int,
        communicator: Handle,
        stream: Handle,
    ) {
        // Others than root pass anything, which need not be so long.
        let sent = if memory::check(from, count * size_of_dtype(dtype)?, "").is_ok() { count } else { 0 };
        Call { operation: BROADCAST, dtype, root, from, sent, to, received: count }.submit(communicator, stream)
    }

    /// What all have, for all.
    fn ncclAllGather(
        from: Address,
        to: Address,
        count: usize,
        dtype: c_int,
        communicator: Handle,
        stream: Handle,
    ) {
        let received = count * COMMUNICATORS.get(communicator)?.world_size;
        Call { operation: ALL_GATHER, dtype, root: 0, from, sent: count, to, received }
            .submit(communicator, stream)
    }

    /// The sum of all, a share for each.
    fn ncclReduceScatter(
        from: Address,
        to: Address,
        count: usize,
        dtype: c_int,
        reduction: c_int,
        communicator: Handle,
        stream: Handle,
    ) {
        check_sum(reduction)?;
        let sent = count * COMMUNICATORS.get(communicator)?.world_size;
        Call { operation: REDUCE_SCATTER, dtype, root: 0, from, sent, to, received: count }
            .submit(communicator, stream)
    }
}
