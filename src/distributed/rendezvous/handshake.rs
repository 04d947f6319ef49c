//! How rank 0 and another rank convince each other, before anything else is said.

use super::wire::{lost, wire, Digest, Message, Receiver, Sender, PROTOCOL};
use crate::distributed::launcher_env::RankInfo;
use crate::{Error, Result};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use std::net::TcpStream;
use std::time::Instant;
use std::{env, fmt, io};

/// What only the ranks of one group know. It is never sent: both sides prove that they know it, by the
/// HMAC-SHA256 of random numbers of both.
#[derive(Clone)]
pub struct Secret(Vec<u8>);

/// Bytes of a secret, at least: an eavesdropper can try all short ones.
const SHORTEST: usize = 16;
/// Where [`Secret::from_env`] looks.
const VARIABLE: &str = "CANDLE_QUANT_SECRET";
const VERSION: &str = env!("CARGO_PKG_VERSION");

impl Secret {
    /// Any bytes, the same for all ranks.
    ///
    /// # Errors
    /// If there are less than 16.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Self> {
        let bytes = bytes.into();
        if bytes.len() < SHORTEST {
            let expected = format!("{SHORTEST} bytes or more, such as those of `openssl rand -hex 32`");
            return Err(Error::mismatch("secret of the ranks", expected, format!("{} bytes", bytes.len())));
        }
        Ok(Self(bytes))
    }

    /// The text of the environment variable `CANDLE_QUANT_SECRET`.
    ///
    /// # Errors
    /// If it is not set, or too short.
    pub fn from_env() -> Result<Self> {
        let text = env::var(VARIABLE).map_err(|_| {
            let expected = "the same on all ranks, such as the output of `openssl rand -hex 32`";
            Error::mismatch(format!("environment variable {VARIABLE}"), expected, "nothing; it has to be set")
        })?;
        Self::new(text.trim())
    }

    /// Of all parts in order, whose lengths are part of it.
    fn mac(&self, parts: &[&[u8]]) -> Result<Hmac<Sha256>> {
        let mac = Hmac::new_from_slice(&self.0);
        let mut mac = mac.map_err(|_| Error::mismatch("secret of the ranks", "a key for HMAC", "another"))?;
        for part in parts {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        Ok(mac)
    }

    fn prove(&self, parts: &[&[u8]]) -> Result<Digest> {
        Ok(self.mac(parts)?.finalize().into_bytes().into())
    }

    fn is_proven(&self, proof: &Digest, parts: &[&[u8]]) -> bool {
        self.mac(parts).is_ok_and(|mac| mac.verify_slice(proof).is_ok())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

// A proof of one side cannot serve as one of the other.
const RANK: &[u8] = b"candle-quant rank";
const MASTER: &[u8] = b"candle-quant rank 0";

/// A rank that rank 0 believes.
#[derive(Debug)]
pub struct PendingPeer {
    pub rank: usize,
    pub sender: Sender,
    pub receiver: Receiver,
    hello: Vec<u8>,
    challenge: Vec<u8>,
}

/// Why rank 0 let somebody not in.
pub enum Refusal {
    /// Anybody could have sent that: nothing ends for it.
    Stranger(String),
    /// A rank that knows the secret cannot take part: nobody can go on.
    Rank { rank: usize, problem: String },
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Self::Stranger(error.to_string())
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self::Stranger(error.to_string())
    }
}

/// Rank 0's side of a connection, until all ranks are there.
pub fn admit(
    info: &RankInfo,
    secret: &Secret,
    stream: TcpStream,
    deadline: Instant,
) -> Result<PendingPeer, Refusal> {
    let (sender, mut receiver) = wire(stream)?;
    let mut expect = || match receiver.receive(deadline) {
        Ok(Some(received)) => Ok(received),
        Ok(None) => Err(Refusal::Stranger("said nothing that is complete".to_string())),
        Err(error) => Err(Refusal::from(error)),
    };
    let (message, hello) = expect()?;
    let Message::Hello { protocol, version, rank, world_size, .. } = message else { return Err(disorder()) };
    let refuse = |problem: String| {
        // The connection may be gone.
        let _ = sender.send(&Message::Failed { rank, problem: problem.clone() });
        problem
    };
    if protocol != PROTOCOL {
        let problem = format!(
            "speaks protocol {protocol} (candle-quant {version}), rank 0 protocol {PROTOCOL} (candle-quant {VERSION})"
        );
        return Err(Refusal::Stranger(refuse(problem)));
    }
    let challenge = sender.send(&Message::Challenge { nonce: rand::random() })?;
    let (Message::Proof { proof }, _) = expect()? else { return Err(disorder()) };
    if !secret.is_proven(&proof, &[RANK, &hello, &challenge]) {
        let problem = refuse(format!("does not know the secret of rank 0; set {VARIABLE} alike"));
        return Err(Refusal::Stranger(format!("rank {rank} {problem}")));
    }
    let problem = if version != VERSION {
        format!("runs candle-quant {version}, rank 0 {VERSION}; install the same on all machines")
    } else if world_size != info.world_size() {
        format!("was told of {world_size} ranks, rank 0 of {}", info.world_size())
    } else if rank == 0 || rank >= world_size {
        format!("is no rank between 0 and {world_size}")
    } else {
        return Ok(PendingPeer { rank, sender, receiver, hello, challenge });
    };
    Err(Refusal::Rank { rank, problem: refuse(problem) })
}

fn disorder() -> Refusal {
    Refusal::Stranger("sent messages out of order".to_string())
}

impl PendingPeer {
    /// Lets it in.
    pub fn welcome(&self, secret: &Secret, token: &[u8]) -> Result<()> {
        let proof = secret.prove(&[MASTER, &self.hello, &self.challenge, token])?;
        let sent = self.sender.send(&Message::Welcome { proof, token: token.to_vec() });
        sent.map(drop).map_err(|error| Error::Rank { rank: self.rank, problem: lost(&error) })
    }
}

/// Another rank's side: asks rank 0 to let it in.
#[derive(Debug)]
pub struct Application {
    sender: Sender,
    receiver: Receiver,
    hello: Vec<u8>,
    challenge: Vec<u8>,
}

impl Application {
    /// Makes itself known. The error of the system is that of a connection which may be better the next time.
    pub fn new(
        info: &RankInfo,
        secret: &Secret,
        stream: TcpStream,
        deadline: Instant,
    ) -> io::Result<Result<Self>> {
        let (sender, mut receiver) = wire(stream)?;
        let hello = sender.send(&Message::Hello {
            protocol: PROTOCOL,
            version: VERSION.to_string(),
            rank: info.rank(),
            world_size: info.world_size(),
            nonce: rand::random(),
        })?;
        let challenge = match receiver.receive(deadline)? {
            Some((Message::Challenge { .. }, challenge)) => challenge,
            Some((other, _)) => return Ok(Err(over(other))),
            None => {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "it accepts connections and says nothing",
                ))
            }
        };
        let proof = match secret.prove(&[RANK, &hello, &challenge]) {
            Ok(proof) => proof,
            Err(error) => return Ok(Err(error)),
        };
        sender.send(&Message::Proof { proof })?;
        Ok(Ok(Self { sender, receiver, hello, challenge }))
    }

    /// Waits until all ranks are there: the connection, and what rank 0 has broadcast.
    pub fn accepted(mut self, secret: &Secret, deadline: Instant) -> Result<(Sender, Receiver, Vec<u8>)> {
        let failed = |problem: String| Error::Rank { rank: 0, problem };
        match self.receiver.receive(deadline).map_err(|error| failed(lost(&error)))? {
            Some((Message::Welcome { proof, token }, _)) => {
                if !secret.is_proven(&proof, &[MASTER, &self.hello, &self.challenge, &token]) {
                    return Err(failed(format!("does not know the secret; set {VARIABLE} alike")));
                }
                Ok((self.sender, self.receiver, token))
            }
            Some((other, _)) => Err(over(other)),
            None => Err(failed("has not told whether all ranks are there".to_string())),
        }
    }
}

/// What any other message than the expected one means.
fn over(message: Message) -> Error {
    match message {
        Message::Failed { rank, problem } => Error::Rank { rank, problem },
        _ => Error::Rank { rank: 0, problem: "sent messages out of order".to_string() },
    }
}
