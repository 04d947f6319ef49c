//! Ranks that are threads of one process. Tensors are handed over through the memory of the host.

use super::collective::{no_rank, wrong_dim, Collective};
use super::partition::split;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use std::fmt;
use std::hint;
use std::mem;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How long a rank looks for the others before it sleeps: to be woken takes longer than they mostly do.
const LOOK: Duration = Duration::from_millis(1);

/// How often it looks before it lets other threads of its core go first.
const LOOKS: usize = 32;

/// What the ranks share.
#[derive(Debug)]
pub(super) struct Group {
    world_size: usize,
    timeout: Duration,
    state: Mutex<State>,
    /// Operations that all ranks have come to; counted while the state is locked.
    rounds: AtomicU64,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// What ranks have brought to the operation that is under way.
    brought: Vec<Option<Brought>>,
    /// What all brought to the last operation. No rank replaces it before every other one has taken it: to end
    /// the next round, all have to come.
    complete: Arc<[Brought]>,
    /// Ranks that sleep until something changes.
    sleeping: usize,
    /// Ranks whose work is done.
    left: Vec<bool>,
    /// When the first of them left.
    first_left: Option<Instant>,
    /// The first failure; nothing goes on after it.
    failure: Option<(usize, String)>,
    /// What is to be done then.
    on_failure: Hooks,
}

/// What is called with the first failure: its rank, and what happened.
type Hook = Box<dyn FnOnce(usize, &str) + Send>;

#[derive(Default)]
struct Hooks(Vec<Hook>);

impl fmt::Debug for Hooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} hooks", self.0.len())
    }
}

#[derive(Clone, Debug)]
struct Brought {
    operation: Operation,
    /// In the memory of the host.
    tensor: Tensor,
}

/// What has to be alike on all ranks.
#[derive(Clone, Debug, PartialEq)]
enum Operation {
    AllReduceSum {
        dtype: DType,
        dims: Vec<usize>,
    },
    /// `dims` without that along which is joined.
    AllGather {
        dim: usize,
        dtype: DType,
        dims: Vec<usize>,
    },
    ReduceScatter {
        dim: usize,
        dtype: DType,
        dims: Vec<usize>,
    },
    Broadcast {
        root: usize,
        dtype: DType,
        dims: Vec<usize>,
    },
    Barrier,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AllReduceSum { dtype, dims } => write!(f, "all_reduce_sum of {dtype:?} {dims:?}"),
            Self::AllGather { dim, dtype, dims } => {
                write!(f, "all_gather along {dim} of {dtype:?} {dims:?} beside it")
            }
            Self::ReduceScatter { dim, dtype, dims } => {
                write!(f, "reduce_scatter along {dim} of {dtype:?} {dims:?}")
            }
            Self::Broadcast { root, dtype, dims } => write!(f, "broadcast of {dtype:?} {dims:?} from {root}"),
            Self::Barrier => write!(f, "barrier"),
        }
    }
}

impl Group {
    pub fn new(world_size: usize, timeout: Duration) -> Arc<Self> {
        let state = State {
            brought: vec![None; world_size],
            complete: Arc::new([]),
            sleeping: 0,
            left: vec![false; world_size],
            first_left: None,
            failure: None,
            on_failure: Hooks::default(),
        };
        let (state, rounds) = (Mutex::new(state), AtomicU64::new(0));
        Arc::new(Self { world_size, timeout, state, rounds, changed: Condvar::new() })
    }

    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Ends the work of all ranks, unless something else has: `rank` has failed.
    pub fn fail(&self, rank: usize, problem: String) {
        self.fail_in(self.lock(), rank, problem);
    }

    /// Returns the first failure, which this is unless there is one.
    fn fail_in(&self, mut state: MutexGuard<'_, State>, rank: usize, problem: String) -> Error {
        let (rank, problem) = state.failure.get_or_insert((rank, problem)).clone();
        let hooks = mem::take(&mut state.on_failure.0);
        drop(state);
        self.changed.notify_all();
        for hook in hooks {
            hook(rank, &problem);
        }
        Error::Rank { rank, problem }
    }

    /// Calls `hook` as soon as a rank fails, on the thread that reports it.
    pub fn on_failure(&self, hook: impl FnOnce(usize, &str) + Send + 'static) {
        let mut state = self.lock();
        match state.failure.clone() {
            None => state.on_failure.0.push(Box::new(hook)),
            Some((rank, problem)) => {
                drop(state);
                hook(rank, &problem);
            }
        }
    }

    /// `rank` has done its work and comes to no more operations.
    pub fn leave(&self, rank: usize) {
        let mut state = self.lock();
        state.first_left.get_or_insert_with(Instant::now);
        if let Some(left) = state.left.get_mut(rank) {
            *left = true;
        }
        drop(state);
        self.changed.notify_all();
    }

    /// All ranks have left.
    #[cfg(feature = "processes")]
    pub fn all_left(&self) {
        (0..self.world_size).for_each(|rank| self.leave(rank));
    }

    /// Whether all ranks have left, or one has failed.
    #[cfg(feature = "processes")]
    pub fn has_ended(&self) -> bool {
        let state = self.lock();
        state.failure.is_some() || state.left.iter().all(|left| *left)
    }

    /// The first failure.
    pub fn failure(&self) -> Option<Error> {
        self.lock().failure()
    }

    /// The first failure, if there is one before `limit` has passed.
    #[cfg(feature = "nccl")]
    pub fn failure_within(&self, limit: Duration) -> Option<Error> {
        let start = Instant::now();
        let mut state = self.lock();
        loop {
            let rest = limit.saturating_sub(start.elapsed());
            if state.failure.is_some() || rest.is_zero() {
                return state.failure();
            }
            state = self.changed.wait_timeout(state, rest).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits until all ranks have left. If some have not when `limit` has passed since the first did, the first
    /// of them fails: it may be waiting for those that have left.
    pub fn wait_for_end(&self, limit: Option<Duration>) -> Result<()> {
        let mut state = self.lock();
        loop {
            if let Some(failure) = state.failure() {
                return Err(failure);
            }
            let Some(at_work) = state.left.iter().position(|left| !left) else { return Ok(()) };
            let rest = match (limit, state.first_left) {
                (Some(limit), Some(first)) => limit.saturating_sub(first.elapsed()),
                _ => Duration::from_secs(3600),
            };
            if rest.is_zero() {
                let problem = format!(
                    "still works {} s after the first rank has ended",
                    limit.unwrap_or_default().as_secs_f64()
                );
                return Err(self.fail_in(state, at_work, problem));
            }
            state = self.changed.wait_timeout(state, rest).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic while the lock is held leaves nothing half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Brings something to an operation, waits for all others, and takes what they brought.
    fn exchange(&self, rank: usize, operation: Operation, x: &Tensor) -> Result<Arc<[Brought]>> {
        let brought = Brought { operation, tensor: x.to_device(&Device::Cpu)? };
        let mut state = self.lock();
        if let Some(failure) = state.failure() {
            return Err(failure);
        }
        let first = state.brought.iter().enumerate().find_map(|(rank, other)| Some((rank, other.as_ref()?)));
        if let Some((other, _)) = first.filter(|(_, other)| other.operation != brought.operation) {
            let theirs = first.map(|(_, other)| other.operation.to_string()).unwrap_or_default();
            let problem = format!("is at {}, while rank {other} is at {theirs}", brought.operation);
            return Err(self.fail_in(state, rank, problem));
        }
        let operation = brought.operation.clone();
        *state.brought.get_mut(rank).ok_or_else(|| no_rank(rank))? = Some(brought);
        if state.brought.iter().all(Option::is_some) {
            state.complete = state.brought.iter_mut().filter_map(Option::take).collect();
            self.rounds.fetch_add(1, Ordering::Release);
            if state.sleeping > 0 {
                self.changed.notify_all();
            }
            return Ok(Arc::clone(&state.complete));
        }
        self.wait(rank, &operation, state)
    }

    fn wait(&self, rank: usize, operation: &Operation, state: MutexGuard<State>) -> Result<Arc<[Brought]>> {
        let (round, start) = (self.rounds.load(Ordering::Acquire), Instant::now());
        let is_over = || self.rounds.load(Ordering::Acquire) != round;
        drop(state);
        while !is_over() && start.elapsed() < LOOK {
            (0..LOOKS).take_while(|_| !is_over()).for_each(|_| hint::spin_loop());
            if !is_over() {
                thread::yield_now();
            }
        }
        let mut state = self.lock();
        loop {
            if is_over() {
                return Ok(Arc::clone(&state.complete));
            }
            if let Some(failure) = state.failure() {
                return Err(failure);
            }
            let mut absent = (0..self.world_size).filter(|&other| state.is_absent(other));
            let late = absent.clone().next();
            let gone = absent.find(|&other| state.left.get(other) == Some(&true));
            let rest = self.timeout.saturating_sub(start.elapsed());
            let problem = match (gone, late) {
                (Some(gone), _) => {
                    Some((gone, format!("has ended, while rank {rank} waits for it at {operation}")))
                }
                (None, Some(late)) if rest.is_zero() => {
                    let time = self.timeout.as_secs_f64();
                    let problem =
                        format!("has not come to {operation} within {time} s, where rank {rank} waits");
                    Some((late, problem))
                }
                _ => None,
            };
            if let Some((rank, problem)) = problem {
                return Err(self.fail_in(state, rank, problem));
            }
            state.sleeping += 1;
            state = self.changed.wait_timeout(state, rest).unwrap_or_else(PoisonError::into_inner).0;
            state.sleeping -= 1;
        }
    }
}

impl State {
    fn failure(&self) -> Option<Error> {
        let (rank, problem) = self.failure.clone()?;
        Some(Error::Rank { rank, problem })
    }

    fn is_absent(&self, rank: usize) -> bool {
        self.brought.get(rank).is_some_and(Option::is_none)
    }
}

/// One rank of a [`Group`].
#[derive(Debug)]
pub(super) struct Member {
    pub index: usize,
    pub group: Arc<Group>,
}

impl Member {
    fn sum(&self, brought: &[Brought]) -> Result<Tensor> {
        let mut terms = brought.iter().map(|brought| &brought.tensor);
        let first = terms.next().ok_or_else(|| no_rank(self.index))?;
        let sum_dtype = match first.dtype() {
            DType::F16 | DType::BF16 => DType::F32,
            other => other,
        };
        let start = first.to_dtype(sum_dtype)?;
        let sum = terms.try_fold(start, |sum, term| sum + term.to_dtype(sum_dtype)?)?;
        Ok(sum.to_dtype(first.dtype())?)
    }
}

impl Collective for Member {
    fn index(&self) -> usize {
        self.index
    }

    fn world_size(&self) -> usize {
        self.group.world_size()
    }

    fn all_reduce_sum(&self, x: &Tensor) -> Result<Tensor> {
        let operation = Operation::AllReduceSum { dtype: x.dtype(), dims: x.dims().to_vec() };
        let brought = self.group.exchange(self.index, operation, x)?;
        Ok(self.sum(&brought)?.to_device(x.device())?)
    }

    fn all_gather(&self, x: &Tensor, dim: usize) -> Result<Tensor> {
        let mut dims = x.dims().to_vec();
        if dim >= dims.len() {
            return Err(wrong_dim(x, dim));
        }
        dims.remove(dim);
        let operation = Operation::AllGather { dim, dtype: x.dtype(), dims };
        let brought = self.group.exchange(self.index, operation, x)?;
        let parts: Vec<&Tensor> = brought.iter().map(|brought| &brought.tensor).collect();
        Ok(Tensor::cat(&parts, dim)?.to_device(x.device())?)
    }

    fn reduce_scatter(&self, x: &Tensor, dim: usize) -> Result<Tensor> {
        let len = *x.dims().get(dim).ok_or_else(|| wrong_dim(x, dim))?;
        let shares = split(len, 1, self.world_size()).ok_or_else(|| {
            let expected = format!("{} or more entries along {dim}, one for each rank", self.world_size());
            Error::mismatch("reduce_scatter", expected, len.to_string())
        })?;
        let share = shares.get(self.index).ok_or_else(|| no_rank(self.index))?;
        let operation = Operation::ReduceScatter { dim, dtype: x.dtype(), dims: x.dims().to_vec() };
        let brought = self.group.exchange(self.index, operation, x)?;
        let narrow = |brought: &Brought| {
            let tensor = brought.tensor.narrow(dim, share.start, share.len())?;
            Ok(Brought { operation: brought.operation.clone(), tensor })
        };
        let shares: Vec<_> = brought.iter().map(narrow).collect::<Result<_>>()?;
        Ok(self.sum(&shares)?.contiguous()?.to_device(x.device())?)
    }

    fn broadcast(&self, x: &Tensor, root: usize) -> Result<Tensor> {
        let operation = Operation::Broadcast { root, dtype: x.dtype(), dims: x.dims().to_vec() };
        if root >= self.world_size() {
            return Err(no_rank(root));
        }
        let brought = self.group.exchange(self.index, operation, x)?;
        let from_root = brought.get(root).ok_or_else(|| no_rank(root))?;
        Ok(from_root.tensor.to_device(x.device())?)
    }

    fn barrier(&self) -> Result<()> {
        let nothing = Tensor::zeros((), DType::U8, &Device::Cpu)?;
        self.group.exchange(self.index, Operation::Barrier, &nothing).map(drop)
    }
}
