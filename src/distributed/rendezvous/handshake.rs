//! How rank 0 and another rank convince each other that they know the secret, before anything else is said: the handshake
//! `NNpsk0` of the Noise protocol, in three frames of one size.
//!
//! The rank sends a [`knock`], which only who knows the secret can make; rank 0 [answers](Knock::answer), which only who
//! knows it can do; the rank's [proof] says that the knock is no repetition of an earlier one. What both must have alike
//! (protocol, job, size of the group, the number of the rank) is part of the keys.

use super::channel::{Session, TAG};
use super::secret::{Secret, VARIABLE};
use super::text::PeerText;
use crate::distributed::launcher_env::{RankInfo, JOB_VARIABLE};
use crate::Error;
use snow::{Builder, HandshakeState};
use std::io;

/// Ranks of different protocols understand nothing of each other but that.
pub const PROTOCOL: u32 = 2;
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The only thing that is read of somebody who has not proven anything.
pub type Frame = [u8; 64];
/// What begins a frame in the clear.
type Head = [u8; 16];
const MAGIC: u32 = u32::from_le_bytes(*b"cqRV");
/// A public key, and a tag.
const NOISE: usize = 48;
/// What rank 0 says in the clear.
const GO_ON: u32 = 0;
const NOT_THE_SECRET: u32 = 1;
const OTHER_PROTOCOL: u32 = 2;

const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
const PROLOGUE: &[u8] = b"candle-quant: a rank asks rank 0\n";

/// The numbers of a frame's head: [`MAGIC`], [`PROTOCOL`], and two that depend on the frame.
fn head(numbers: [u32; 2]) -> Head {
    let [first, second] = numbers;
    let mut head = Head::default();
    for (bytes, number) in head.chunks_exact_mut(4).zip([MAGIC, PROTOCOL, first, second]) {
        bytes.copy_from_slice(&number.to_le_bytes());
    }
    head
}

fn frame(head: &Head, noise: &[u8; NOISE]) -> Frame {
    let mut frame = [0; 64];
    for (to, from) in frame.iter_mut().zip(head.iter().chain(noise)) {
        *to = *from;
    }
    frame
}

/// The head of a frame, its numbers, and its message; none of what is no frame of candle-quant.
fn parse(frame: &Frame) -> Option<(&Head, [u32; 3], &[u8])> {
    let (head, noise) = frame.split_first_chunk::<16>()?;
    let mut numbers = head.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes));
    let mut next = || numbers.next();
    (next()? == MAGIC).then_some((head, [next()?, next()?, next()?], noise))
}

/// Whether this may become a frame of candle-quant.
pub fn may_be_frame(start: &[u8]) -> bool {
    start.iter().zip(MAGIC.to_le_bytes()).all(|(found, expected)| *found == expected)
}

/// The side of a rank, or of rank 0, of a handshake that begins with this head.
fn begin<T>(
    secret: &Secret,
    head: &Head,
    job: &str,
    build: impl FnOnce(Builder) -> Result<T, snow::Error>,
) -> Result<T, snow::Error> {
    let prologue = [PROLOGUE, head, job.as_bytes()].concat();
    build(Builder::new(PATTERN.parse()?).psk(0, secret.key())?.prologue(&prologue)?)
}

/// What a rank says first. It ends with an error only if the system has no random numbers.
pub fn knock(info: &RankInfo, secret: &Secret) -> io::Result<(HandshakeState, Frame)> {
    // Neither is larger.
    let number = |number| u32::try_from(number).map_err(io::Error::other);
    let head = head([number(info.rank())?, number(info.world_size())?]);
    let mut noise = [0; NOISE];
    let mut state =
        begin(secret, &head, info.job(), |builder| builder.build_initiator()).map_err(io::Error::other)?;
    state.write_message(&[], &mut noise).map_err(io::Error::other)?;
    Ok((state, frame(&head, &noise)))
}

/// Why rank 0 refuses a frame, and what it says to that.
pub struct Refusal {
    pub problem: String,
    pub answer: Option<Frame>,
}

impl Refusal {
    pub fn silent(problem: impl Into<String>) -> Self {
        Self { problem: problem.into(), answer: None }
    }

    fn with(problem: String, code: u32) -> Self {
        Self { problem, answer: Some(frame(&head([code, 0]), &[0; NOISE])) }
    }
}

/// The knock of somebody who knows the secret, or repeats what such a one has said.
pub struct Knock {
    state: HandshakeState,
    rank: u32,
    world_size: u32,
    /// No two knocks have the same.
    pub public_key: [u8; 32],
}

impl Knock {
    /// Costs no more than a few hashes.
    pub fn read(info: &RankInfo, secret: &Secret, frame: &Frame) -> Result<Self, Refusal> {
        let Some((head, [protocol, rank, world_size], noise)) = parse(frame) else {
            return Err(Refusal::silent("is no rank of candle-quant"));
        };
        if protocol != PROTOCOL {
            let problem = format!("speaks protocol {protocol}, rank 0 protocol {PROTOCOL}");
            return Err(Refusal::with(problem, OTHER_PROTOCOL));
        }
        let read = begin(secret, head, info.job(), |builder| {
            let mut state = builder.build_responder()?;
            state.read_message(noise, &mut [0; NOISE]).map(|_| state)
        });
        match (read, noise.first_chunk()) {
            (Ok(state), Some(public_key)) => Ok(Self { state, rank, world_size, public_key: *public_key }),
            _ => {
                let problem = format!("as rank {rank}: does not know the secret, or is of another job");
                Err(Refusal::with(problem, NOT_THE_SECRET))
            }
        }
    }

    /// What rank 0 says to it.
    pub fn answer(mut self) -> Result<(Answered, Frame), Refusal> {
        let mut noise = [0; NOISE];
        let keys = self
            .state
            .write_message(&[], &mut noise)
            .and_then(|_| self.state.into_stateless_transport_mode());
        let keys = keys.map_err(|error| Refusal::silent(format!("cannot be answered: {error}")))?;
        let answered = Answered {
            session: Box::new(Session { keys, sent: 0, received: 0 }),
            rank: self.rank,
            world_size: self.world_size,
        };
        Ok((answered, frame(&head([GO_ON, 0]), &noise)))
    }
}

/// Rank 0's side of a connection that it has answered.
pub struct Answered {
    session: Box<Session>,
    rank: u32,
    world_size: u32,
}

impl Answered {
    /// From here on, it is known that the other side knows the secret.
    pub fn read_proof(mut self, frame: &Frame) -> Result<Proven, Refusal> {
        let mut version = [0; 64];
        let read = self.session.keys.read_message(self.session.received, frame, &mut version);
        let length = read.map_err(|_| Refusal::silent("repeats what another has said"))?;
        self.session.received += 1;
        let version = String::from_utf8_lossy(version.get(..length).unwrap_or_default());
        let version = PeerText::from(version.trim_end_matches('\0'));
        Ok(Proven {
            rank: self.rank as usize,
            world_size: self.world_size as usize,
            version,
            session: self.session,
        })
    }
}

/// A rank that knows the secret.
pub struct Proven {
    pub rank: usize,
    pub session: Box<Session>,
    world_size: usize,
    version: PeerText,
}

impl Proven {
    /// Why it cannot take part all the same.
    pub fn problem(&self, info: &RankInfo) -> Option<String> {
        let Self { rank, world_size, version, .. } = self;
        if version.to_string() != VERSION {
            Some(format!("runs candle-quant {version}, rank 0 {VERSION}; install the same on all machines"))
        } else if *world_size != info.world_size() {
            Some(format!("was told of {world_size} ranks, rank 0 of {}", info.world_size()))
        } else if *rank == 0 || rank >= world_size {
            Some(format!("is no rank between 0 and {world_size}"))
        } else {
            None
        }
    }
}

/// Why a rank does not go on after rank 0's answer.
#[derive(Debug)]
pub enum Unanswered {
    /// This is not rank 0; it may be there later.
    Later(io::Error),
    /// It will not let this rank in.
    Never(Error),
}

/// What a rank says to rank 0's answer. From here on, it is known that rank 0 knows the secret.
pub fn proof(
    mut state: HandshakeState,
    info: &RankInfo,
    answer: &Frame,
) -> Result<(Session, Frame), Unanswered> {
    let later = |problem: &str| Unanswered::Later(io::Error::new(io::ErrorKind::InvalidData, problem));
    let never = |rank: usize, problem: String| Err(Unanswered::Never(Error::Rank { rank, problem }));
    let Some((_, [protocol, code, unused], noise)) = parse(answer) else {
        return Err(later("it is no rank of candle-quant"));
    };
    if protocol != PROTOCOL {
        let problem = format!(
            "speaks protocol {protocol}, rank {} protocol {PROTOCOL}; install the same candle-quant on all machines",
            info.rank()
        );
        return never(0, problem);
    }
    let remedy = format!("set {VARIABLE} (and {JOB_VARIABLE}, if it is set) alike");
    match code {
        GO_ON if unused == 0 => {}
        NOT_THE_SECRET => {
            let problem = format!("does not know the secret of rank 0, or is of another job; {remedy}");
            return never(info.rank(), problem);
        }
        _ => return Err(later("it answers in a way that is not known")),
    }
    let read = state.read_message(noise, &mut [0; NOISE]).and_then(|_| state.into_stateless_transport_mode());
    let Ok(keys) = read else { return never(0, format!("does not know the secret; {remedy}")) };
    let mut version = [0; 64 - TAG];
    version.iter_mut().zip(VERSION.bytes()).for_each(|(to, from)| *to = from);
    let mut frame = [0; 64];
    let written = keys.write_message(0, &version, &mut frame);
    written.map_err(|error| Unanswered::Later(io::Error::other(error)))?;
    Ok((Session { keys, sent: 1, received: 0 }, frame))
}

#[cfg(test)]
pub mod tests {
    use super::super::channel::{Receiver, Sender};
    use super::*;
    use std::net::{TcpListener, TcpStream};

    pub fn secret() -> Secret {
        Secret::new("an only moderately secret secret").unwrap()
    }

    pub fn info(job: &str, rank: usize, world_size: usize) -> RankInfo {
        let (rank, world_size) = (rank.to_string(), world_size.to_string());
        let value = |name: &str| match name {
            "RANK" | "LOCAL_RANK" => Some(rank.clone()),
            "WORLD_SIZE" => Some(world_size.clone()),
            "MASTER_ADDR" => Some("localhost".to_string()),
            "MASTER_PORT" => Some("1".to_string()),
            JOB_VARIABLE => Some(job.to_string()),
            _ => None,
        };
        RankInfo::from_variables(value).unwrap()
    }

    fn read(job: &str, secret: &Secret, frame: &Frame) -> Result<Knock, Refusal> {
        Knock::read(&info(job, 0, 3), secret, frame)
    }

    /// Of rank 1, with its first frame and its last.
    fn sessions() -> (Session, Session, [Frame; 2]) {
        let (state, first) = knock(&info("a", 1, 3), &secret()).unwrap();
        let (answered, answer) = read("a", &secret(), &first).and_then(Knock::answer).ok().unwrap();
        let (of_rank, last) = proof(state, &info("a", 1, 3), &answer).unwrap();
        let proven = answered.read_proof(&last).ok().unwrap();
        assert_eq!((proven.rank, proven.world_size, proven.problem(&info("a", 0, 3))), (1, 3, None));
        (*proven.session, of_rank, [first, last])
    }

    /// Rank 0's side and that of another rank.
    pub fn connection() -> ((Sender, Receiver), (Sender, Receiver)) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (of_rank_0, of_rank, _) = sessions();
        (of_rank_0.over(listener.accept().unwrap().0).unwrap(), of_rank.over(stream).unwrap())
    }

    #[test]
    fn every_byte_of_a_frame_counts() {
        let (_, first) = knock(&info("a", 1, 3), &secret()).unwrap();
        assert!(read("a", &secret(), &first).is_ok());
        for byte in 0..first.len() {
            let mut other = first;
            other[byte] ^= 1;
            assert!(read("a", &secret(), &other).is_err(), "{byte}");
        }
        for byte in 0..first.len() {
            let (state, first) = knock(&info("a", 1, 3), &secret()).unwrap();
            let mut other = read("a", &secret(), &first).and_then(Knock::answer).ok().unwrap().1;
            other[byte] ^= 1;
            let error = proof(state, &info("a", 1, 3), &other).unwrap_err();
            if byte >= 16 {
                assert!(matches!(error, Unanswered::Never(Error::Rank { rank: 0, .. })), "{error:?}");
            }
        }
    }

    /// A knock is for one secret, job, world size and rank, all of which an eavesdropper knows but the first.
    #[test]
    fn a_knock_is_worth_nothing_elsewhere() {
        let (_, first) = knock(&info("a", 1, 3), &secret()).unwrap();
        let another = Secret::new("another secret, but long enough").unwrap();
        assert!(read("a", &another, &first).is_err());
        assert!(read("b", &secret(), &first).is_err());
        // Rank 2 of 3, and rank 1 of 4.
        for (byte, value) in [(8, 2), (12, 4)] {
            let mut other = first;
            other[byte] = value;
            assert!(read("a", &secret(), &other).is_err());
        }
    }

    /// Whoever repeats what a rank has said gets an answer, with which he cannot do anything.
    #[test]
    fn a_repeated_handshake_proves_nothing() {
        let (_, _, [first, last]) = sessions();
        let (answered, answer) = read("a", &secret(), &first).and_then(Knock::answer).ok().unwrap();
        assert!(answered.read_proof(&last).is_err());
        // Nor is rank 0's own answer one that a rank could give, or the other way round.
        assert!(read("a", &secret(), &answer).is_err());
        let (state, knock) = knock(&info("a", 1, 3), &secret()).unwrap();
        assert!(proof(state, &info("a", 1, 3), &knock).is_err());
    }

    #[test]
    fn another_protocol_is_named_by_both_in_numbers_only() {
        let mut frame = knock(&info("a", 1, 3), &secret()).unwrap().1;
        frame[4] = 9;
        let refusal = read("a", &secret(), &frame).err().unwrap();
        assert_eq!(refusal.problem, "speaks protocol 9, rank 0 protocol 2");
        let mut answer = refusal.answer.unwrap();
        answer[4] = 9;
        let (state, _) = knock(&info("a", 1, 3), &secret()).unwrap();
        let Err(Unanswered::Never(error)) = proof(state, &info("a", 1, 3), &answer) else { panic!() };
        let expected =
            "rank 0: speaks protocol 9, rank 1 protocol 2; install the same candle-quant on all machines";
        assert_eq!(error.to_string(), expected);
    }

    /// Those who know the secret tell of what else is wrong with them.
    #[test]
    fn ranks_that_cannot_take_part_are_told_why() {
        let proven = |rank, world_size, version: &str| {
            let session = Session { keys: sessions().0.keys, sent: 0, received: 1 };
            Proven { rank, world_size, version: version.into(), session: Box::new(session) }
        };
        let problem = |proven: Proven| proven.problem(&info("a", 0, 3)).unwrap();
        assert_eq!(problem(proven(1, 4, VERSION)), "was told of 4 ranks, rank 0 of 3");
        assert_eq!(problem(proven(0, 3, VERSION)), "is no rank between 0 and 3");
        assert_eq!(problem(proven(3, 3, VERSION)), "is no rank between 0 and 3");
        let expected = format!("runs candle-quant 9, rank 0 {VERSION}; install the same on all machines");
        assert_eq!(problem(proven(1, 3, "9")), expected);
    }
}
