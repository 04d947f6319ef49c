//! The connections of a group while its ranks work: rank 0 reports failures and ends to all.

use super::channel::{lost, Message, Receiver, Sender};
use super::text::PeerText;
use super::{Limits, Link};
use crate::distributed::failure::{panic_message, GRACE};
use crate::distributed::host_group::Group;
use crate::{Error, Result};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{mpsc, Arc};
use std::thread;
use std::time::{Duration, Instant};

/// How long the last messages may take.
const LINGER: Duration = Duration::from_secs(2);
/// How often both sides say that they are alive: several times in the silence that is allowed, and at least that often.
const ALIVE: Duration = Duration::from_secs(5);
const ALIVE_IN_SILENCE: u32 = 4;

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
        Limits { timeout, silence }: Limits,
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
            broadcast(&others, &Message::Failed { rank, problem: PeerText::from(problem) });
        });
        let has_ended = Arc::clone(&ended);
        group.on_failure(move |rank, problem| stop_later(has_ended, rank, problem.to_string()));
        let (sender, listening) = mpsc::channel();
        for (link, (peer, receiver)) in receivers.into_iter().enumerate() {
            let (group, senders, sender) = (Arc::clone(group), Arc::clone(&senders), sender.clone());
            spawn(&Arc::clone(&group), peer, move || {
                let problem =
                    senders.get(link).and_then(|link| listen(&group, peer, link, receiver, silence));
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
                    broadcast(&self.senders, &Message::Left);
                }
            }
            Ok(Err(error)) => self.group.fail(self.rank, error.to_string()),
            Err(panic) => self.group.fail(self.rank, format!("panicked: {}", panic_message(panic.as_ref()))),
        }
        let over = self.group.wait_for_end(None);
        if self.rank == 0 && over.is_ok() {
            broadcast(&self.senders, &Message::AllLeft);
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

fn broadcast(senders: &[Sender], message: &Message) {
    for sender in senders {
        // A rank that does not receive it is noticed by its silence.
        let _ = sender.send(message);
    }
}

/// Reads what `peer` says until nothing more is to come; returns why it cannot go on.
fn listen(
    group: &Group,
    peer: usize,
    sender: &Sender,
    mut receiver: Receiver,
    silence: Duration,
) -> Option<String> {
    let alive = (silence / ALIVE_IN_SILENCE).min(ALIVE);
    let (mut heard, mut next) = (Instant::now(), Instant::now());
    loop {
        if Instant::now() >= next {
            // If it cannot be sent, reading fails too.
            let _ = sender.send(&Message::Alive);
            next = Instant::now() + alive;
        }
        match receiver.receive(next.min(heard + silence)) {
            Ok(Some(message)) => {
                heard = Instant::now();
                match message {
                    Message::Alive => {}
                    Message::Left if peer != 0 => group.leave(peer),
                    Message::AllLeft if peer == 0 => {
                        group.all_left();
                        return None;
                    }
                    Message::Failed { rank, problem } if rank < group.world_size() => {
                        group.fail(rank, problem.into());
                        return None;
                    }
                    _ => return Some("sent messages out of order".to_string()),
                }
            }
            Ok(None) if heard.elapsed() >= silence => {
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
    use super::super::handshake::tests::connection;
    use super::*;

    fn start(sender: Sender, receiver: Receiver, silence: Duration) -> Control {
        let hour = Duration::from_secs(3600);
        Control::start(
            &Group::new(2, hour),
            0,
            vec![(1, sender, receiver)],
            Limits { timeout: hour, silence },
        )
    }

    /// Its machine has lost power, or its process is stopped: the connection stays open.
    #[test]
    fn a_silent_rank_is_given_up() {
        let ((sender, receiver), _silent) = connection();
        let start_of_silence = Instant::now();
        let control = start(sender, receiver, Duration::from_millis(200));
        let error = control.end(Ok(Ok(()))).unwrap_err().to_string();
        assert_eq!(error, "rank 1: has not been heard of for 0.2 s");
        assert!(start_of_silence.elapsed() >= Duration::from_millis(200));
    }

    /// A rank that works says so again and again, and hears of the end.
    #[test]
    fn both_sides_say_that_they_are_alive() {
        let ((sender, receiver), (of_rank, mut to_rank)) = connection();
        let control = start(sender, receiver, Duration::from_secs(2));
        for _ in 0..3 {
            let message = to_rank.receive(Instant::now() + Duration::from_secs(600)).unwrap();
            assert!(matches!(message, Some(Message::Alive)), "{message:?}");
            of_rank.send(&Message::Alive).unwrap();
        }
        of_rank.send(&Message::Left).unwrap();
        drop(of_rank);
        control.end(Ok(Ok(()))).unwrap();
    }

    /// Only rank 0 says for all that they have ended, and nobody reports ranks that are none.
    #[test]
    fn what_is_not_for_a_rank_to_say_is_out_of_order() {
        let no_rank = Message::Failed { rank: 2, problem: "is none".into() };
        let again = Message::Welcome { token: Vec::new(), silence: Duration::from_secs(1) };
        for message in [Message::AllLeft, no_rank, again] {
            let ((sender, receiver), (of_rank, _to_rank)) = connection();
            let control = start(sender, receiver, Duration::from_secs(600));
            of_rank.send(&message).unwrap();
            let error = control.end(Ok(Ok(()))).unwrap_err().to_string();
            assert_eq!(error, "rank 1: sent messages out of order");
        }
    }
}
