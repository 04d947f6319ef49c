//! Models that were quantized once, and are opened again.
//!
//! ```
//! use candle_quant::Checkpoint;
//! use candle_quant_tools::convert::{ConvertOptions, ConvertPlan, Recipe};
//! use candle_quant_tools::quantized::{CacheEvent, QuantizedCache};
//!
//! # use candle_quant_tools::convert::{convert, RunOptions};
//! # let folder = tempfile::tempdir().unwrap();
//! # let (dense, cache) = (folder.path().join("dense"), folder.path().join("cache"));
//! # let plan = ConvertPlan::new(&Checkpoint::open("assets/tiny")?, &ConvertOptions::dense())?;
//! # convert(&plan, &dense, &RunOptions::default(), &|_event| ())?;
//! let cache = QuantizedCache::at(cache);
//! let source = Checkpoint::open(&dense)?;
//! let plan = ConvertPlan::new(&source, &ConvertOptions::mlx(Recipe::safe("4".parse()?)))?;
//! let made = cache.open(&plan, &|_event| ())?;
//! let found = cache.open(&plan, &|event| assert!(matches!(event, CacheEvent::Found { .. })))?;
//! assert_eq!(made.path(), found.path());
//! assert_eq!(cache.models()?, [found.path()]);
//! # Ok::<(), candle_quant::Error>(())
//! ```

use crate::convert::{convert, distinct_name, ConvertEvent, ConvertPlan, RunOptions};
use crate::staging::{io, is_there, is_whole, MANIFEST};
use candle_quant::{Checkpoint, Error, Result};
use std::env;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// The file that is locked by the process that writes.
const LOCK: &str = "lock";

/// A folder of models that were quantized, each in a folder of its own, as [`convert`] writes it.
///
/// The name of such a folder tells of which source it is, and has a digest of what it was made of. What has changed since it
/// was written is removed, with all that is in its folder, and made again. Nothing else is ever removed.
#[derive(Clone, Debug)]
pub struct QuantizedCache {
    root: PathBuf,
}

/// What is told while a model is opened.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum CacheEvent<'a> {
    /// The model is there.
    Found {
        /// Its folder.
        folder: &'a Path,
    },
    /// Another process writes into the cache, and is waited for.
    Waiting,
    /// The model is made.
    Begun {
        /// Its folder, once it is complete.
        folder: &'a Path,
    },
    /// How far it is.
    Progress(ConvertEvent<'a>),
}

impl QuantizedCache {
    /// The cache that the environment names.
    ///
    /// | variable | the cache |
    /// |---|---|
    /// | `CANDLE_QUANT_CACHE` | `$CANDLE_QUANT_CACHE/quantized` |
    /// | or else `XDG_CACHE_HOME` | `$XDG_CACHE_HOME/candle-quant/quantized` |
    /// | none of these | `~/.cache/candle-quant/quantized` |
    ///
    /// # Errors
    /// If there is neither of them nor a home.
    pub fn from_env() -> Result<Self> {
        Self::from_variables(|name| env::var_os(name), env::home_dir())
    }

    fn from_variables(variable: impl Fn(&str) -> Option<OsString>, home: Option<PathBuf>) -> Result<Self> {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        // One that is not absolute has no meaning, says the specification of the XDG.
        let caches = set("XDG_CACHE_HOME").filter(|path| path.is_absolute());
        let caches = caches
            .or_else(|| home.filter(|home| !home.as_os_str().is_empty()).map(|home| home.join(".cache")));
        let folder = set("CANDLE_QUANT_CACHE").or_else(|| Some(caches?.join("candle-quant")));
        let folder = folder.ok_or_else(|| Error::Unsupported {
            what: "a cache of quantized models where there is no home folder".into(),
            remedy: "name a folder for it: CANDLE_QUANT_CACHE".into(),
        })?;
        Ok(Self::at(folder.join("quantized")))
    }

    /// The cache in a folder, which need not be there yet.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The checkpoint that a plan makes: what is there of it, or what is made now. Of the weights of the source nothing is
    /// read if it is there. One process at a time writes; others wait for it.
    ///
    /// # Errors
    /// If it can't be made or written, as where numbers are not finite, or if the source changes meanwhile.
    pub fn open(&self, plan: &ConvertPlan, tell: &(dyn Fn(CacheEvent) + Sync)) -> Result<Checkpoint> {
        let name = distinct_name(plan)?;
        let folder = self.root.join(&name);
        if let Some(found) = open(&folder) {
            tell(CacheEvent::Found { folder: &folder });
            return Ok(found);
        }
        let _lock = self.lock(tell)?;
        if let Some(found) = open(&folder) {
            tell(CacheEvent::Found { folder: &folder });
            return Ok(found);
        }
        remove(&folder)?;
        tell(CacheEvent::Begun { folder: &folder });
        convert(plan, &folder, &RunOptions::default(), &|event| tell(CacheEvent::Progress(event)))?;
        if distinct_name(plan)? != name {
            remove(&folder)?;
            let remedy = "run it again when nothing writes there";
            return Err(Error::file(&folder, "its source has changed while it was made", remedy));
        }
        Checkpoint::open(&folder)
    }

    /// The folders of all models, in the order of their names; also of those that have been changed.
    ///
    /// # Errors
    /// If the cache can't be read.
    pub fn models(&self) -> Result<Vec<PathBuf>> {
        let entries = match fs::read_dir(&self.root) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(io(&self.root))?,
        };
        let paths = entries.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<Vec<_>>>();
        let mut models = paths.map_err(io(&self.root))?;
        models.retain(|path| path.join(MANIFEST).is_file());
        models.sort();
        Ok(models)
    }

    /// A lock that lasts as long as the file is open.
    fn lock(&self, tell: &(dyn Fn(CacheEvent) + Sync)) -> Result<File> {
        let failed = |error: io::Error| {
            let remedy = "name another folder, CANDLE_QUANT_CACHE, or do without the cache";
            Error::file(&self.root, format!("quantized models can't be kept here: {error}"), remedy)
        };
        fs::create_dir_all(&self.root).map_err(failed)?;
        let mut options = OpenOptions::new();
        let file =
            options.write(true).create(true).truncate(false).open(self.root.join(LOCK)).map_err(failed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::Error(error)) => return Err(failed(error)),
            Err(TryLockError::WouldBlock) => {
                tell(CacheEvent::Waiting);
                file.lock().map_err(failed)?;
            }
        }
        Ok(file)
    }
}

/// The checkpoint in a folder, if it is as it was written.
fn open(folder: &Path) -> Option<Checkpoint> {
    is_whole(folder).then(|| Checkpoint::open(folder).ok()).flatten()
}

fn remove(folder: &Path) -> Result<()> {
    match (is_there(folder), folder.is_symlink() || !folder.is_dir()) {
        (false, _) => Ok(()),
        (true, true) => fs::remove_file(folder).map_err(io(folder)),
        (true, false) => fs::remove_dir_all(folder).map_err(io(folder)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root(variables: &[(&str, &str)], home: Option<&str>) -> Option<PathBuf> {
        let variable =
            |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into());
        QuantizedCache::from_variables(variable, home.map(PathBuf::from)).ok().map(|cache| cache.root)
    }

    #[test]
    #[cfg(unix)]
    fn the_environment_names_the_folder() {
        let (own, xdg) = (("CANDLE_QUANT_CACHE", "/own"), ("XDG_CACHE_HOME", "/xdg"));
        let home = Some("/home/me");
        for (variables, home, expected) in [
            (&[own, xdg][..], home, Some("/own/quantized")),
            (&[xdg], home, Some("/xdg/candle-quant/quantized")),
            (&[("XDG_CACHE_HOME", "xdg")], home, Some("/home/me/.cache/candle-quant/quantized")),
            (&[("CANDLE_QUANT_CACHE", "")], home, Some("/home/me/.cache/candle-quant/quantized")),
            (&[], None, None),
            (&[], Some(""), None),
        ] {
            assert_eq!(root(variables, home), expected.map(PathBuf::from), "{variables:?}");
        }
    }
}
