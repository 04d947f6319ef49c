//! Messages between rank 0 and another rank after their handshake, over TCP: encrypted, authenticated, in order.

use super::text::PeerText;
use super::time_until;
use serde::{Deserialize, Serialize};
use snow::StatelessTransportState;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Bytes that encryption adds to a message.
pub const TAG: usize = 16;
/// The connection to a side that does not take a message within this time is lost.
const WRITING: Duration = Duration::from_secs(10);

#[derive(Debug, Serialize, Deserialize)]
pub enum Message {
    /// All ranks are here: what rank 0 broadcasts, and how long a rank may be silent.
    Welcome { token: Vec<u8>, silence: Duration },
    /// A rank has failed, or is refused: all is over.
    Failed { rank: usize, problem: PeerText },
    /// The sender has done its work.
    Left,
    /// All ranks have.
    AllLeft,
    /// The sender is there.
    Alive,
}

/// One side's keys after a handshake. A message is of one number and direction: it cannot be repeated, left out, moved or
/// sent back.
#[derive(Debug)]
pub struct Session {
    pub keys: StatelessTransportState,
    /// Messages that the handshake has sent with them, and received.
    pub sent: u64,
    pub received: u64,
}

impl Session {
    /// The two halves of a connection, which different threads may use.
    pub fn over(self, stream: TcpStream) -> io::Result<(Sender, Receiver)> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(WRITING))?;
        let Self { keys, sent, received } = self;
        let keys = Arc::new(keys);
        let receiver =
            Receiver { stream: stream.try_clone()?, keys: Arc::clone(&keys), received, buffer: Vec::new() };
        Ok((Sender(Mutex::new(Outgoing { stream, keys, sent })), receiver))
    }
}

/// Sends messages.
#[derive(Debug)]
pub struct Sender(Mutex<Outgoing>);

#[derive(Debug)]
struct Outgoing {
    stream: TcpStream,
    keys: Arc<StatelessTransportState>,
    /// Messages so far, which is the nonce of the next.
    sent: u64,
}

impl Sender {
    pub fn send(&self, message: &Message) -> io::Result<()> {
        self.send_bytes(&serde_json::to_vec(message)?)
    }

    /// Sends what may be no message.
    pub fn send_bytes(&self, message: &[u8]) -> io::Result<()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).send(message)
    }

    /// Writes to the connection as one would who does not know the keys.
    #[cfg(feature = "testing")]
    pub fn add(&self, bytes: &[u8]) {
        let mut outgoing = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        outgoing.stream.write_all(bytes).expect("a connection");
    }
}

impl Outgoing {
    fn send(&mut self, message: &[u8]) -> io::Result<()> {
        let mut sealed = vec![0; message.len() + TAG];
        // The longest that a handshake's keys may encrypt.
        let length = u16::try_from(sealed.len())
            .map_err(|_| io::Error::other(format!("a message of {} bytes is too long", message.len())))?;
        let nonce = self.sent;
        // A nonce is used once, whatever comes of it.
        self.sent = nonce.checked_add(1).ok_or_else(|| io::Error::other("all nonces are used"))?;
        self.keys.write_message(nonce, message, &mut sealed).map_err(io::Error::other)?;
        let written = self.stream.write_all(&[&length.to_le_bytes()[..], &sealed].concat());
        if written.is_err() {
            // Nobody could tell where the next message begins.
            let _ = self.stream.shutdown(Shutdown::Both);
        }
        written
    }
}

/// Receives messages.
#[derive(Debug)]
pub struct Receiver {
    stream: TcpStream,
    keys: Arc<StatelessTransportState>,
    /// Messages so far, which is the nonce of the next.
    received: u64,
    /// What has arrived of a message that is not complete.
    buffer: Vec<u8>,
}

impl Receiver {
    /// The next message, or none if it is not complete at `deadline`.
    pub fn receive(&mut self, deadline: Instant) -> io::Result<Option<Message>> {
        loop {
            if let Some(message) = self.take_message()? {
                return Ok(Some(message));
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            self.stream.set_read_timeout(Some(time_until(deadline)))?;
            let mut piece = [0; 4096];
            match self.stream.read(&mut piece) {
                Ok(0) => return Err(io::Error::new(ErrorKind::UnexpectedEof, "the connection was closed")),
                Ok(count) => self.buffer.extend(piece.iter().take(count)),
                Err(error) if is_passing(error.kind()) => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn take_message(&mut self) -> io::Result<Option<Message>> {
        let Some((length, rest)) = self.buffer.split_first_chunk::<2>() else { return Ok(None) };
        let length = usize::from(u16::from_le_bytes(*length));
        let Some(sealed) = rest.get(..length) else { return Ok(None) };
        let mut message = vec![0; length];
        let opened = self.keys.read_message(self.received, sealed, &mut message).map_err(|_| strange())?;
        self.received = self.received.checked_add(1).ok_or_else(strange)?;
        self.buffer.drain(..2 + length);
        let message = message.get(..opened).ok_or_else(strange)?;
        serde_json::from_slice(message).map(Some).map_err(|_| strange())
    }
}

/// What the error of a connection says about the rank at its other end.
pub fn lost(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::InvalidData => error.to_string(),
        _ => format!("its process has ended or cannot be reached: {error}"),
    }
}

/// Whether there may be something to read later.
pub fn is_passing(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

fn strange() -> io::Error {
    io::Error::new(ErrorKind::InvalidData, "sent something that no rank of candle-quant sends")
}

#[cfg(test)]
mod tests {
    use super::super::handshake::tests::connection;
    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    fn failed(problem: &str) -> Message {
        Message::Failed { rank: 1, problem: problem.into() }
    }

    /// What one side has written, as it is on the wire.
    fn on_the_wire(receiver: &mut Receiver, messages: usize) -> Vec<Vec<u8>> {
        let mut read = |length: usize| {
            let mut bytes = vec![0; length];
            receiver.stream.read_exact(&mut bytes).unwrap();
            bytes
        };
        let mut frame = |_| {
            let length = read(2);
            let sealed = read(usize::from(u16::from_le_bytes([length[0], length[1]])));
            [length, sealed].concat()
        };
        (0..messages).map(&mut frame).collect()
    }

    #[test]
    fn messages_arrive_in_order_and_cannot_be_read_on_the_way() {
        let ((sender, mut of_rank_0), (of_rank, mut receiver)) = connection();
        for count in 0..3 {
            sender.send(&failed(&format!("problem {count}"))).unwrap();
            of_rank.send(&Message::Left).unwrap();
        }
        for count in 0..3 {
            let Some(Message::Failed { rank: 1, problem }) = receiver.receive(soon()).unwrap() else {
                panic!()
            };
            assert_eq!(problem.to_string(), format!("problem {count}"));
            assert!(matches!(of_rank_0.receive(soon()).unwrap(), Some(Message::Left)));
        }
        sender.send(&failed("a problem that nobody else should know")).unwrap();
        let frames = on_the_wire(&mut receiver, 1);
        assert!(!frames[0].windows(7).any(|bytes| bytes == b"problem" || bytes == b"\"Failed"));
    }

    /// Left out, repeated, exchanged, changed, sent back, cut short, or never encrypted: it is noticed.
    #[test]
    fn what_somebody_does_to_messages_on_the_way_is_noticed() {
        type Attack = fn(&[Vec<u8>]) -> Vec<u8>;
        let attacks: [Attack; 7] = [
            |frames| frames[1].clone(),
            |frames| [&frames[0][..], &frames[0]].concat(),
            |frames| [&frames[1][..], &frames[0]].concat(),
            |frames| {
                let mut changed = frames[0].clone();
                changed[5] ^= 1;
                changed
            },
            |_| [&[0; 2][..], &[0; 40]].concat(),
            |_| [&[15, 0][..], &[0; 15]].concat(),
            |_| b"\x07\0\"Alive\"".to_vec(),
        ];
        for (number, attack) in attacks.iter().enumerate() {
            let ((sender, _of_rank_0), (_of_rank, mut receiver)) = connection();
            sender.send(&Message::Alive).unwrap();
            sender.send(&Message::Alive).unwrap();
            receiver.buffer = attack(&on_the_wire(&mut receiver, 2));
            let error = loop {
                match receiver.receive(soon()) {
                    Ok(message) => assert!(matches!(message, Some(Message::Alive))),
                    Err(error) => break error,
                }
            };
            assert_eq!(error.kind(), ErrorKind::InvalidData, "{number}");
        }
        // What a side has sent itself.
        let ((sender, mut of_rank_0), (_of_rank, mut receiver)) = connection();
        sender.send(&Message::Alive).unwrap();
        of_rank_0.buffer = on_the_wire(&mut receiver, 1).concat();
        assert_eq!(of_rank_0.receive(soon()).unwrap_err().kind(), ErrorKind::InvalidData);
    }

    #[test]
    fn what_does_not_fit_into_a_message_is_refused_and_the_longest_problem_and_token_fit() {
        let ((sender, _of_rank_0), (_of_rank, mut receiver)) = connection();
        let welcome = |length| Message::Welcome { token: vec![255; length], silence: Duration::MAX };
        assert!(sender.send(&welcome(1 << 16)).is_err());
        sender.send(&welcome(super::super::MOST_TOKEN)).unwrap();
        sender.send(&failed(&"\"".repeat(50_000))).unwrap();
        for _ in 0..2 {
            assert!(receiver.receive(soon()).unwrap().is_some());
        }
    }
}
