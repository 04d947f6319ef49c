//! The connections of a group while its ranks work: rank 0 reports failures and ends to all.

use super::wire::{lost, Message, Receiver, Sender};
use super::Link;
use crate::distributed::failure::{panic_message, GRACE};
use crate::distributed::host_group::Group;
use crate::{Error, Result};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{mpsc, Arc};
use std::thread;
use std::time::{Duration, Instant};

/// How long the last messages may take.
const LINGER: Duration = Duration::from_secs(2);
/// The most characters of a problem that are reported.
const MOST_REPORTED: usize = 8 << 10;

/// How a silent rank is noticed.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// How often both sides say that they are alive.
    pub alive: Duration,
    /// After which silence a rank is given up: its machine or the network is gone.
    pub silence: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { alive: Duration::from_secs(5), silence: Duration::from_secs(60) }
    }
}

/// One rank's end of the channel: rank 0 has a connection to each other rank, these have one to rank 0.
pub struct Control {
    group: Arc<Group>,
    rank: usize,
    senders: Arc<[Sender]>,
    /// Disconnected once nobody has more to say.
    listening: mpsc::Receiver<()>,
    ended: Arc<AtomicBool>,
}

impl Control {
    pub fn start(
        group: &Arc<Group>,
        rank: usize,
        links: Vec<Link>,
        timeout: Duration,
        patience: Patience,
    ) -> Self {
        let (mut senders, mut receivers) = (Vec::new(), Vec::new());
        for (peer, sender, receiver) in links {
            senders.push(sender);
            receivers.push((peer, receiver));
        }
        let senders: Arc<[Sender]> = senders.into();
        let ended = Arc::new(AtomicBool::new(false));
        let others = Arc::clone(&senders);
        group.on_failure(move |rank, problem| {
            let problem: String = problem.chars().take(MOST_REPORTED).collect();
            broadcast(&others, || Message::Failed { rank, problem: problem.clone() });
        });
        let has_ended = Arc::clone(&ended);
        group.on_failure(move |rank, problem| stop_later(has_ended, rank, problem.to_string()));
        let (sender, listening) = mpsc::channel();
        for (link, (peer, receiver)) in receivers.into_iter().enumerate() {
            let (group, senders, sender) = (Arc::clone(group), Arc::clone(&senders), sender.clone());
            spawn(&Arc::clone(&group), peer, move || {
                let problem =
                    senders.get(link).and_then(|link| listen(&group, peer, link, receiver, patience));
                if let Some(problem) = problem {
                    group.fail(peer, problem);
                }
                drop(sender);
            });
        }
        if rank == 0 {
            let group_of_watch = Arc::clone(group);
            // Whatever it finds, the group knows.
            spawn(group, rank, move || drop(group_of_watch.wait_for_end(Some(timeout))));
        }
        Self { group: Arc::clone(group), rank, senders, listening, ended }
    }

    /// Reports how this rank has ended, and waits for all others.
    pub fn end<T>(self, result: thread::Result<Result<T>>) -> Result<T> {
        match &result {
            Ok(Ok(_)) => {
                self.group.leave(self.rank);
                if self.rank != 0 {
                    broadcast(&self.senders, || Message::Left);
                }
            }
            Ok(Err(error)) => self.group.fail(self.rank, error.to_string()),
            Err(panic) => self.group.fail(self.rank, format!("panicked: {}", panic_message(panic.as_ref()))),
        }
        let over = self.group.wait_for_end(None);
        if self.rank == 0 && over.is_ok() {
            broadcast(&self.senders, || Message::AllLeft);
        }
        // The last messages arrive only if this process does not go before they are taken.
        let _ = self.listening.recv_timeout(LINGER);
        self.ended.store(true, Ordering::SeqCst);
        over?;
        let lost = || Error::Rank { rank: self.rank, problem: "has no result".to_string() };
        result.unwrap_or_else(|_| Err(lost()))
    }
}

fn spawn(group: &Arc<Group>, rank: usize, work: impl FnOnce() + Send + 'static) {
    if let Err(error) = thread::Builder::new().spawn(work) {
        group.fail(rank, format!("no thread for its connection: {error}"));
    }
}

fn broadcast(senders: &[Sender], message: impl Fn() -> Message) {
    for sender in senders {
        // A rank that does not receive it is noticed by its silence.
        let _ = sender.send(&message());
    }
}

/// Reads what `peer` says until nothing more is to come; returns why it cannot go on.
fn listen(
    group: &Group,
    peer: usize,
    sender: &Sender,
    mut receiver: Receiver,
    Patience { alive, silence }: Patience,
) -> Option<String> {
    let (mut heard, mut next) = (Instant::now(), Instant::now());
    loop {
        if Instant::now() >= next {
            // If it cannot be sent, reading fails too.
            let _ = sender.send(&Message::Alive);
            next = Instant::now() + alive;
        }
        match receiver.receive(next) {
            Ok(Some((message, _))) => {
                heard = Instant::now();
                match message {
                    Message::Alive => {}
                    Message::Left => group.leave(peer),
                    Message::AllLeft => {
                        group.all_left();
                        return None;
                    }
                    Message::Failed { rank, problem } => {
                        group.fail(rank, problem);
                        return None;
                    }
                    _ => return Some("sent messages out of order".to_string()),
                }
            }
            Ok(None) if heard.elapsed() > silence => {
                return Some(format!("has not been heard of for {} s", silence.as_secs_f64()));
            }
            Ok(None) => {}
            Err(_) if group.has_ended() => return None,
            Err(error) => return Some(lost(&error)),
        }
    }
}

/// Ends the process if its rank does not, because it waits for something that never comes.
fn stop_later(has_ended: Arc<AtomicBool>, rank: usize, problem: String) {
    let stop = move || {
        thread::sleep(GRACE);
        if !has_ended.load(Ordering::SeqCst) {
            eprintln!("Error: {}", Error::Rank { rank, problem });
            std::process::exit(1);
        }
    };
    if let Err(error) = thread::Builder::new().spawn(stop) {
        log::error!("no thread that would end the process if its rank is stuck: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::super::wire::wire;
    use super::*;
    use std::net::{TcpListener, TcpStream};

    /// A connection of two ranks.
    fn connection() -> (Link, (Sender, Receiver)) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (sender, receiver) = wire(listener.accept().unwrap().0).unwrap();
        ((1, sender, receiver), wire(stream).unwrap())
    }

    fn start(link: Link, alive: Duration, silence: Duration) -> Control {
        let hour = Duration::from_secs(3600);
        Control::start(&Group::new(2, hour), 0, vec![link], hour, Patience { alive, silence })
    }

    /// Its machine has lost power, or its process is stopped: the connection stays open.
    #[test]
    fn a_silent_rank_is_given_up() {
        let (link, _silent) = connection();
        let control = start(link, Duration::from_millis(10), Duration::from_millis(200));
        let error = control.end(Ok(Ok(()))).unwrap_err().to_string();
        assert_eq!(error, "rank 1: has not been heard of for 0.2 s");
    }

    /// A rank that works says so again and again, and hears of the end.
    #[test]
    fn both_sides_say_that_they_are_alive() {
        let (link, (sender, mut receiver)) = connection();
        let control = start(link, Duration::from_millis(1), Duration::from_secs(3600));
        for _ in 0..3 {
            let message = receiver.receive(Instant::now() + Duration::from_secs(600)).unwrap();
            assert!(matches!(message, Some((Message::Alive, _))), "{message:?}");
            sender.send(&Message::Alive).unwrap();
        }
        sender.send(&Message::Left).unwrap();
        drop(sender);
        control.end(Ok(Ok(()))).unwrap();
    }
}
