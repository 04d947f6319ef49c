//! Ranks that are threads of one process. Tensors are handed over through the memory of the host.

use super::collective::{wrong_dim, Collective};
use super::shard::split;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What the ranks share.
#[derive(Debug)]
pub(super) struct Group {
    world_size: usize,
    timeout: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// Operations that all ranks have come to.
    rounds: u64,
    /// What ranks have brought to the operation that is under way.
    brought: Vec<Option<Brought>>,
    /// What all brought to the last operation. No rank replaces it before every other one has taken it: to end
    /// the next round, all have to come.
    complete: Arc<[Brought]>,
    /// Ranks whose work is done.
    left: Vec<bool>,
    /// The first failure; nothing goes on after it.
    failure: Option<(usize, String)>,
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
            rounds: 0,
            brought: vec![None; world_size],
            complete: Arc::new([]),
            left: vec![false; world_size],
            failure: None,
        };
        Arc::new(Self { world_size, timeout, state: Mutex::new(state), changed: Condvar::new() })
    }

    /// Ends the work of all ranks, unless something else has: `rank` has failed.
    pub fn fail(&self, rank: usize, problem: String) {
        self.lock().failure.get_or_insert((rank, problem));
        self.changed.notify_all();
    }

    /// `rank` has done its work and comes to no more operations.
    pub fn leave(&self, rank: usize) {
        if let Some(left) = self.lock().left.get_mut(rank) {
            *left = true;
        }
        self.changed.notify_all();
    }

    /// The first failure.
    pub fn failure(&self) -> Option<Error> {
        self.lock().failure()
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
            state.failure = Some((rank, problem));
            self.changed.notify_all();
            return Err(state.failure().unwrap_or_else(|| no_rank(rank)));
        }
        let operation = brought.operation.clone();
        *state.brought.get_mut(rank).ok_or_else(|| no_rank(rank))? = Some(brought);
        if state.brought.iter().all(Option::is_some) {
            state.complete = state.brought.iter_mut().filter_map(Option::take).collect();
            state.rounds += 1;
            self.changed.notify_all();
            return Ok(Arc::clone(&state.complete));
        }
        self.wait(rank, &operation, state)
    }

    fn wait(
        &self,
        rank: usize,
        operation: &Operation,
        mut state: MutexGuard<State>,
    ) -> Result<Arc<[Brought]>> {
        let (round, start) = (state.rounds, Instant::now());
        loop {
            if state.rounds != round {
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
            if let Some(problem) = problem {
                state.failure = Some(problem);
                self.changed.notify_all();
                continue;
            }
            state = self.changed.wait_timeout(state, rest).unwrap_or_else(PoisonError::into_inner).0;
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

fn no_rank(rank: usize) -> Error {
    Error::mismatch("rank", "one of the group", rank.to_string())
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
        self.group.world_size
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
