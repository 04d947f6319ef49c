//! An output while it is built, and the journal of what is finished of it.
//!
//! `OUT.partial/model` becomes `OUT` by one rename, when everything is on the disk. Beside it lies the journal:
//! killed at any moment, the conversion leaves either no `OUT` or all of it. An `OUT` that is to be replaced changes
//! places with the new one, also by one rename, and what its manifest lists is removed then. In a store of Ollama, what is
//! in the folder becomes blobs, of which nobody knows until the manifest that names them takes its place, also by one
//! rename.

use super::blobs::into_blobs;
use super::destination::Destination;
use super::journal::{Finished, Journal};
use super::options::RunOptions;
use super::quality::{Quality, WrittenFile};
use super::writer::Writer;
use crate::convert::plan::ConvertPlan;
use crate::sha256;
use crate::staging::{
    available_space, identity, io, recover_folder, remove_listed, sync_folder, write_synced, Manifest,
    Partial, MANIFEST,
};
use candle_quant::{Error, Result};
use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// An output while it is built. Nobody else works on it as long as this exists.
pub(super) struct Unfinished {
    destination: Destination,
    partial: Partial,
    pub journal: Journal,
    /// Whether the output has been renamed already, and is only to be cleaned up after.
    pub is_published: bool,
}

/// Refuses an output that would replace its own source.
fn check_source(plan: &ConvertPlan, folders: [&Path; 2]) -> Result<()> {
    let files = plan.source.weight_files().into_iter().chain(plan.source.sidecar_files().path("config.json"));
    let files: Vec<_> = files.filter_map(|path| fs::canonicalize(path).ok()).collect();
    for folder in folders {
        let Ok(whole) = fs::canonicalize(folder) else { continue };
        if let Some(file) = files.iter().find(|file| file.starts_with(&whole)) {
            let problem = format!("{} of the source is in it", file.display());
            return Err(Error::file(folder, problem, "give another output"));
        }
    }
    Ok(())
}

impl Unfinished {
    /// Begins an output, or takes up what was begun of it by an earlier conversion with the same plan. What another one
    /// has begun is removed, unless it is to be resumed.
    pub(super) fn open(plan: &ConvertPlan, out: &Path, options: &RunOptions) -> Result<Self> {
        let destination = Destination::new(out, plan.model.as_ref());
        let root = destination.root();
        if let Destination::Folder(out) = &destination {
            check_source(plan, [out, &root])?;
        }
        destination.check(options)?;
        if let Destination::Store(out, _) = &destination {
            fs::create_dir_all(out).map_err(io(out))?;
        }
        let partial = Partial::enter(root)?;
        if let Destination::Folder(out) = &destination {
            recover_folder(&partial, out)?;
        }
        let mut journal = Journal::new(plan)?;
        let begun: Option<Journal> = Partial::read_own_journal(partial.root(), Journal::OWN_KEY)?;
        let published = match &begun {
            Some(begun) => destination.is_published(begun)?,
            None => false,
        };
        let same = begun.as_ref().is_some_and(|begun| begun.plan == journal.plan);
        match begun {
            Some(begun) if published && same => {
                return Ok(Self { destination, partial, journal: begun, is_published: true });
            }
            // Complete, and of another plan: an output like any other.
            Some(_) if published => clean_up(&destination, &partial)?,
            Some(_) if options.resume && !same => {
                let remedy = "give the same options, or leave out --resume to begin anew";
                return Err(Error::file(partial.root(), "begun with other options", remedy));
            }
            Some(begun) if same => journal.finished = begun.finished,
            _ => {}
        }
        let mut unfinished = Self { destination, partial, journal, is_published: false };
        if let Err(error) = unfinished.begin(plan, options) {
            if unfinished.journal.finished.is_empty() {
                // What was never begun is nothing to be resumed.
                let _ = unfinished.abandon();
            }
            return Err(error);
        }
        Ok(unfinished)
    }

    /// Keeps what is finished of an earlier run, and removes all else.
    fn begin(&mut self, plan: &ConvertPlan, options: &RunOptions) -> Result<()> {
        self.destination.check_place(options.overwrite)?;
        self.partial.clear(&|name| self.has(name))?;
        self.write_journal()?;
        self.partial.create_model()?;
        self.check_space(plan)
    }

    fn abandon(self) -> Result<()> {
        self.partial.clear(&|_| false)?;
        self.partial.leave()
    }

    /// Whether what is left to be written fits the disk.
    fn check_space(&self, plan: &ConvertPlan) -> Result<()> {
        let needed: u64 = plan.files().filter(|(file, _)| !self.has(file)).map(|(_, bytes)| bytes).sum();
        match available_space(self.partial.root()) {
            Some(available) if available < needed => {
                let problem = format!(
                    "{needed} bytes are still to be written here, {available} are available; free some, or give an \
                     output on another disk"
                );
                Err(io(self.partial.root())(std::io::Error::new(ErrorKind::StorageFull, problem)))
            }
            _ => Ok(()),
        }
    }

    /// The folder that becomes the output.
    pub(super) fn model(&self) -> PathBuf {
        self.partial.model()
    }

    /// A file of the output while it is built.
    pub(super) fn path(&self, file: &str) -> PathBuf {
        self.model().join(file)
    }

    /// Whether a file was finished by an earlier run.
    fn has(&self, file: &str) -> bool {
        self.journal.finished.iter().any(|entry| entry.file.file == file)
    }

    /// Whether the file of this writer is finished: it is as an earlier run has written it, and the source has still the
    /// bytes that it was made of. What is not so is to be written again.
    pub(super) fn is_finished(&mut self, writer: &Writer) -> Result<bool> {
        let name = &writer.file.file;
        let Some(entry) = self.journal.finished.iter().find(|entry| entry.file.file == *name) else {
            return Ok(false);
        };
        let is_whole = sha256::of_file(&self.path(name)).is_ok_and(|found| found == entry.file.sha256);
        if is_whole && writer.source_digest()? == entry.source {
            return Ok(true);
        }
        self.journal.finished.retain(|entry| entry.file.file != *name);
        self.write_journal()?;
        Ok(false)
    }

    /// Notes that a file is finished; `source` is the digest of what it was made of.
    pub(super) fn finish(&mut self, file: &str, source: String, tensors: Vec<Quality>) -> Result<()> {
        let path = self.path(file);
        let sha256 = sha256::of_file(&path).map_err(io(&path))?;
        let file = WrittenFile { file: file.to_owned(), sha256 };
        self.journal.finished.push(Finished { file, source, tensors });
        self.journal.finished.sort_by(|a, b| a.file.file.cmp(&b.file.file));
        self.write_journal()
    }

    fn write_journal(&self) -> Result<()> {
        self.partial.write_journal(&self.journal)
    }

    /// Makes what was built the output, and removes what is left.
    pub(super) fn publish(mut self, plan: &ConvertPlan, overwrite: bool) -> Result<()> {
        if !self.is_published {
            let model = self.model();
            let made = match &self.destination {
                Destination::Folder(_) => {
                    self.manifest(plan)?.write(&model)?;
                    sync_folder(&model)?;
                    model
                }
                Destination::Store(out, _) => {
                    sync_folder(&model)?;
                    let manifest = into_blobs(out, plan, &model, &self.journal.finished)?;
                    write_synced(&self.partial.made(), manifest.as_bytes())?;
                    self.partial.made()
                }
            };
            self.journal.published = identity(&made);
            self.write_journal()?;
            self.destination.put(&self.partial, overwrite)?;
        }
        clean_up(&self.destination, &self.partial)?;
        self.partial.leave()
    }

    fn manifest(&self, plan: &ConvertPlan) -> Result<Manifest> {
        let known = |name: &str| {
            let finished = self.journal.finished.iter().find(|finished| finished.file.file == name)?;
            Some(finished.file.sha256.clone())
        };
        let files: BTreeSet<_> =
            self.journal.files.iter().filter(|name| *name != MANIFEST).cloned().collect();
        Manifest::of(&self.model(), (&plan.source_name(), &plan.recipe_name()), &files, known)
    }
}

/// Removes what was replaced, or what is left of a folder whose files became blobs.
fn clean_up(destination: &Destination, partial: &Partial) -> Result<()> {
    match destination {
        Destination::Folder(out) => {
            recover_folder(partial, out)?;
            remove_listed(&partial.model()).map(drop)
        }
        Destination::Store(..) => partial.clear(&|_| false),
    }
}
