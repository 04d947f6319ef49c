//! Models of the Hugging Face hub: their names, the cache that all programs share, and fetching what it lacks.
//!
//! What is in the cache is found without the network, and without the feature `hub`. With it, a model that is not there
//! is fetched when it is opened: the files of one checkpoint, which is no more than the readers need.

mod cache;
#[cfg(feature = "hub")]
mod client;
mod groups;
mod name;
mod options;
#[cfg(feature = "hub")]
mod pull;
mod selection;
#[cfg(feature = "hub")]
mod store;
#[cfg(feature = "hub")]
mod transfer;
mod unknown;

pub use cache::{CachedModel, HubCache};
pub(super) use name::has_host;
pub use name::Name;
pub use options::{HubEvent, HubOptions, HubProgress};
pub(super) use unknown::Unknown;

use crate::Result;
use std::path::PathBuf;

impl Name {
    /// Fetches what the cache lacks of the model, and returns the folder or the file to open. Unlike
    /// [`Checkpoint::open`](crate::Checkpoint::open), which takes what is in the cache, it asks the hub for the
    /// newest commit of the revision.
    ///
    /// # Errors
    /// If there is no such model, if it can't be reached or may not be read, if it is not clear which of several files
    /// is meant, or if what comes is not what the hub states.
    #[cfg(feature = "hub")]
    pub fn pull(&self, options: &HubOptions) -> Result<PathBuf> {
        pull::pull(self, options)?.map_err(|unknown| unknown.error(self))
    }

    /// Where the model is in the cache, be it fetched first.
    pub(super) fn find_or_pull(&self, options: &HubOptions) -> Result<Result<PathBuf, Unknown>> {
        match HubCache::at(&options.cache).find(self)? {
            Some(path) => Ok(Ok(path)),
            None => self.pull_if_possible(options),
        }
    }

    #[cfg(feature = "hub")]
    fn pull_if_possible(&self, options: &HubOptions) -> Result<Result<PathBuf, Unknown>> {
        pull::pull(self, options)
    }

    #[cfg(not(feature = "hub"))]
    fn pull_if_possible(&self, _: &HubOptions) -> Result<Result<PathBuf, Unknown>> {
        let remedy = format!("`candle-quant pull {self}` fetches it, or build with the feature `hub`");
        Ok(Err(Unknown::new("this program can't fetch it", remedy)))
    }
}
