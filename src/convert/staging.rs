//! The folder in which the output is built, and the journal of what is finished in it.
//!
//! `OUT.partial/model` becomes `OUT` by one rename, when everything is on the disk. Beside it lies the journal:
//! killed at any moment, the conversion leaves either no `OUT` or all of it.

use super::plan::Plan;
use super::quality::{Quality, WrittenFile};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// Bytes that are read at a time to be hashed.
const CHUNK: usize = 4 << 20;

/// What was begun, of what, and what of it is finished.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Journal {
    /// The SHA-256 of what the plan says.
    plan: String,
    /// For every file of the source its size and the time of its last change.
    source: BTreeMap<PathBuf, (u64, u128)>,
    /// In the order of the plan.
    pub finished: Vec<Finished>,
}

/// A finished file, and what is known of its tensors.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Finished {
    #[serde(flatten)]
    pub file: WrittenFile,
    pub tensors: Vec<Quality>,
}

/// The folder in which an output is built. Nobody else works in it as long as this exists.
pub(super) struct Staging {
    out: PathBuf,
    root: PathBuf,
    pub journal: Journal,
    /// Whether the output has been renamed already, and only the journal is left.
    pub is_published: bool,
    lock: File,
}

fn io(path: &Path) -> impl Fn(std::io::Error) -> Error + '_ {
    |error| Error::Io { path: path.to_owned(), error }
}

/// Where the output `out` is built.
pub(super) fn root_of(out: &Path) -> PathBuf {
    let mut name = out.file_name().unwrap_or_default().to_owned();
    name.push(".partial");
    out.with_file_name(name)
}

/// Whether the output may be written: there is none yet, and nothing unfinished unless it is to be resumed.
///
/// # Errors
/// If not.
pub fn check_output(out: &Path, resume: bool) -> Result<()> {
    let root = root_of(out);
    if out.file_name().is_none() {
        return Err(Error::file(out, "not the name of a folder to create", "give another output"));
    }
    let exists = fs::symlink_metadata(out).is_ok();
    if exists && !(resume && is_published(out)) {
        return Err(Error::file(
            out,
            "it exists already, and is not overwritten",
            "remove it or give another output",
        ));
    }
    if !resume && root.exists() {
        let problem = "left by a conversion that was interrupted";
        return Err(Error::file(&root, problem, "resume it (--resume), or remove it"));
    }
    Ok(())
}

/// Whether the output has been renamed already, and only the journal is left.
fn is_published(out: &Path) -> bool {
    let root = root_of(out);
    out.exists() && root.join("journal.json").exists() && !root.join("model").exists()
}

impl Staging {
    /// Creates the folder, or takes up what is in it.
    pub(super) fn open(plan: &Plan, out: &Path, resume: bool) -> Result<Self> {
        check_output(out, resume)?;
        let (root, is_published) = (root_of(out), is_published(out));
        if let Err(error) = fs::create_dir(&root) {
            if !(resume && error.kind() == std::io::ErrorKind::AlreadyExists) {
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
        let fresh = Journal { plan: fingerprint(plan)?, source: source_of(plan)?, finished: Vec::new() };
        let path = root.join("journal.json");
        let journal = match fs::read(&path) {
            Ok(text) => {
                let journal = serde_json::from_slice::<Journal>(&text)
                    .map_err(|error| Error::file(&path, error.to_string(), "remove the folder it is in"))?;
                journal.check(&fresh, &root)?;
                journal
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => fresh,
            Err(error) => return Err(io(&path)(error)),
        };
        let mut staging = Self { out: out.to_owned(), root, journal, is_published, lock };
        if !is_published {
            let model = staging.path("");
            fs::create_dir_all(&model).map_err(io(&model))?;
            // Files that were changed since are written again.
            let finished = std::mem::take(&mut staging.journal.finished);
            for entry in finished {
                if sha256(&staging.path(&entry.file.file)).is_ok_and(|found| found == entry.file.sha256) {
                    staging.journal.finished.push(entry);
                }
            }
            staging.write_journal()?;
        }
        Ok(staging)
    }

    /// A file of the output while it is built.
    pub(super) fn path(&self, file: &str) -> PathBuf {
        self.root.join("model").join(file)
    }

    /// Whether a file is finished.
    pub(super) fn has(&self, file: &str) -> bool {
        self.journal.finished.iter().any(|entry| entry.file.file == file)
    }

    /// Notes that a file is finished.
    pub(super) fn finish(&mut self, file: &str, tensors: Vec<Quality>) -> Result<()> {
        let sha256 = sha256(&self.path(file))?;
        let file = WrittenFile { file: file.to_owned(), sha256 };
        self.journal.finished.push(Finished { file, tensors });
        self.journal.finished.sort_by(|a, b| a.file.file.cmp(&b.file.file));
        self.write_journal()
    }

    fn write_journal(&self) -> Result<()> {
        let text = serde_json::to_vec(&self.journal)
            .map_err(|error| Error::file(&self.root, error.to_string(), "report this"))?;
        let (path, new) = (self.root.join("journal.json"), self.root.join("journal.json.new"));
        write_synced(&new, &text)?;
        fs::rename(&new, &path).map_err(io(&path))
    }

    /// Makes the folder the output, and removes what is left.
    pub(super) fn publish(self) -> Result<()> {
        if !self.is_published {
            let model = self.root.join("model");
            fs::rename(&model, &self.out).map_err(io(&self.out))?;
        }
        drop(self.lock);
        fs::remove_dir_all(&self.root).map_err(io(&self.root))
    }
}

/// Writes a file whose bytes are on the disk when this returns.
pub(super) fn write_synced(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(io(path))
}

impl Journal {
    fn check(&self, now: &Self, root: &Path) -> Result<()> {
        if let Some(path) =
            now.source.iter().find_map(|(path, state)| (self.source.get(path) != Some(state)).then_some(path))
        {
            let problem = format!("begun when {} was another file", path.display());
            return Err(Error::file(root, problem, "remove it and begin anew"));
        }
        if self.plan != now.plan {
            return Err(Error::file(root, "begun with other options", "give the same options, or remove it"));
        }
        Ok(())
    }
}

/// The SHA-256 of all that decides about the bytes of the output.
fn fingerprint(plan: &Plan) -> Result<String> {
    let mut hasher = Sha256::new();
    hasher.update(env!("CARGO_PKG_VERSION"));
    for shard in &plan.shards {
        hasher.update(&shard.file);
        hasher.update(&shard.header);
    }
    for tensor in plan.tensors() {
        hasher.update(format!("{}\0{}\0{}\0", tensor.name, tensor.from, tensor.to));
    }
    hasher.update(plan.config_json()?.unwrap_or_default());
    Ok(hex(&hasher.finalize()))
}

fn source_of(plan: &Plan) -> Result<BTreeMap<PathBuf, (u64, u128)>> {
    let state = |path: PathBuf| {
        let metadata = fs::metadata(&path).map_err(io(&path))?;
        let changed = metadata.modified().map_err(io(&path))?.duration_since(UNIX_EPOCH).unwrap_or_default();
        let path = fs::canonicalize(&path).map_err(io(&path))?;
        Ok((path, (metadata.len(), changed.as_nanos())))
    };
    plan.source.weight_files().into_iter().map(state).collect()
}

fn sha256(path: &Path) -> Result<String> {
    let mut file = File::open(path).map_err(io(path))?;
    let (mut hasher, mut chunk) = (Sha256::new(), vec![0; CHUNK]);
    loop {
        let read = file.read(&mut chunk).map_err(io(path))?;
        match chunk.get(..read) {
            None | Some([]) => return Ok(hex(&hasher.finalize())),
            Some(bytes) => hasher.update(bytes),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
