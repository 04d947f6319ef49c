//! Threads that stay together for a whole step: one parallel region with barriers in it, instead of one for each operation.
//!
//! A decode step is a few hundred small pieces of work. Starting each on all threads costs more than some of the pieces;
//! a barrier between threads that are awake costs a fraction of a microsecond. Members share what they compute through
//! [`Shared`] buffers: each writes slots of its own, and reads those of others behind a barrier.

use std::any::Any;
use std::hint::spin_loop;
use std::ops::Range;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// How often a member looks at a barrier before it lets other threads run. On a machine with a thread for each member a
/// barrier opens much sooner; on a busy one, the thread that is waited for may need this very core.
const SPINS: usize = 20_000;

/// What all members of a team share.
struct Team {
    members: usize,
    arrived: AtomicUsize,
    /// How many barriers are behind the team.
    passed: AtomicUsize,
    /// Whether a member has failed: the others stop at their next barrier.
    is_stopped: AtomicBool,
}

/// One thread of a team.
pub(super) struct Member<'a> {
    team: &'a Team,
    #[cfg_attr(not(test), allow(dead_code, reason = "what a member does does not depend on which it is"))]
    index: usize,
}

/// Another member has failed, whose error is the one to report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stopped;

impl Member<'_> {
    /// Which member this is, below [`Member::count`].
    #[cfg(test)]
    pub(super) fn index(&self) -> usize {
        self.index
    }

    /// How many members there are.
    pub(super) fn count(&self) -> usize {
        self.team.members
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
    match crew {
        Crew::Pool => {
            let pool = candle_core::utils::barrier_pool();
            run_team(pool.n_workers() + 1, &work, |member| pool.execute(member))
        }
        #[cfg(test)]
        Crew::Own(members) => run_team(members, &work, |member| {
            std::thread::scope(|scope| {
                for index in 0..members {
                    scope.spawn(move || member(index));
                }
            });
        }),
    }
}

/// [`run`] with a team of this size, whose threads `start` gives the numbers of members.
fn run_team<E: Send>(
    members: usize,
    work: &(impl Fn(&Member) -> Result<(), Failure<E>> + Sync),
    start: impl FnOnce(&(dyn Fn(usize) + Sync)),
) -> Result<(), E> {
    let team = Team {
        members,
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

/// Work that members take from in turn, so that one which is held up does not keep the others waiting.
pub(super) struct Cursor(AtomicUsize);

impl Cursor {
    pub(super) fn new() -> Self {
        Self(AtomicUsize::new(0))
    }

    /// The next `step` of `len` items that no member has taken.
    pub(super) fn take(&self, len: usize, step: usize) -> Option<Range<usize>> {
        let start = self.0.fetch_add(step, Ordering::Relaxed);
        (start < len).then(|| start..len.min(start + step))
    }

    /// A share of the items that no member has taken, `least` or more: three quarters of what would be each one's. So shares are few,
    /// since a member begins each by waiting for memory, and become small where all are about to meet.
    pub(super) fn take_share(&self, len: usize, least: usize, member: &Member) -> Option<Range<usize>> {
        let end = |start: usize| {
            let share = len.saturating_sub(start) / 4 * 3 / member.count();
            len.min(start + share.max(least))
        };
        let next = |start: usize| (start < len).then(|| end(start));
        let start = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).ok()?;
        Some(start..end(start))
    }
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
    use super::*;

    #[test]
    fn what_was_written_before_a_barrier_is_read_behind_it() {
        for members in [1, 2, 3, 8] {
            let rounds = 200;
            let buffers = [Shared::new(members), Shared::new(members)];
            let cursors: Vec<_> = (0..rounds).map(|_| Cursor::new()).collect();
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
    fn shares_are_every_item_once_and_become_small() {
        for (members, len, least) in [(1, 10, 1), (2, 192, 4), (3, 1000, 1), (8, 5, 2), (2, 0, 3)] {
            let (cursor, taken) = (Cursor::new(), Mutex::new(Vec::new()));
            run::<()>(Crew::Own(members), |member| {
                while let Some(share) = cursor.take_share(len, least, member) {
                    taken.lock().unwrap().push(share);
                }
                Ok(())
            })
            .unwrap();
            let mut taken = taken.into_inner().unwrap();
            taken.sort_by_key(|share| share.start);
            let mut next = 0;
            for share in taken {
                assert_eq!(share.start, next, "{members} members");
                let of_rest = ((len - next) / 4 * 3 / members).max(least);
                assert_eq!(share.len(), of_rest.min(len - next), "{members} members at {next}");
                next = share.end;
            }
            assert_eq!(next, len);
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
