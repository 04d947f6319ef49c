//! Starting the ranks: one thread each, for life.

use super::failure::{panic_message, GRACE};
use super::host_group::{Group, Member};
#[cfg(feature = "processes")]
use super::launcher_env::RankInfo;
use super::nccl;
use super::rank::Rank;
#[cfg(feature = "processes")]
use super::rendezvous::{self, Joined, Limits, Secret};
use crate::{Error, Result};
use candle_core::Device;
use rayon::ThreadPoolBuilder;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::{mpsc, Arc};
use std::thread;
use std::time::{Duration, Instant};

/// The most ranks of one process: more than a machine has devices. Each has a thread, and its part of a model, which at
/// worst is all of it; whatever is larger is a mistake.
pub const MOST_RANKS_OF_A_PROCESS: usize = 256;

/// Runs `body` as one rank for each device, each on a thread of its own, and returns their results in order.
///
/// What a rank does by several threads, it does by its share of those of rayon's current pool.
///
/// A device may be named several times. As soon as one rank fails, all others end at their next collective.
/// With the feature `nccl`, ranks that all have GPUs of their own speak through NCCL.
///
/// # Errors
/// [`Error::Rank`] with the message of the first rank that returned an error, panicked or did not come to where
/// others waited; if there are no devices, or more than [`MOST_RANKS_OF_A_PROCESS`].
pub fn run<T, F>(devices: &[Device], body: F) -> Result<Vec<T>>
where
    T: Send + 'static,
    F: Fn(Rank) -> Result<T> + Send + Sync + 'static,
{
    Launch::default().run(devices, body)
}

/// How ranks are started, for [`run`] with other settings than its own.
#[derive(Clone, Debug)]
pub struct Launch {
    timeout: Duration,
    /// Of processes.
    #[cfg(feature = "processes")]
    heartbeat_timeout: Duration,
    through_host: bool,
}

impl Default for Launch {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(300),
            #[cfg(feature = "processes")]
            heartbeat_timeout: Duration::from_secs(20),
            through_host: false,
        }
    }
}

impl Launch {
    /// How long a rank waits for the others, 300 seconds unless said otherwise. The first wait of a model comes
    /// when its weights are loaded, which takes some ranks longer than others.
    #[must_use]
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// With the feature `processes`: after which silence a process counts as failed, 20 seconds unless said otherwise. It is
    /// frozen, or its machine or the network is gone: a working process says that it is alive several times in that time.
    /// What rank 0 is told counts for all.
    #[cfg(feature = "processes")]
    #[must_use]
    pub fn heartbeat_timeout(self, heartbeat_timeout: Duration) -> Self {
        Self { heartbeat_timeout, ..self }
    }

    /// Hands tensors over through the memory of the host, where NCCL could do it: sums are those of any devices.
    #[must_use]
    pub fn through_host(self) -> Self {
        Self { through_host: true, ..self }
    }

    /// See [`run`]. A rank that has not ended some seconds after a failure, because it comes to no collective,
    /// is left behind with its thread.
    ///
    /// # Errors
    /// As those of [`run`].
    pub fn run<T, F>(&self, devices: &[Device], body: F) -> Result<Vec<T>>
    where
        T: Send + 'static,
        F: Fn(Rank) -> Result<T> + Send + Sync + 'static,
    {
        if devices.is_empty() {
            return Err(Error::mismatch("devices", "one for each rank", "none"));
        }
        if devices.len() > MOST_RANKS_OF_A_PROCESS {
            let expected = format!("at most {MOST_RANKS_OF_A_PROCESS}");
            return Err(Error::mismatch("ranks of one process", expected, devices.len().to_string()));
        }
        let group = Group::new(devices.len(), self.timeout);
        let id = match !self.through_host && nccl::serves(devices) {
            true => Some(nccl::new_id()?),
            false => None,
        };
        if id.is_some() {
            let (group, timeout) = (Arc::clone(&group), self.timeout);
            // NCCL does not notice who has ended; whatever this finds, the group knows.
            let watch = move || drop(group.wait_for_end(Some(timeout)));
            thread::Builder::new().spawn(watch).map_err(candle_core::Error::wrap)?;
        }
        let body = Arc::new(body);
        let (sender, results) = mpsc::channel();
        let of_failure = sender.clone();
        // The rank that failed may not be able to report it itself.
        group.on_failure(move |_, _| drop(of_failure.send(None)));
        // A rank is a thread of its own pool, among which it shares its work: it waits for no thread of another's, and
        // all together are no more than there are cores, or else one for each rank.
        let threads = (rayon::current_num_threads() / devices.len()).max(1);
        for (index, device) in devices.iter().enumerate() {
            let (group_of_rank, body, sender) = (Arc::clone(&group), Arc::clone(&body), sender.clone());
            let (device, id) = (device.clone(), id.clone());
            let work = move || {
                let group = &group_of_rank;
                let rank = || match &id {
                    Some(id) => nccl::connect(id, &device, index, group),
                    None => Ok(Rank::new(&device, Arc::new(Member { index, group: Arc::clone(group) }))),
                };
                let result = catch_unwind(AssertUnwindSafe(|| body(rank()?)));
                match &result {
                    Ok(Ok(_)) => group_of_rank.leave(index),
                    Ok(Err(error)) => group_of_rank.fail(index, error.to_string()),
                    Err(panic) => {
                        group_of_rank.fail(index, format!("panicked: {}", panic_message(panic.as_ref())))
                    }
                }
                // Nobody listens if another rank has failed long ago.
                let _ = sender.send(result.ok().and_then(Result::ok).map(|value| (index, value)));
            };
            let pool =
                ThreadPoolBuilder::new().num_threads(threads).thread_name(move |_| format!("rank {index}"));
            match pool.build() {
                Ok(pool) => pool.spawn(work),
                Err(error) => {
                    group.fail(index, format!("no thread for it: {error}"));
                    break;
                }
            }
        }
        drop(sender);
        collect(&group, &results, devices.len())
    }

    /// With the feature `processes`: runs `body` on this thread as one rank of a group of processes, which a launcher
    /// has started.
    ///
    /// Rank 0 listens at the address of `info` for the others. Each proves the other that it knows `secret`,
    /// and rank 0 broadcasts its `token` to all, of 8 KiB at most. The connections, which are encrypted, stay: when a
    /// rank fails, its process ends, or nothing is heard of it for the [heartbeat timeout](Launch::heartbeat_timeout),
    /// all others end with its message, those that notice at the next [`Joined::failure`]. A process that has
    /// not ended some seconds later, because it waits for a rank that never comes, is ended with exit code 1,
    /// and its message on stderr. All wait for each other in the end.
    ///
    /// # Errors
    /// [`Error::Rank`] with the message of the first rank that could not join, returned an error, panicked,
    /// was gone or silent, or had not ended when the timeout had passed since the first did.
    #[cfg(feature = "processes")]
    pub fn join<T>(
        &self,
        info: &RankInfo,
        secret: &Secret,
        token: impl FnOnce() -> Result<Vec<u8>>,
        body: impl FnOnce(&Joined) -> Result<T>,
    ) -> Result<T> {
        let limits = Limits { timeout: self.timeout, silence: self.heartbeat_timeout };
        rendezvous::join(info, secret, limits, token, body)
    }

    /// With the feature `processes`: runs `body` on this thread as one rank of a group of processes, as [`join`](Launch::join) does, with a
    /// GPU and NCCL: the GPU of its number on the machine, or the only one that it can see.
    ///
    /// # Errors
    /// As those of [`join`](Launch::join); without the feature `nccl`, in every case.
    #[cfg(feature = "processes")]
    pub fn distributed<T>(
        &self,
        info: &RankInfo,
        secret: &Secret,
        body: impl FnOnce(Rank) -> Result<T>,
    ) -> Result<T> {
        nccl::available()?;
        self.join(info, secret, nccl::new_id, |joined| {
            let device = nccl::device(info)?;
            body(nccl::connect(joined.token(), &device, info.rank(), &joined.group)?)
        })
    }
}

/// The values of all ranks in order, or the first failure.
fn collect<T>(
    group: &Group,
    results: &mpsc::Receiver<Option<(usize, T)>>,
    world_size: usize,
) -> Result<Vec<T>> {
    let mut values = Vec::with_capacity(world_size);
    while values.len() < world_size {
        let Ok(Some(value)) = results.recv() else { break };
        values.push(value);
    }
    if let Some(failure) = group.failure() {
        let end = Instant::now() + GRACE;
        while results.recv_timeout(end.saturating_duration_since(Instant::now())).is_ok() {}
        return Err(failure);
    }
    values.sort_by_key(|(index, _)| *index);
    Ok(values.into_iter().map(|(_, value)| value).collect())
}
