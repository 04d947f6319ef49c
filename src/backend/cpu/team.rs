//! Threads that stay together for a whole step: one parallel region with barriers in it, instead of one for each operation.
//!
//! A decode step is a few hundred small pieces of work. Starting each on all threads costs more than some of the pieces;
//! a barrier between threads that are awake costs a fraction of a microsecond. Members share what they compute through
//! [`Shared`] buffers: each writes slots of its own, and reads those of others behind a barrier.

use crate::memory_nodes::Nodes;
use std::any::Any;
use std::hint::spin_loop;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// How often a member looks at a barrier before it lets other threads run. On a machine with a thread for each member a
/// barrier opens much sooner; on a busy one, the thread that is waited for may need this very core.
const SPINS: usize = 20_000;

/// What all members of a team share.
struct Team {
    members: usize,
    /// Memory nodes that they are spread over.
    nodes: usize,
    arrived: AtomicUsize,
    /// How many barriers are behind the team.
    passed: AtomicUsize,
    /// Whether a member has failed: the others stop at their next barrier.
    is_stopped: AtomicBool,
}

/// One thread of a team.
pub(super) struct Member<'a> {
    team: &'a Team,
    index: usize,
}

/// Another member has failed, whose error is the one to report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stopped;

impl Member<'_> {
    /// Which member this is, below [`Member::count`]. What it computes does not depend on that.
    #[cfg(test)]
    pub(super) fn index(&self) -> usize {
        self.index
    }

    /// How many members there are.
    pub(super) fn count(&self) -> usize {
        self.team.members
    }

    /// How many memory nodes the members are spread over.
    pub(super) fn nodes(&self) -> usize {
        self.team.nodes
    }

    /// The one that this member is on.
    pub(super) fn node(&self) -> usize {
        self.index * self.team.nodes / self.team.members.max(1)
    }

    /// Waits until all members have come here. What they wrote before is seen behind it.
    ///
    /// # Errors
    /// If a member failed.
    pub(super) fn wait(&self) -> Result<(), Stopped> {
        let team = self.team;
        let passed = team.passed.load(Ordering::Relaxed);
        if team.arrived.fetch_add(1, Ordering::AcqRel) + 1 == team.members {
            team.arrived.store(0, Ordering::Relaxed);
            team.passed.store(passed.wrapping_add(1), Ordering::Release);
        } else {
            let mut looks = 0usize;
            while team.passed.load(Ordering::Acquire) == passed {
                if team.is_stopped.load(Ordering::Relaxed) {
                    return Err(Stopped);
                }
                looks += 1;
                if looks < SPINS {
                    spin_loop();
                } else {
                    std::thread::yield_now();
                }
            }
        }
        match team.is_stopped.load(Ordering::Relaxed) {
            true => Err(Stopped),
            false => Ok(()),
        }
    }
}

/// Why a member ends early.
pub(super) enum Failure<E> {
    Stopped,
    Error(E),
}

impl<E> From<Stopped> for Failure<E> {
    fn from(_: Stopped) -> Self {
        Self::Stopped
    }
}

impl From<candle_core::Error> for Failure<candle_core::Error> {
    fn from(error: candle_core::Error) -> Self {
        Self::Error(error)
    }
}

/// Which threads are a team.
#[derive(Clone, Copy, Debug)]
pub(super) enum Crew {
    /// Those of candle's pool, and the caller.
    Pool,
    /// So many of its own.
    #[cfg(test)]
    Own(usize),
    /// The same, as if these were spread over so many memory nodes.
    #[cfg(test)]
    OnNodes(usize, usize),
}

/// Runs `work` once on every thread, as members of one team. Must not be called from `work`, nor wait for another caller of
/// this function: the pool takes one call at a time.
///
/// # Errors
/// The error of the first member that failed.
pub(super) fn run<E: Send>(
    crew: Crew,
    work: impl Fn(&Member) -> Result<(), Failure<E>> + Sync,
) -> Result<(), E> {
    let nodes = Nodes::current();
    match crew {
        Crew::Pool => {
            let pool = candle_core::utils::barrier_pool();
            let on_nodes = |member: &Member| {
                let _stay = nodes.stay(member.node());
                work(member)
            };
            run_team((pool.n_workers() + 1, nodes.count()), &on_nodes, |member| pool.execute(member))
        }
        #[cfg(test)]
        Crew::Own(members) => run(Crew::OnNodes(members, 1), work),
        #[cfg(test)]
        Crew::OnNodes(members, nodes) => run_team((members, nodes), &work, |member| {
            std::thread::scope(|scope| {
                for index in 0..members {
                    scope.spawn(move || member(index));
                }
            });
        }),
    }
}

/// [`run`] with a team of this size on so many nodes, whose threads `start` gives the numbers of members.
fn run_team<E: Send>(
    (members, nodes): (usize, usize),
    work: &(impl Fn(&Member) -> Result<(), Failure<E>> + Sync),
    start: impl FnOnce(&(dyn Fn(usize) + Sync)),
) -> Result<(), E> {
    let team = Team {
        members,
        nodes,
        arrived: AtomicUsize::new(0),
        passed: AtomicUsize::new(0),
        is_stopped: AtomicBool::new(false),
    };
    let error: Mutex<Option<E>> = Mutex::new(None);
    let panic: Mutex<Option<Box<dyn Any + Send>>> = Mutex::new(None);
    start(&|index| {
        // The others would wait for ever for a member that unwinds.
        match catch_unwind(AssertUnwindSafe(|| work(&Member { team: &team, index }))) {
            Ok(Ok(()) | Err(Failure::Stopped)) => return,
            Ok(Err(Failure::Error(found))) => {
                error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(found);
            }
            Err(cause) => {
                panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(cause);
            }
        }
        team.is_stopped.store(true, Ordering::Relaxed);
    });
    if let Some(cause) = panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
        resume_unwind(cause);
    }
    error.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

/// Numbers that members write, each slots of its own, and that all read behind a barrier.
pub(super) struct Shared(Vec<AtomicU32>);

impl Shared {
    /// Zeros.
    pub(super) fn new(len: usize) -> Self {
        Self(std::iter::repeat_with(AtomicU32::default).take(len).collect())
    }

    /// Copies the numbers from `start` on into `to`.
    pub(super) fn read(&self, start: usize, to: &mut [f32]) {
        let from = self.0.get(start..).unwrap_or_default();
        debug_assert!(from.len() >= to.len());
        to.iter_mut().zip(from).for_each(|(to, from)| *to = f32::from_bits(from.load(Ordering::Relaxed)));
    }

    /// All numbers, in the same memory: a second buffer of logits is fresh pages for each token.
    pub(super) fn into_numbers(self) -> Vec<f32> {
        self.0.into_iter().map(|number| f32::from_bits(number.into_inner())).collect()
    }

    /// Writes the numbers from `start` on.
    pub(super) fn write(&self, start: usize, from: &[f32]) {
        let to = self.0.get(start..).unwrap_or_default();
        debug_assert!(to.len() >= from.len());
        to.iter().zip(from).for_each(|(to, from)| to.store(from.to_bits(), Ordering::Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use super::super::cursor::Cursor;
    use super::*;

    #[test]
    fn what_was_written_before_a_barrier_is_read_behind_it() {
        for members in [1, 2, 3, 8] {
            let rounds = 200;
            let buffers = [Shared::new(members), Shared::new(members)];
            let cursors: Vec<_> = (0..rounds).map(|_| Cursor::default()).collect();
            run::<()>(Crew::Own(members), |member| {
                assert_eq!(member.count(), members);
                for round in 0..rounds {
                    let (from, to) = (&buffers[round % 2], &buffers[(round + 1) % 2]);
                    let mut all = vec![0.; members];
                    from.read(0, &mut all);
                    assert_eq!(all, vec![round as f32; members], "member {} round {round}", member.index());
                    while let Some(slots) = cursors[round].take(members, 1) {
                        to.write(slots.start, &[round as f32 + 1.]);
                    }
                    member.wait()?;
                }
                Ok(())
            })
            .unwrap();
        }
    }

    #[test]
    fn an_error_reaches_the_caller_and_nobody_waits_for_ever() {
        let failed = run(Crew::Own(3), |member| {
            if member.index() == 1 {
                return Err(Failure::Error("no"));
            }
            loop {
                member.wait()?;
            }
        });
        assert_eq!(failed, Err("no"));
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_works_again() {
        let panicked = catch_unwind(|| {
            run::<()>(Crew::Pool, |member| {
                assert!(member.index() != 0, "planted");
                member.wait()?;
                Ok(())
            })
        });
        assert!(panicked.is_err());
        let count = AtomicUsize::new(0);
        run::<()>(Crew::Pool, |member| {
            member.wait()?;
            count.fetch_add(1, Ordering::Relaxed);
            Ok(())
        })
        .unwrap();
        assert_eq!(count.into_inner(), candle_core::utils::barrier_pool().n_workers() + 1);
    }
}
