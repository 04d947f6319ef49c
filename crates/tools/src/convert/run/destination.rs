//! Where an output goes: a folder, or a model in a store of Ollama. Both appear by one rename.

use super::journal::Journal;
use super::options::RunOptions;
use crate::convert::options::ConvertOptions;
use crate::staging::{
    check_folder, identity, io, is_there, kind_of, plain, put_folder, sync_folder, Partial,
};
use candle_quant::checkpoint::{OllamaName, OllamaStore};
use candle_quant::{Error, Result};
use std::fs;
use std::path::{Path, PathBuf};

/// Where an output goes.
#[derive(Clone, Debug)]
pub(super) enum Destination {
    /// A folder that nothing else is in.
    Folder(PathBuf),
    /// One of the models of a store.
    Store(PathBuf, OllamaName),
}

/// Whether the output may be written: there is none yet or it may be replaced, and no process writes there.
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
            None => Self::Folder(plain(out)),
        }
    }

    /// Where the output is built: on the same disk, in a store beside what it has.
    pub(super) fn root(&self) -> PathBuf {
        match self {
            Self::Folder(out) => Partial::of(out),
            Self::Store(out, name) => Partial::of(&out.join(name.parts().join("+"))),
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

    /// Whether the output of a journal has been renamed already, and what is left is to be removed.
    pub(super) fn is_published(&self, journal: &Journal) -> Result<bool> {
        let found = self.published()?.and_then(|path| identity(&path));
        // Where nothing tells folders apart, two renames replace one.
        let is_whole = cfg!(unix) || !self.root().join("model").exists();
        Ok(journal.published.is_some() && journal.published == found && is_whole)
    }

    /// As [`check_output`].
    pub(super) fn check(&self, options: &RunOptions) -> Result<()> {
        if let Self::Store(out, _) = self {
            check_store(out)?;
        }
        let root = self.root();
        Partial::check(&root)?;
        match Partial::read_own_journal(&root, Journal::OWN_KEY)? {
            Some(journal) if self.is_published(&journal)? => Ok(()),
            _ => self.check_place(options.overwrite).inspect_err(|_| Partial::sweep(&root)),
        }
    }

    /// Whether what is there, if anything is, may be replaced. Of a store that is the manifest of the model alone: its
    /// blobs stay, for other models may have them, too; Ollama removes those that none has.
    pub(super) fn check_place(&self, overwrite: bool) -> Result<()> {
        let manifest = match self {
            Self::Folder(out) => return check_folder(out, overwrite),
            Self::Store(..) => self.published()?,
        };
        let there = manifest.and_then(|path| fs::symlink_metadata(&path).ok().map(|there| (path, there)));
        let Some((path, there)) = there else {
            return Ok(());
        };
        match (there.is_file(), overwrite) {
            (true, true) => Ok(()),
            (true, false) => {
                let remedy = "replace it (--overwrite), or give the model another name";
                Err(Error::file(&path, "it exists already, and is not overwritten", remedy))
            }
            (false, _) => {
                let problem = format!("not overwritten: not a file, but {}", kind_of(&there));
                Err(Error::file(&path, problem, "move it away, or give the model another name"))
            }
        }
    }

    /// Puts the folder that was built, or the manifest, in its place.
    pub(super) fn put(&self, partial: &Partial, overwrite: bool) -> Result<()> {
        match self {
            Self::Folder(out) => put_folder(partial, out, overwrite),
            Self::Store(out, name) => {
                let path = OllamaStore::create(out)?.make_place(name)?;
                // It may have come only now.
                self.check_place(overwrite)?;
                fs::rename(partial.made(), &path).map_err(io(&path))?;
                sync_folder(path.parent().unwrap_or(out))
            }
        }
    }
}

/// Whether `out` is a store, or may become one.
fn check_store(out: &Path) -> Result<()> {
    if !is_there(out) {
        return Ok(());
    }
    let ours = |name: &str| ["manifests", "blobs"].contains(&name) || Partial::is_one(name);
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
