//! The folder in which the output is built, and the journal of what is finished in it.
//!
//! `OUT.partial/model` becomes `OUT` by one rename, when everything is on the disk. Beside it lies the journal:
//! killed at any moment, the conversion leaves either no `OUT` or all of it. An `OUT` that is to be replaced changes
//! places with the new one, also by one rename, and is removed then. In a store of Ollama, what is in the folder
//! becomes blobs, of which nobody knows until the manifest that names them takes its place, also by one rename.

use super::blobs::into_blobs;
use super::destination::Destination;
use super::file_list;
use super::journal::{Finished, Journal};
use super::options::RunOptions;
use super::partial::{is_begun, journal_in, model_in};
use super::quality::{Quality, WrittenFile};
use crate::convert::disk::{available_space, identity, io, sync_folder, write_synced};
use crate::convert::plan::ConvertPlan;
use crate::sha256;
use candle_quant::{Error, Result};
use std::fs::{self, File, TryLockError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The manifest of a model of a store before it is in its destination.
const MANIFEST: &str = "manifest";

/// The folder in which an output is built. Nobody else works in it as long as this exists.
pub(super) struct Staging {
    destination: Destination,
    root: PathBuf,
    pub journal: Journal,
    /// Whether the output has been renamed already, and only the journal is left.
    pub is_published: bool,
    lock: File,
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

impl Staging {
    /// Creates the folder, or takes up what is in it.
    pub(super) fn open(plan: &ConvertPlan, out: &Path, options: &RunOptions) -> Result<Self> {
        let destination = Destination::new(out, plan.model.as_ref());
        destination.check(options)?;
        let (root, is_published) = (destination.root(), options.resume && destination.is_published()?);
        match &destination {
            Destination::Folder(out) => check_source(plan, [out, &root])?,
            Destination::Store(out, _) => fs::create_dir_all(out).map_err(io(out))?,
        }
        if let Err(error) = fs::create_dir(&root) {
            let may_exist = options.resume || !is_begun(&root);
            if !(may_exist && error.kind() == ErrorKind::AlreadyExists) {
                return Err(io(&root)(error));
            }
        }
        let lock_path = root.join("lock");
        let lock = File::create(&lock_path).map_err(io(&lock_path))?;
        match lock.try_lock() {
            Err(TryLockError::WouldBlock) => {
                return Err(Error::file(
                    &root,
                    "another conversion is writing here",
                    "wait for it to finish",
                ));
            }
            Err(TryLockError::Error(error)) => return Err(io(&lock_path)(error)),
            Ok(()) => {}
        }
        let fresh = Journal::new(plan)?;
        let journal = match Journal::read(&journal_in(&root))? {
            Some(journal) => {
                journal.check(&fresh, &root)?;
                journal
            }
            None => fresh,
        };
        let mut staging = Self { destination, root, journal, is_published, lock };
        if !is_published {
            staging.take_up()?;
            if let Err(error) = staging.check_space(plan) {
                if staging.journal.finished.is_empty() {
                    // What was never begun is nothing to be resumed.
                    let _ = fs::remove_dir_all(&staging.root);
                }
                return Err(error);
            }
        }
        Ok(staging)
    }

    /// Keeps what is finished of an earlier run, and removes all else. Files that were changed since are written
    /// again.
    fn take_up(&mut self) -> Result<()> {
        let model = model_in(&self.root);
        fs::create_dir_all(&model).map_err(io(&model))?;
        let is_whole = |entry: &Finished| {
            sha256::of_file(&model.join(&entry.file.file)).is_ok_and(|found| found == entry.file.sha256)
        };
        self.journal.finished.retain(is_whole);
        self.journal.published = None;
        for entry in fs::read_dir(&model).map_err(io(&model))? {
            let entry = entry.map_err(io(&model))?;
            if !entry.file_name().to_str().is_some_and(|name| self.has(name)) {
                fs::remove_file(entry.path()).map_err(io(&entry.path()))?;
            }
        }
        self.write_journal()
    }

    /// Whether what is left to be written fits the disk.
    fn check_space(&self, plan: &ConvertPlan) -> Result<()> {
        let needed: u64 = plan.files().filter(|(file, _)| !self.has(file)).map(|(_, bytes)| bytes).sum();
        match available_space(&self.root) {
            Some(available) if available < needed => {
                let problem = format!(
                    "{needed} bytes are still to be written here, {available} are available; free some, or give an \
                     output on another disk"
                );
                Err(io(&self.root)(std::io::Error::new(ErrorKind::StorageFull, problem)))
            }
            _ => Ok(()),
        }
    }

    /// A file of the output while it is built.
    pub(super) fn path(&self, file: &str) -> PathBuf {
        model_in(&self.root).join(file)
    }

    /// Whether a file is finished.
    pub(super) fn has(&self, file: &str) -> bool {
        self.journal.finished.iter().any(|entry| entry.file.file == file)
    }

    /// Notes that a file is finished.
    pub(super) fn finish(&mut self, file: &str, tensors: Vec<Quality>) -> Result<()> {
        let path = self.path(file);
        let sha256 = sha256::of_file(&path).map_err(io(&path))?;
        let file = WrittenFile { file: file.to_owned(), sha256 };
        self.journal.finished.push(Finished { file, tensors });
        self.journal.finished.sort_by(|a, b| a.file.file.cmp(&b.file.file));
        self.write_journal()
    }

    fn write_journal(&self) -> Result<()> {
        let text = serde_json::to_vec(&self.journal)
            .map_err(|error| Error::file(&self.root, error.to_string(), "report this"))?;
        let (path, new) = (journal_in(&self.root), self.root.join("journal.json.new"));
        write_synced(&new, &text)?;
        fs::rename(&new, &path).map_err(io(&path))?;
        sync_folder(&self.root).map_err(io(&self.root))
    }

    /// Makes what is in the folder the output, and removes what is left.
    pub(super) fn publish(mut self, plan: &ConvertPlan, overwrite: bool) -> Result<()> {
        let model = model_in(&self.root);
        if !self.is_published {
            let made = match &self.destination {
                Destination::Folder(_) => {
                    file_list::write(&model, &self.journal.finished)?;
                    sync_folder(&model).map_err(io(&model))?;
                    model.clone()
                }
                Destination::Store(out, _) => {
                    sync_folder(&model).map_err(io(&model))?;
                    let made = self.root.join(MANIFEST);
                    let manifest = into_blobs(out, plan, &model, &self.journal.finished)?;
                    write_synced(&made, manifest.as_bytes())?;
                    made
                }
            };
            self.journal.published = identity(&made);
            self.write_journal()?;
            self.destination.put(&made, &self.root.join("replaced"), overwrite)?;
        }
        // The journal last: without it nothing tells that the output is complete.
        for folder in [model, self.root.join("replaced")] {
            unless_missing(fs::remove_dir_all(&folder)).map_err(io(&folder))?;
        }
        for file in [MANIFEST, "journal.json.new", "lock", "journal.json"] {
            let file = self.root.join(file);
            unless_missing(fs::remove_file(&file)).map_err(io(&file))?;
        }
        drop(self.lock);
        unless_missing(fs::remove_dir(&self.root)).map_err(io(&self.root))
    }
}

fn unless_missing(removed: std::io::Result<()>) -> std::io::Result<()> {
    match removed {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
