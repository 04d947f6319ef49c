//! Where an output goes: a folder, or a model in a store of Ollama. Both appear by one rename.

use super::file_list;
use super::journal::Journal;
use super::options::RunOptions;
use super::partial::{is_begun, journal_in, model_in};
use crate::convert::disk::{identity, io, replace, sync_folder};
use crate::convert::options::ConvertOptions;
use candle_quant::checkpoint::{OllamaName, OllamaStore};
use candle_quant::{Error, Result};
use std::fs;
use std::path::{Path, PathBuf};

/// What a folder is called in which an output is built.
const PARTIAL: &str = ".partial";

/// Where an output goes.
#[derive(Clone, Debug)]
pub(super) enum Destination {
    /// A folder that nothing else is in.
    Folder(PathBuf),
    /// One of the models of a store.
    Store(PathBuf, OllamaName),
}

/// Whether the output may be written: there is none yet or it may be replaced, and nothing is unfinished unless it
/// is to be resumed.
///
/// # Errors
/// If not.
pub fn check_output(out: &Path, conversion: &ConvertOptions, options: &RunOptions) -> Result<()> {
    Destination::new(out, conversion.model()?).check(options)
}

impl Destination {
    pub(super) fn new(out: &Path, model: Option<&OllamaName>) -> Self {
        match model {
            Some(name) => Self::Store(out.to_owned(), name.clone()),
            None => Self::Folder(out.to_owned()),
        }
    }

    /// Where the output is built: on the same disk, in a store beside what it has.
    pub(super) fn root(&self) -> PathBuf {
        match self {
            Self::Folder(out) => {
                let mut name = out.file_name().unwrap_or_default().to_owned();
                name.push(PARTIAL);
                out.with_file_name(name)
            }
            Self::Store(out, name) => out.join(format!("{}{PARTIAL}", name.parts().join("+"))),
        }
    }

    /// What the last rename makes: the folder, or the manifest of the model; `None` if there is no such manifest.
    fn published(&self) -> Result<Option<PathBuf>> {
        match self {
            Self::Folder(out) => Ok(Some(out.clone())),
            Self::Store(out, name) => {
                Ok(OllamaStore::at(out)?.map(|store| store.manifest(name)).transpose()?.flatten())
            }
        }
    }

    /// Whether the output has been renamed already, and only the journal is left, and what was replaced.
    pub(super) fn is_published(&self) -> Result<bool> {
        let root = self.root();
        let (Some(journal), Some(path)) = (Journal::read(&journal_in(&root))?, self.published()?) else {
            return Ok(false);
        };
        let is_the_one = journal.published.is_some() && identity(&path) == journal.published;
        let has_no_other = matches!(self, Self::Folder(_)) && !model_in(&root).exists();
        Ok(path.exists() && (is_the_one || has_no_other))
    }

    /// As [`check_output`].
    pub(super) fn check(&self, options: &RunOptions) -> Result<()> {
        let root = self.root();
        match self {
            Self::Folder(out) if out.file_name().is_none() => {
                return Err(Error::file(out, "not the name of a folder to create", "give another output"));
            }
            Self::Store(out, _) => check_store(out)?,
            Self::Folder(_) => {}
        }
        let published = options.resume && self.is_published()?;
        let there = self.published()?.filter(|path| fs::symlink_metadata(path).is_ok());
        if let Some(path) = there.filter(|_| !published) {
            self.check_replaceable(&path, options.overwrite)?;
        }
        if !options.resume && is_begun(&root) {
            let problem = "left by a conversion that was interrupted";
            return Err(Error::file(&root, problem, "resume it (--resume), or remove it"));
        }
        Ok(())
    }

    /// Whether what is at `path` may be lost. Of a store that is the manifest of the model alone.
    fn check_replaceable(&self, path: &Path, overwrite: bool) -> Result<()> {
        if !overwrite {
            let remedy = "remove it, replace it (--overwrite), or give another output";
            return Err(Error::file(path, "it exists already, and is not overwritten", remedy));
        }
        match self {
            Self::Folder(out) => file_list::check_replaceable(out),
            Self::Store(..) => Ok(()),
        }
    }

    /// Puts the folder or manifest `made` in its place. A folder that was there is at `made` or `aside` then.
    pub(super) fn put(&self, made: &Path, aside: &Path, overwrite: bool) -> Result<()> {
        let path = match self {
            Self::Folder(out) => out.clone(),
            Self::Store(out, name) => OllamaStore::create(out)?.make_place(name)?,
        };
        let is_there = fs::symlink_metadata(&path).is_ok();
        if is_there {
            // It may have come only now.
            self.check_replaceable(&path, overwrite)?;
        }
        match self {
            Self::Folder(_) if is_there => replace(&path, made, aside).map_err(io(&path))?,
            Self::Folder(_) | Self::Store(..) => fs::rename(made, &path).map_err(io(&path))?,
        }
        match path.parent() {
            Some(parent) if parent.as_os_str().is_empty() => sync_folder(Path::new(".")).map_err(io(parent)),
            Some(parent) => sync_folder(parent).map_err(io(parent)),
            None => Ok(()),
        }
    }
}

/// Whether `out` is a store, or may become one.
fn check_store(out: &Path) -> Result<()> {
    if fs::symlink_metadata(out).is_err() {
        return Ok(());
    }
    let ours = |name: &str| ["manifests", "blobs"].contains(&name) || name.ends_with(PARTIAL);
    let names = match out.is_dir() {
        true => fs::read_dir(out).and_then(Iterator::collect::<std::io::Result<Vec<_>>>).map_err(io(out))?,
        false => Vec::new(),
    };
    let is_ours = names.iter().all(|entry| entry.file_name().to_str().is_some_and(ours));
    if !out.is_dir() || !(is_ours || OllamaStore::at(out)?.is_some()) {
        let remedy = "give a folder that is one, or is empty, or is not there";
        return Err(Error::file(out, "not a store of Ollama", remedy));
    }
    Ok(())
}
