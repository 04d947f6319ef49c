//! A model is fetched: the files that it needs, several at once, weights after all others.

use super::cache::HubCache;
use super::client::{Client, Failure, Listing};
use super::name::Name;
use super::options::{HubEvent, HubOptions};
use super::selection::{incomplete, select, Unfit, INDEX};
use super::transfer::{Transfers, Wanted};
use super::unknown::Unknown;
use crate::checkpoint::file::{shards_of_index, Opening};
use crate::{Error, Result};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Files that are fetched at once.
const AT_ONCE: usize = 4;

/// Fetches what the cache lacks of a model, and returns what is to be opened. The branch is looked up anew.
pub(super) fn pull(name: &Name, options: &HubOptions) -> Result<Result<PathBuf, Unknown>> {
    if options.offline {
        let problem = "nothing is fetched, as HF_HUB_OFFLINE says";
        return Ok(Err(Unknown::new(
            problem,
            "unset HF_HUB_OFFLINE, or fetch the model where there is a network",
        )));
    }
    let client = Client::new(name, options)?;
    let Listing { commit, files } = match client.list() {
        Ok(listing) => listing,
        Err(Failure::Unknown(unknown)) => return Ok(Err(unknown)),
        Err(Failure::Again(Error::Hub { problem, remedy, .. })) => {
            return Ok(Err(Unknown::new(problem, remedy)))
        }
        Err(Failure::Again(error) | Failure::Final(error)) => return Err(error),
    };
    let unfit = |Unfit { problem, remedy, .. }: Unfit| Error::hub(name, problem, remedy);
    let selection = select(&files, name.choice()).map_err(unfit)?;
    let folder = HubCache::at(&options.cache).folder(name);
    let snapshot = folder.snapshot(&commit);
    let transfers = Transfers { client, name, options, folder, commit, stop: AtomicBool::new(false) };
    transfers.fetch_all(&selection.companions)?;
    let mut weights = selection.weights.clone();
    if selection.has_index {
        weights = shards_of_index(&snapshot.join(INDEX), &Opening::default())?;
        if let Some(missing) = weights.iter().find(|shard| !files.contains(shard)) {
            return Err(unfit(incomplete(missing)));
        }
    }
    // Last, so that a snapshot with weights has everything.
    transfers.fetch_all(&weights)?;
    transfers.folder.set_commit(name.revision(), &transfers.commit)?;
    Ok(Ok(selection.place(&snapshot)))
}

impl Transfers<'_> {
    /// Fetches files, several at once.
    fn fetch_all(&self, files: &[String]) -> Result<()> {
        let missing: Vec<&String> =
            files.iter().filter(|file| !self.folder.has(&self.commit, file)).collect();
        let wanted = self.several(&missing, |file| {
            let stated = self.client.stated(&self.commit, file).map_err(|failure| match failure {
                Failure::Again(error) | Failure::Final(error) => error,
                Failure::Unknown(unknown) => unknown.error(self.name),
            })?;
            Ok(Wanted { file: (*file).clone(), stated })
        })?;
        if let (Some(progress), false) = (&self.options.progress, wanted.is_empty()) {
            let bytes = wanted.iter().filter_map(|wanted| wanted.stated.size).fold(0, u64::saturating_add);
            progress(&HubEvent::Planned { files: wanted.len(), bytes });
        }
        self.several(&wanted, |wanted| self.fetch(wanted))?;
        Ok(())
    }

    /// Does the same with all, several at once, in order of results; the first error ends it.
    fn several<T: Sync, R: Send>(&self, all: &[T], each: impl Fn(&T) -> Result<R> + Sync) -> Result<Vec<R>> {
        let (next, done) = (AtomicUsize::new(0), Mutex::new((Vec::new(), None)));
        let work = || {
            while let Some((index, one)) = self.next(&next, all) {
                let result = each(one);
                let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
                match result {
                    Ok(result) => done.0.push((index, result)),
                    // What others say after it is that they were stopped.
                    Err(error) => {
                        self.stop.store(true, Ordering::Relaxed);
                        done.1.get_or_insert(error);
                    }
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..AT_ONCE.min(all.len()) {
                scope.spawn(work);
            }
            work();
        });
        let (mut results, failure) = done.into_inner().unwrap_or_else(PoisonError::into_inner);
        results.sort_by_key(|(index, _)| *index);
        failure.map_or(Ok(results.into_iter().map(|(_, result)| result).collect()), Err)
    }

    fn next<'a, T>(&self, next: &AtomicUsize, all: &'a [T]) -> Option<(usize, &'a T)> {
        let index = next.fetch_add(1, Ordering::Relaxed);
        all.get(index).filter(|_| !self.stop.load(Ordering::Relaxed)).map(|one| (index, one))
    }
}
