//! Starting the ranks: one thread each, for life.

use super::collective::Rank;
use super::group::{Group, Member};
use crate::{Error, Result};
use candle_core::Device;
use std::any::Any;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::{mpsc, Arc};
use std::thread;
use std::time::{Duration, Instant};

/// How long ranks that have not noticed a failure are waited for.
const GRACE: Duration = Duration::from_secs(5);

/// Runs `body` as one rank for each device, each on a thread of its own, and returns their results in order.
///
/// A device may be named several times. As soon as one rank fails, all others end at their next collective.
///
/// # Errors
/// [`Error::Rank`] with the message of the first rank that returned an error, panicked or did not come to where
/// others waited; if there are no devices.
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
}

impl Default for Launch {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(300) }
    }
}

impl Launch {
    /// How long a rank waits for the others, 300 seconds unless said otherwise. The first wait of a model comes
    /// when its weights are loaded, which takes some ranks longer than others.
    #[must_use]
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout }
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
        let group = Group::new(devices.len(), self.timeout);
        let body = Arc::new(body);
        let (sender, results) = mpsc::channel();
        for (index, device) in devices.iter().enumerate() {
            let (group_of_rank, body, sender) = (Arc::clone(&group), Arc::clone(&body), sender.clone());
            let device = device.clone();
            let work = move || {
                let member = Member { index, group: Arc::clone(&group_of_rank) };
                let rank = Rank::new(&device, Arc::new(member));
                let result = catch_unwind(AssertUnwindSafe(|| body(rank)));
                match &result {
                    Ok(Ok(_)) => group_of_rank.leave(index),
                    Ok(Err(error)) => group_of_rank.fail(index, error.to_string()),
                    Err(panic) => group_of_rank.fail(index, format!("panicked: {}", message(panic.as_ref()))),
                }
                // Nobody listens if another rank has failed long ago.
                let _ = sender.send(result.ok().and_then(Result::ok).map(|value| (index, value)));
            };
            if let Err(error) = thread::Builder::new().name(format!("rank {index}")).spawn(work) {
                group.fail(index, format!("no thread for it: {error}"));
                break;
            }
        }
        drop(sender);
        collect(&group, &results, devices.len())
    }
}

/// The values of all ranks in order, or the first failure.
fn collect<T>(
    group: &Group,
    results: &mpsc::Receiver<Option<(usize, T)>>,
    world_size: usize,
) -> Result<Vec<T>> {
    let mut values = Vec::with_capacity(world_size);
    while let Ok(Some(value)) = results.recv() {
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

/// What a panic said.
fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message")
}
