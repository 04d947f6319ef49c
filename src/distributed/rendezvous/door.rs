//! Where others come to rank 0. Whoever has not proven that it knows the secret costs a fixed amount of memory, for a limited
//! time, and keeps nobody waiting: one thread listens to all of them, and their number is limited.

use super::channel::{is_passing, Message, Receiver, Sender};
use super::handshake::{may_be_frame, Answered, Frame, Knock, Proven, Refusal};
use super::secret::Secret;
use crate::distributed::launcher_env::RankInfo;
use crate::Error;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::net::{listen, sockopt::set_socket_linger};
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

/// How long a stranger has to prove that it knows the secret.
const PATIENCE: Duration = Duration::from_secs(10);
/// The most strangers at a time, and the most of one source. One more, and the first of them has to go.
const MOST_STRANGERS: usize = 256;
const MOST_OF_A_SOURCE: usize = 64;
/// The most that have knocked like ranks and have not proven that they are, unless there are more ranks.
const MOST_ANSWERED: usize = 256;
/// The most that are let in before those that are inside are heard.
const MOST_AT_ONCE: usize = 64;
/// The most connections that the system keeps for rank 0: a busy moment costs nobody a second attempt.
const BACKLOG: i32 = 4096;
/// How long rank 0 waits if it can accept nobody.
const PAUSE: Duration = Duration::from_millis(10);
/// The most refused connections that are named.
const MOST_NAMED: usize = 4;

/// A rank that has proven that it knows the secret.
#[derive(Debug)]
pub struct Peer {
    pub rank: usize,
    pub sender: Sender,
    pub receiver: Receiver,
}

/// Connections that were refused.
#[derive(Default)]
pub struct Refused {
    count: u64,
    last: VecDeque<String>,
}

impl Refused {
    fn add(&mut self, from: SocketAddr, problem: &str) {
        self.count += 1;
        self.last.push_front(format!("{from} {problem}"));
        self.last.truncate(MOST_NAMED);
    }

    /// Nothing, if there were none.
    pub fn summary(&self) -> String {
        match self.count {
            0 => String::new(),
            count => {
                let last: Vec<&str> = self.last.iter().map(String::as_str).collect();
                format!("; {count} connections were refused: {}", last.join("; "))
            }
        }
    }
}

pub struct Door {
    info: RankInfo,
    secret: Secret,
    listener: TcpListener,
    /// In the order in which they came.
    strangers: BTreeMap<u64, Stranger>,
    came: u64,
    /// Of knocks: only a repeated one has that of an earlier one.
    public_keys: HashSet<[u8; 32]>,
    arrived: VecDeque<Result<Peer, Error>>,
    pub refused: Refused,
}

/// A connection of somebody who has not proven anything yet.
struct Stranger {
    stream: TcpStream,
    from: SocketAddr,
    until: Instant,
    /// What has come of the next frame.
    frame: Frame,
    length: usize,
    /// None before it has knocked like a rank.
    answered: Option<Answered>,
}

impl Door {
    /// On all addresses of the machine, unless all ranks are on it.
    pub fn open(info: &RankInfo, secret: &Secret) -> io::Result<Self> {
        let (host, port) = (info.host(), info.port());
        let is_local = host == "localhost" || host.parse().is_ok_and(|address: IpAddr| address.is_loopback());
        let listener = match is_local {
            true => TcpListener::bind((host, port))?,
            false => TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
                .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)))?,
        };
        Self::around(listener, info, secret)
    }

    fn around(listener: TcpListener, info: &RankInfo, secret: &Secret) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        listen(&listener, BACKLOG)?;
        Ok(Self {
            info: info.clone(),
            secret: secret.clone(),
            listener,
            strangers: BTreeMap::new(),
            came: 0,
            public_keys: HashSet::new(),
            arrived: VecDeque::new(),
            refused: Refused::default(),
        })
    }

    /// The next rank that has proven that it knows the secret, or why one that has cannot take part; none if nobody has
    /// at `until`.
    pub fn next(&mut self, until: Instant) -> Option<Result<Peer, Error>> {
        loop {
            if let Some(arrival) = self.arrived.pop_front() {
                return Some(arrival);
            }
            let now = Instant::now();
            while let Some(late) = self.strangers.first_entry().filter(|first| first.get().until <= now) {
                late.remove().refuse(&mut self.refused, Refusal::silent("said nothing that is complete"));
            }
            if now >= until {
                return None;
            }
            let first = self.strangers.first_key_value().map_or(until, |(_, stranger)| stranger.until);
            let (ready, is_somebody_there) = self.wait(until.min(first).saturating_duration_since(now));
            ready.into_iter().for_each(|stranger| self.hear(stranger));
            if is_somebody_there {
                self.accept();
            }
        }
    }

    /// Which strangers have said something, and whether there are more outside.
    fn wait(&self, limit: Duration) -> (Vec<u64>, bool) {
        let outside = PollFd::new(&self.listener, PollFlags::IN);
        let inside = self.strangers.values().map(|stranger| PollFd::new(&stranger.stream, PollFlags::IN));
        let mut polled: Vec<PollFd> = [outside].into_iter().chain(inside).collect();
        match Timespec::try_from(limit).map(|limit| poll(&mut polled, Some(&limit))) {
            Ok(Ok(_)) => {}
            // A signal has come.
            Ok(Err(rustix::io::Errno::INTR)) => return (Vec::new(), false),
            _ => {
                thread::sleep(PAUSE.min(limit));
                return (Vec::new(), true);
            }
        }
        let is_ready = |polled: &PollFd| !polled.revents().is_empty();
        let mut polled = polled.iter();
        let is_somebody_there = polled.next().is_some_and(is_ready);
        let ready = self.strangers.keys().zip(polled).filter(|(_, polled)| is_ready(polled));
        (ready.map(|(stranger, _)| *stranger).collect(), is_somebody_there)
    }

    fn accept(&mut self) {
        for _ in 0..MOST_AT_ONCE {
            match self.listener.accept() {
                Ok((stream, from)) => {
                    self.make_room(from.ip());
                    let until = Instant::now() + PATIENCE;
                    let stranger =
                        Stranger { stream, from, until, frame: [0; 64], length: 0, answered: None };
                    if stranger.stream.set_nonblocking(true).is_ok() {
                        self.strangers.insert(self.came, stranger);
                        // Mostly it has knocked by now.
                        self.hear(self.came);
                        self.came += 1;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // It has gone again.
                Err(error)
                    if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::Interrupted) => {}
                Err(_) => {
                    // Too many open files, perhaps.
                    self.strangers.pop_first();
                    return thread::sleep(PAUSE);
                }
            }
        }
    }

    /// Sends away who has been silent for longest, if there are too many.
    fn make_room(&mut self, source: IpAddr) {
        let silent = || self.strangers.iter().filter(|(_, stranger)| stranger.answered.is_none());
        let of_source = || silent().filter(|(_, stranger)| network(stranger.from.ip()) == network(source));
        let first = if of_source().count() >= MOST_OF_A_SOURCE {
            of_source().next()
        } else if silent().count() >= MOST_STRANGERS {
            silent().next()
        } else {
            None
        };
        if let Some(stranger) = first.map(|(key, _)| *key).and_then(|key| self.strangers.remove(&key)) {
            stranger.refuse(&mut self.refused, Refusal::silent("was silent while others came"));
        }
    }

    /// Reads what a stranger has sent.
    fn hear(&mut self, key: u64) {
        let Some(mut stranger) = self.strangers.remove(&key) else { return };
        let step = match stranger.read() {
            Ok(None) => {
                self.strangers.insert(key, stranger);
                return;
            }
            Ok(Some(frame)) => match stranger.answered.take() {
                None => self.answer(&mut stranger, &frame),
                Some(answered) => answered.read_proof(&frame).map(Some),
            },
            Err(refusal) => Err(refusal),
        };
        match step {
            Err(refusal) => stranger.refuse(&mut self.refused, refusal),
            Ok(Some(proven)) => self.let_in(stranger, proven),
            Ok(None) => {
                let answered = || self.strangers.iter().filter(|(_, stranger)| stranger.answered.is_some());
                if answered().count() >= MOST_ANSWERED.max(self.info.world_size()) {
                    let first = answered().next().map(|(key, _)| *key);
                    first.and_then(|key| self.strangers.remove(&key));
                }
                self.strangers.insert(key, stranger);
            }
        }
    }

    /// Answers a knock. Nobody is proven by it.
    fn answer(&mut self, stranger: &mut Stranger, frame: &Frame) -> Result<Option<Proven>, Refusal> {
        let knock = Knock::read(&self.info, &self.secret, frame)?;
        if !self.public_keys.insert(knock.public_key) {
            return Err(Refusal::silent("repeats what another has said"));
        }
        let (answered, frame) = knock.answer()?;
        // So little always has room.
        let sent = stranger.stream.write_all(&frame);
        sent.map_err(|error| Refusal::silent(format!("cannot be answered: {error}")))?;
        stranger.answered = Some(answered);
        Ok(None)
    }

    fn let_in(&mut self, stranger: Stranger, proven: Proven) {
        let rank = proven.rank;
        let arrival = match proven.problem(&self.info) {
            None => proven.session.over(stranger.stream).and_then(|(sender, receiver)| {
                sender.send(&Message::Alive)?;
                Ok(Ok(Peer { rank, sender, receiver }))
            }),
            Some(problem) => proven.session.over(stranger.stream).map(|(sender, _)| {
                // It may have gone.
                let _ = sender.send(&Message::Failed { rank, problem: problem.as_str().into() });
                Err(Error::Rank { rank, problem })
            }),
        };
        match arrival {
            Ok(arrival) => self.arrived.push_back(arrival),
            Err(error) => self.refused.add(stranger.from, &error.to_string()),
        }
    }
}

impl Stranger {
    /// The next frame, if it is complete.
    fn read(&mut self) -> Result<Option<Frame>, Refusal> {
        while let Some(rest) = self.frame.get_mut(self.length..).filter(|rest| !rest.is_empty()) {
            match self.stream.read(rest) {
                Ok(0) => return Err(Refusal::silent("closed the connection")),
                Ok(count) => self.length += count,
                Err(error) if is_passing(error.kind()) => return Ok(None),
                Err(error) => return Err(Refusal::silent(error.to_string())),
            }
            let start = self.frame.get(..self.length).unwrap_or_default();
            if self.answered.is_none() && !may_be_frame(start) {
                return Err(Refusal::silent("is no rank of candle-quant"));
            }
        }
        self.length = 0;
        Ok(Some(self.frame))
    }

    fn refuse(mut self, refused: &mut Refused, refusal: Refusal) {
        refused.add(self.from, &refusal.problem);
        match refusal.answer {
            // It may not be there any more.
            Some(answer) => drop(self.stream.write(&answer)),
            // Reset: the system has nothing to remember of it.
            None => drop(set_socket_linger(&self.stream, Some(Duration::ZERO))),
        }
    }
}

/// Whoever has one address of such a network may have all of them.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
        v4 => v4,
    }
}

#[cfg(test)]
mod tests;
