//! The connections of a group while its ranks work: who fails or ends is told to all by rank 0.

use super::wire::{Message, Receiver, Sender};
use super::Link;
use crate::parallel::group::Group;
use crate::parallel::launch::{panic_message, GRACE};
use crate::{Error, Result};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{mpsc, Arc};
use std::thread;
use std::time::{Duration, Instant};

/// How often both sides say that they are alive.
const ALIVE: Duration = Duration::from_secs(5);
/// After which silence a rank is given up: its machine or the network is gone.
const SILENCE: Duration = Duration::from_secs(60);
/// How long the last messages may take.
const LINGER: Duration = Duration::from_secs(2);
/// Bytes of a problem that are told.
const TOLD: usize = 8 << 10;

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
    pub fn start(group: &Arc<Group>, rank: usize, links: Vec<Link>, timeout: Duration) -> Self {
        let (mut senders, mut receivers) = (Vec::new(), Vec::new());
        for (peer, sender, receiver) in links {
            senders.push(sender);
            receivers.push((peer, receiver));
        }
        let senders: Arc<[Sender]> = senders.into();
        let ended = Arc::new(AtomicBool::new(false));
        let others = Arc::clone(&senders);
        group.on_failure(move |rank, problem| {
            let problem: String = problem.chars().take(TOLD).collect();
            tell(&others, || Message::Failed { rank, problem: problem.clone() });
        });
        let has_ended = Arc::clone(&ended);
        group.on_failure(move |rank, problem| stop_later(has_ended, rank, problem.to_string()));
        let (sender, listening) = mpsc::channel();
        for (link, (peer, receiver)) in receivers.into_iter().enumerate() {
            let (group, senders, sender) = (Arc::clone(group), Arc::clone(&senders), sender.clone());
            spawn(&Arc::clone(&group), peer, move || {
                let problem = senders.get(link).and_then(|link| listen(&group, peer, link, receiver));
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

    /// Tells how this rank has ended, and waits for all others.
    pub fn end<T>(self, result: thread::Result<Result<T>>) -> Result<T> {
        match &result {
            Ok(Ok(_)) => {
                self.group.leave(self.rank);
                if self.rank != 0 {
                    tell(&self.senders, || Message::Left);
                }
            }
            Ok(Err(error)) => self.group.fail(self.rank, error.to_string()),
            Err(panic) => self.group.fail(self.rank, format!("panicked: {}", panic_message(panic.as_ref()))),
        }
        let over = self.group.wait_for_end(None);
        if self.rank == 0 && over.is_ok() {
            tell(&self.senders, || Message::AllLeft);
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

fn tell(senders: &[Sender], message: impl Fn() -> Message) {
    for sender in senders {
        // Whoever does not take it is noticed by its silence.
        let _ = sender.send(&message());
    }
}

/// Reads what `peer` says until nothing more is to come; returns why it cannot go on.
fn listen(group: &Group, peer: usize, sender: &Sender, mut receiver: Receiver) -> Option<String> {
    let (mut heard, mut next) = (Instant::now(), Instant::now());
    loop {
        if Instant::now() >= next {
            // If it cannot be sent, reading fails too.
            let _ = sender.send(&Message::Alive);
            next = Instant::now() + ALIVE;
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
            Ok(None) if heard.elapsed() > SILENCE => {
                return Some(format!("has not been heard of for {} s", SILENCE.as_secs()));
            }
            Ok(None) => {}
            Err(_) if group.has_ended() => return None,
            Err(error) => return Some(format!("its process has ended or cannot be reached: {error}")),
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
