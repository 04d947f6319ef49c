//! How processes become the ranks of one group: rank 0 listens, the others connect, and the connections stay as
//! a [`control`] channel that reports failures.

mod channel;
mod control;
mod door;
#[cfg(feature = "testing")]
pub mod fuzzing;
mod handshake;
mod secret;
mod text;

use super::host_group::Group;
use super::launcher_env::RankInfo;
use crate::{Error, Result};
use channel::{is_passing, lost, Message, Receiver, Sender};
use control::Control;
use door::{Door, Peer};
use handshake::{Frame, Unanswered};
pub use secret::Secret;
use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// The interval at which others try again to reach rank 0.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// The timeout of one attempt to connect, and of each answer of rank 0 to it.
const ATTEMPT: Duration = Duration::from_secs(10);
/// How long rank 0 waits for more ranks after a failure, to report it to them.
const REPORT_TIMEOUT: Duration = Duration::from_secs(30);
/// How much longer than rank 0 others wait, for its report of a failure.
const REPORT_GRACE: Duration = Duration::from_secs(10);
/// No wait is longer: clocks end somewhere.
const LONGEST: Duration = Duration::from_secs(1 << 32);
/// The most bytes of a token: it is one message.
const MOST_TOKEN: usize = 8 << 10;

/// A process that has joined the others of its group.
#[derive(Debug)]
pub struct Joined {
    pub(super) group: Arc<Group>,
    token: Vec<u8>,
}

impl Joined {
    /// What rank 0 broadcast to all ranks.
    pub fn token(&self) -> &[u8] {
        &self.token
    }

    /// The first failure of any rank so far.
    pub fn failure(&self) -> Option<Error> {
        self.group.failure()
    }
}

/// How long ranks wait for each other.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// For others to come.
    pub timeout: Duration,
    /// For the next sign of life. What rank 0 says counts for all.
    pub silence: Duration,
}

/// Joins the others, runs `body`, and waits for them to end. See [`Launch::join`](super::Launch::join).
pub fn join<T>(
    info: &RankInfo,
    secret: &Secret,
    limits: Limits,
    token: impl FnOnce() -> Result<Vec<u8>>,
    body: impl FnOnce(&Joined) -> Result<T>,
) -> Result<T> {
    if limits.silence.is_zero() {
        return Err(Error::mismatch("heartbeat timeout", "more than zero", "zero"));
    }
    let limits = Limits { timeout: limits.timeout.min(LONGEST), silence: limits.silence.min(LONGEST) };
    let meeting = Meeting { info, secret, limits, deadline: Instant::now() + limits.timeout };
    let Met { links, token, silence } = match (info.world_size(), info.rank()) {
        (1, _) => Met { links: Vec::new(), token: token()?, silence: limits.silence },
        (_, 0) => meeting.host(token)?,
        _ => meeting.attend()?,
    };
    let group = Group::new(info.world_size(), limits.timeout);
    let control = Control::start(&group, info.rank(), links, Limits { silence, ..limits });
    let joined = Joined { group, token };
    let result = catch_unwind(AssertUnwindSafe(|| body(&joined)));
    control.end(result)
}

/// A connection to another rank.
type Link = (usize, Sender, Receiver);

/// What a process has when all ranks are there.
struct Met {
    links: Vec<Link>,
    token: Vec<u8>,
    silence: Duration,
}

struct Meeting<'a> {
    info: &'a RankInfo,
    secret: &'a Secret,
    limits: Limits,
    deadline: Instant,
}

impl Meeting<'_> {
    fn master(&self) -> String {
        format!("{}:{}", self.info.host(), self.info.port())
    }

    /// Rank 0: waits for the others.
    fn host(&self, token: impl FnOnce() -> Result<Vec<u8>>) -> Result<Met> {
        let mut door = Door::open(self.info, self.secret).map_err(|error| Error::Rank {
            rank: 0,
            problem: format!("cannot listen on {}: {error}", self.master()),
        })?;
        let mut late = Late { peers: Vec::new(), informed: 0 };
        let mut members = BTreeMap::new();
        let met =
            self.gather(&mut door, &mut members, &mut late).and_then(|()| self.welcome(token, &members));
        match met {
            Ok(token) => {
                let link = |(rank, Peer { sender, receiver, .. })| (rank, sender, receiver);
                let links = members.into_iter().map(link).collect();
                Ok(Met { links, token, silence: self.limits.silence })
            }
            Err(error) => {
                let (rank, problem) = match error {
                    Error::Rank { rank, problem } => (rank, problem),
                    other => (0, other.to_string()),
                };
                late.peers.extend(members.into_values());
                let why = Message::Failed { rank, problem: problem.as_str().into() };
                self.report_failure(door, late, &why);
                Err(Error::Rank { rank, problem })
            }
        }
    }

    fn gather(&self, door: &mut Door, members: &mut BTreeMap<usize, Peer>, late: &mut Late) -> Result<()> {
        while members.len() + 1 < self.info.world_size() {
            match door.next(self.deadline) {
                None => return Err(self.incomplete(members, &door.refused.summary())),
                Some(Err(error)) => {
                    late.informed += 1;
                    return Err(error);
                }
                Some(Ok(peer)) => {
                    let rank = peer.rank;
                    if let Some(first) = members.insert(rank, peer) {
                        late.peers.push(first);
                        return Err(Error::Rank { rank, problem: "two processes are this rank".to_string() });
                    }
                }
            }
        }
        Ok(())
    }

    /// Broadcasts the token.
    fn welcome(
        &self,
        token: impl FnOnce() -> Result<Vec<u8>>,
        members: &BTreeMap<usize, Peer>,
    ) -> Result<Vec<u8>> {
        let token = token()?;
        if token.len() > MOST_TOKEN {
            let expected = format!("at most {MOST_TOKEN} bytes");
            return Err(Error::mismatch("token of rank 0", expected, format!("{} bytes", token.len())));
        }
        let welcome = Message::Welcome { token: token.clone(), silence: self.limits.silence };
        for (&rank, member) in members {
            member.sender.send(&welcome).map_err(|error| Error::Rank { rank, problem: lost(&error) })?;
        }
        Ok(token)
    }

    /// Reports a failure to all ranks, also to those that come only now.
    fn report_failure(&self, mut door: Door, mut late: Late, why: &Message) {
        let end = self.deadline.min(Instant::now() + REPORT_TIMEOUT);
        loop {
            late.informed += late.peers.len();
            for peer in late.peers.drain(..) {
                // It may have gone.
                let _ = peer.sender.send(why);
            }
            if late.informed + 1 >= self.info.world_size() {
                return;
            }
            match door.next(end) {
                Some(Ok(peer)) => late.peers.push(peer),
                Some(Err(_)) => late.informed += 1,
                None => return,
            }
        }
    }

    /// The error if not all ranks have come in time.
    fn incomplete(&self, members: &BTreeMap<usize, Peer>, refused: &str) -> Error {
        let absent: Vec<usize> =
            (1..self.info.world_size()).filter(|rank| !members.contains_key(rank)).collect();
        let seconds = self.limits.timeout.as_secs_f64();
        let mut problem = format!("has not come to rank 0 at {} within {seconds} s", self.master());
        if absent.len() > 1 {
            problem += &format!(", as {} others have not", absent.len() - 1);
        }
        Error::Rank { rank: absent.first().copied().unwrap_or_default(), problem: problem + refused }
    }

    /// The other ranks: connect until rank 0 answers, and wait until all ranks are there.
    fn attend(&self) -> Result<Met> {
        let mut last = None;
        let (sender, mut receiver) = loop {
            let error = match self.connect() {
                Ok(connection) => break connection,
                Err(Unanswered::Never(error)) => return Err(error),
                Err(Unanswered::Later(error)) => error,
            };
            let is_over = Instant::now() >= self.deadline;
            // What the deadline has cut short says less than the attempt before.
            let error = last.take_if(|_| is_over && error.kind() == ErrorKind::TimedOut).unwrap_or(error);
            if is_over {
                let (rank, seconds) = (self.info.rank(), self.limits.timeout.as_secs_f64());
                let problem =
                    format!("does not answer rank {rank} at {} within {seconds} s: {error}", self.master());
                return Err(Error::Rank { rank: 0, problem });
            }
            last = Some(error);
            thread::sleep(RETRY_INTERVAL);
        };
        let failed = |problem: String| Error::Rank { rank: 0, problem };
        match receiver.receive(self.deadline + REPORT_GRACE).map_err(|error| failed(lost(&error)))? {
            Some(Message::Welcome { token, silence }) => {
                Ok(Met { links: vec![(0, sender, receiver)], token, silence: silence.min(LONGEST) })
            }
            Some(other) => Err(over(other)),
            None => Err(failed("has not told whether all ranks are there".to_string())),
        }
    }

    /// Tries all addresses of rank 0.
    fn connect(&self) -> Result<(Sender, Receiver), Unanswered> {
        let mut last = Unanswered::Later(io::Error::new(ErrorKind::NotFound, "the name has no address"));
        for address in (self.info.host(), self.info.port()).to_socket_addrs()? {
            match self.connect_to(&address) {
                Err(Unanswered::Later(error)) => last = Unanswered::Later(error),
                end => return end,
            }
        }
        Err(last)
    }

    fn connect_to(&self, address: &SocketAddr) -> Result<(Sender, Receiver), Unanswered> {
        let soon = || self.deadline.min(Instant::now() + ATTEMPT);
        let mut stream = TcpStream::connect_timeout(address, time_until(soon()))?;
        stream.set_nodelay(true)?;
        let (state, knock) = handshake::knock(self.info, self.secret)?;
        stream.write_all(&knock)?;
        let answer = read_frame(&mut stream, soon())?;
        let (session, proof) = handshake::proof(state, self.info, &answer)?;
        stream.write_all(&proof)?;
        let (sender, mut receiver) = session.over(stream)?;
        match receiver.receive(soon())? {
            Some(Message::Alive) => Ok((sender, receiver)),
            Some(other) => Err(Unanswered::Never(over(other))),
            None => Err(silent().into()),
        }
    }
}

/// For the system, which refuses zero.
fn time_until(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}

/// What rank 0 answers, if it is complete at `deadline`.
fn read_frame(stream: &mut TcpStream, deadline: Instant) -> io::Result<Frame> {
    let (mut frame, mut length) = ([0; 64], 0);
    while let Some(rest) = frame.get_mut(length..).filter(|rest| !rest.is_empty()) {
        if Instant::now() >= deadline {
            return Err(silent());
        }
        stream.set_read_timeout(Some(time_until(deadline)))?;
        match stream.read(rest) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => length += count,
            Err(error) if is_passing(error.kind()) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(frame)
}

fn silent() -> io::Error {
    io::Error::new(ErrorKind::TimedOut, "it accepts connections and says nothing that is complete")
}

impl From<io::Error> for Unanswered {
    fn from(error: io::Error) -> Self {
        Self::Later(error)
    }
}

/// Ranks that come to a group that has failed.
struct Late {
    /// They are not informed yet.
    peers: Vec<Peer>,
    /// So many ranks are.
    informed: usize,
}

/// What any other message than the expected one means.
fn over(message: Message) -> Error {
    match message {
        Message::Failed { rank, problem } => Error::Rank { rank, problem: problem.into() },
        _ => Error::Rank { rank: 0, problem: "sent messages out of order".to_string() },
    }
}
