//! How processes become the ranks of one group: rank 0 listens, the others connect, and the connections stay as
//! a [`control`] channel that reports failures.

mod control;
mod handshake;
mod wire;

use super::host_group::Group;
use super::launcher_env::RankInfo;
use crate::{Error, Result};
use control::{Control, Patience};
pub use handshake::Secret;
use handshake::{admit, Application, PendingPeer, Refusal};
use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::{mpsc, Arc};
use std::thread;
use std::time::{Duration, Instant};
use wire::{Message, Receiver, Sender};

/// The interval at which rank 0 polls, and at which others try again to reach it.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// The timeout of one attempt to connect, and of the authentication of a peer.
const ATTEMPT: Duration = Duration::from_secs(10);
/// How long rank 0 waits for more ranks after a failure, to report it to them.
const REPORT_TIMEOUT: Duration = Duration::from_secs(30);
/// How much longer than rank 0 others wait, for its report of a failure.
const REPORT_GRACE: Duration = Duration::from_secs(10);
/// The most peers that are not authenticated yet, at a time.
const MOST_PENDING_PEERS: usize = 256;
/// The most refused connections that an error lists.
const MOST_LISTED: usize = 4;

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

/// Joins the others, runs `body`, and waits for them to end. See [`Launch::join`](super::Launch::join).
pub fn join<T>(
    info: &RankInfo,
    secret: &Secret,
    timeout: Duration,
    token: impl FnOnce() -> Result<Vec<u8>>,
    body: impl FnOnce(&Joined) -> Result<T>,
) -> Result<T> {
    let meeting = Meeting { info, secret, timeout, deadline: Instant::now() + timeout };
    let (links, token) = match (info.world_size(), info.rank()) {
        (1, _) => (Vec::new(), token()?),
        (_, 0) => meeting.host(token)?,
        _ => meeting.attend()?,
    };
    let group = Group::new(info.world_size(), timeout);
    let control = Control::start(&group, info.rank(), links, timeout, Patience::default());
    let joined = Joined { group, token };
    let result = catch_unwind(AssertUnwindSafe(|| body(&joined)));
    control.end(result)
}

/// A connection to another rank.
type Link = (usize, Sender, Receiver);

struct Meeting<'a> {
    info: &'a RankInfo,
    secret: &'a Secret,
    timeout: Duration,
    deadline: Instant,
}

impl Meeting<'_> {
    fn master(&self) -> String {
        format!("{}:{}", self.info.host(), self.info.port())
    }

    /// Rank 0: waits for the others.
    fn host(&self, token: impl FnOnce() -> Result<Vec<u8>>) -> Result<(Vec<Link>, Vec<u8>)> {
        let mut door = Door::open(self).map_err(|error| Error::Rank {
            rank: 0,
            problem: format!("cannot listen on {}: {error}", self.master()),
        })?;
        let mut members = BTreeMap::new();
        let met = self.gather(&mut door, &mut members).and_then(|()| token()).and_then(|token| {
            members.values().try_for_each(|member| member.welcome(self.secret, &token))?;
            Ok(token)
        });
        match met {
            Ok(token) => {
                let link = |(rank, member): (usize, PendingPeer)| (rank, member.sender, member.receiver);
                Ok((members.into_iter().map(link).collect(), token))
            }
            Err(error) => {
                let (rank, problem) = match error {
                    Error::Rank { rank, problem } => (rank, problem),
                    other => (0, other.to_string()),
                };
                self.report_failure(door, members, &Message::Failed { rank, problem: problem.clone() });
                Err(Error::Rank { rank, problem })
            }
        }
    }

    fn gather(&self, door: &mut Door, members: &mut BTreeMap<usize, PendingPeer>) -> Result<()> {
        let mut refused = Vec::new();
        while members.len() + 1 < self.info.world_size() {
            if Instant::now() >= self.deadline {
                return Err(self.incomplete(members, &refused));
            }
            match door.next() {
                Some((_, Ok(peer))) => {
                    let rank = peer.rank;
                    if let Some(first) = members.insert(rank, peer) {
                        door.refused.push(first);
                        return Err(Error::Rank { rank, problem: "two processes are this rank".to_string() });
                    }
                }
                Some((_, Err(Refusal::Rank { rank, problem }))) => {
                    door.informed += 1;
                    return Err(Error::Rank { rank, problem });
                }
                Some((from, Err(Refusal::Stranger(problem)))) => refused.push(format!("{from} {problem}")),
                None => {}
            }
        }
        Ok(())
    }

    /// Reports a failure to all ranks, also to those that come only now.
    fn report_failure(&self, mut door: Door, members: BTreeMap<usize, PendingPeer>, why: &Message) {
        let mut pending: Vec<PendingPeer> = door.refused.drain(..).chain(members.into_values()).collect();
        let end = self.deadline.min(Instant::now() + REPORT_TIMEOUT);
        loop {
            door.informed += pending.len();
            for peer in pending.drain(..) {
                // It may have gone.
                let _ = peer.sender.send(why);
            }
            if door.informed + 1 >= self.info.world_size() || Instant::now() >= end {
                return;
            }
            match door.next() {
                Some((_, Ok(peer))) => pending.push(peer),
                Some((_, Err(Refusal::Rank { .. }))) => door.informed += 1,
                _ => {}
            }
        }
    }

    /// The error if not all ranks have come in time.
    fn incomplete(&self, members: &BTreeMap<usize, PendingPeer>, refused: &[String]) -> Error {
        let absent: Vec<usize> =
            (1..self.info.world_size()).filter(|rank| !members.contains_key(rank)).collect();
        let seconds = self.timeout.as_secs_f64();
        let mut problem = format!("has not come to rank 0 at {} within {seconds} s", self.master());
        if absent.len() > 1 {
            problem += &format!(", as {} others have not", absent.len() - 1);
        }
        if !refused.is_empty() {
            let listed: Vec<&str> = refused.iter().rev().take(MOST_LISTED).map(String::as_str).collect();
            problem += &format!("; {} connections were refused: {}", refused.len(), listed.join("; "));
        }
        Error::Rank { rank: absent.first().copied().unwrap_or_default(), problem }
    }

    /// The other ranks: connect until rank 0 answers.
    fn attend(&self) -> Result<(Vec<Link>, Vec<u8>)> {
        let application = loop {
            let error = match self.connect() {
                Ok(application) => break application?,
                Err(error) => error,
            };
            if Instant::now() >= self.deadline {
                let (rank, seconds) = (self.info.rank(), self.timeout.as_secs_f64());
                let problem =
                    format!("does not answer rank {rank} at {} within {seconds} s: {error}", self.master());
                return Err(Error::Rank { rank: 0, problem });
            }
            thread::sleep(RETRY_INTERVAL);
        };
        let (sender, receiver, token) = application.accepted(self.secret, self.deadline + REPORT_GRACE)?;
        Ok((vec![(0, sender, receiver)], token))
    }

    /// The error is one that another attempt may not have.
    fn connect(&self) -> io::Result<Result<Application>> {
        let mut last = io::Error::new(ErrorKind::NotFound, "the name has no address");
        for address in (self.info.host(), self.info.port()).to_socket_addrs()? {
            let rest = self.deadline.saturating_duration_since(Instant::now());
            // Zero is refused.
            let limit = rest.min(ATTEMPT).max(Duration::from_millis(1));
            let attempt = TcpStream::connect_timeout(&address, limit)
                .and_then(|stream| Application::new(self.info, self.secret, stream, self.deadline));
            match attempt {
                Ok(application) => return Ok(application),
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

/// Where others come to rank 0.
struct Door {
    info: RankInfo,
    secret: Secret,
    deadline: Instant,
    listener: TcpListener,
    /// Peers that are not authenticated yet.
    waiting: usize,
    arrived: (mpsc::Sender<Arrival>, mpsc::Receiver<Arrival>),
    /// Ranks that were refused and are not informed yet, and how many ranks are.
    refused: Vec<PendingPeer>,
    informed: usize,
}

type Arrival = (SocketAddr, Result<PendingPeer, Refusal>);

impl Door {
    fn open(meeting: &Meeting) -> io::Result<Self> {
        let (info, secret) = (meeting.info.clone(), meeting.secret.clone());
        let listener = Self::listen(&info)?;
        listener.set_nonblocking(true)?;
        let (deadline, arrived) = (meeting.deadline, mpsc::channel());
        Ok(Self { info, secret, deadline, listener, waiting: 0, arrived, refused: Vec::new(), informed: 0 })
    }

    /// On all addresses of the machine, unless all ranks are on it.
    fn listen(info: &RankInfo) -> io::Result<TcpListener> {
        let (host, port) = (info.host(), info.port());
        if host == "localhost" || host.parse().is_ok_and(|address: IpAddr| address.is_loopback()) {
            return TcpListener::bind((host, port));
        }
        TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
            .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)))
    }

    /// The next peer that has arrived, if there is one; waits for a moment.
    fn next(&mut self) -> Option<Arrival> {
        match self.listener.accept() {
            Ok((stream, from)) if self.waiting < MOST_PENDING_PEERS => {
                let (info, secret, sender) = (self.info.clone(), self.secret.clone(), self.arrived.0.clone());
                let limit = (self.deadline + REPORT_GRACE).min(Instant::now() + ATTEMPT);
                // Nobody listens when all are there.
                let work = move || drop(sender.send((from, admit(&info, &secret, stream, limit))));
                // Without a thread for it, it tries again.
                self.waiting += usize::from(thread::Builder::new().spawn(work).is_ok());
            }
            Ok(_) => {}
            // Nobody connects now, or the peer has gone.
            Err(_) => thread::sleep(RETRY_INTERVAL / 5),
        }
        let arrival = self.arrived.1.try_recv().ok()?;
        self.waiting -= 1;
        Some(arrival)
    }
}
