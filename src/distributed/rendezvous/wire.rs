//! Messages between rank 0 and another rank, over TCP.

use serde::{Deserialize, Serialize};
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Of another number, nothing is understood but [`Message::Hello`] and [`Message::Failed`].
pub const PROTOCOL: u32 = 1;
/// Bytes of a message, at most.
const LIMIT: usize = 1 << 16;
/// A message that the other side does not take within this time is lost.
const WRITING: Duration = Duration::from_secs(10);

pub type Digest = [u8; 32];

#[derive(Debug, Serialize, Deserialize)]
pub enum Message {
    /// A rank asks rank 0 to let it in.
    Hello { protocol: u32, version: String, rank: usize, world_size: usize, nonce: Digest },
    /// Rank 0 asks whether it knows the secret.
    Challenge { nonce: Digest },
    /// It does.
    Proof { proof: Digest },
    /// All ranks are here. Rank 0 knows the secret too, and broadcasts what only rank 0 can know.
    Welcome { proof: Digest, token: Vec<u8> },
    /// A rank has failed, or is refused: all is over.
    Failed { rank: usize, problem: String },
    /// The sender has done its work.
    Left,
    /// All ranks have.
    AllLeft,
    /// The sender is there.
    Alive,
}

/// The two halves of a connection, which different threads may use.
pub fn wire(stream: TcpStream) -> io::Result<(Sender, Receiver)> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(WRITING))?;
    let receiver = Receiver { stream: stream.try_clone()?, buffer: Vec::new() };
    Ok((Sender(Mutex::new(stream)), receiver))
}

/// Sends messages.
#[derive(Debug)]
pub struct Sender(Mutex<TcpStream>);

impl Sender {
    /// Returns the bytes of the message.
    pub fn send(&self, message: &Message) -> io::Result<Vec<u8>> {
        let bytes = serde_json::to_vec(message)?;
        let length = u32::try_from(bytes.len()).ok().filter(|&length| length as usize <= LIMIT);
        let length = length.ok_or_else(|| io::Error::other("a message of more than 64 KiB"))?;
        let frame = [&length.to_le_bytes()[..], &bytes].concat();
        self.0.lock().unwrap_or_else(PoisonError::into_inner).write_all(&frame)?;
        Ok(bytes)
    }
}

/// Receives messages.
#[derive(Debug)]
pub struct Receiver {
    stream: TcpStream,
    /// What has arrived of a message that is not complete.
    buffer: Vec<u8>,
}

impl Receiver {
    /// The next message and its bytes, or none if it is not complete at `deadline`.
    pub fn receive(&mut self, deadline: Instant) -> io::Result<Option<(Message, Vec<u8>)>> {
        loop {
            if let Some(bytes) = self.take_message()? {
                return Ok(Some((parse(&bytes)?, bytes)));
            }
            let rest = deadline.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                return Ok(None);
            }
            // Zero would mean without end.
            self.stream.set_read_timeout(Some(rest.max(Duration::from_millis(1))))?;
            let mut piece = [0; 4096];
            match self.stream.read(&mut piece) {
                Ok(0) => return Err(io::Error::new(ErrorKind::UnexpectedEof, "the connection was closed")),
                Ok(count) => self.buffer.extend(piece.iter().take(count)),
                Err(error) if is_passing(error.kind()) => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn take_message(&mut self) -> io::Result<Option<Vec<u8>>> {
        let Some((length, rest)) = self.buffer.split_first_chunk::<4>() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        if length > LIMIT {
            return Err(strange());
        }
        let Some(message) = rest.get(..length) else { return Ok(None) };
        let message = message.to_vec();
        self.buffer.drain(..4 + length);
        Ok(Some(message))
    }
}

/// What the error of a connection says about the rank at its other end.
pub fn lost(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::InvalidData => error.to_string(),
        _ => format!("its process has ended or cannot be reached: {error}"),
    }
}

fn is_passing(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

fn parse(bytes: &[u8]) -> io::Result<Message> {
    serde_json::from_slice(bytes).map_err(|_| strange())
}

fn strange() -> io::Error {
    io::Error::new(ErrorKind::InvalidData, "sent something that no rank of candle-quant sends")
}
