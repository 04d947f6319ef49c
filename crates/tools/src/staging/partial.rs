//! The folder in which an output is built: `OUT.partial`, with the lock of the process that writes, a journal of what was
//! begun, and below `model` what becomes the output. All else in it is somebody else's, and stays.

use super::disk::{
    create, entries, io, io_of_new, is_there, kind_of, remove_empty, remove_file, sync_folder,
};
use super::lock::Lock;
use super::manifest::{first_foreign, listed_in, remove};
use candle_quant::{Error, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs::{self, DirEntry};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// What is added to the name of an output.
const PARTIAL: &str = ".partial";

const LOCK: &str = "lock";
const JOURNAL: &str = "journal.json";
const NEW_JOURNAL: &str = "journal.json.new";
/// What becomes the output, or what was the output until it was replaced.
const MODEL: &str = "model";
/// What was the output, where a system can't exchange folders.
const REPLACED: &str = "replaced";
/// A file that becomes the output, where that is no folder.
const MADE: &str = "made";

/// How often a folder is looked for that other processes remove.
const ATTEMPTS: usize = 100;

/// Such a folder. No other process writes in it as long as this exists.
pub(crate) struct Partial {
    root: PathBuf,
    lock: Lock,
}

/// What every journal says: the files that are written below `model`.
#[derive(Deserialize)]
struct Begun {
    files: BTreeSet<String>,
}

impl Partial {
    /// The one of an output.
    pub(crate) fn of(out: &Path) -> PathBuf {
        let mut name = out.file_name().unwrap_or_default().to_owned();
        name.push(PARTIAL);
        out.with_file_name(name)
    }

    /// Whether a name is that of such a folder.
    pub(crate) fn is_one(name: &str) -> bool {
        name.ends_with(PARTIAL)
    }

    /// Whether this folder can be entered: there is none, or one that candle-quant has made and no process writes in.
    ///
    /// # Errors
    /// If not.
    pub(crate) fn check(root: &Path) -> Result<()> {
        match fs::symlink_metadata(root) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            there => {
                let there = there.map_err(io(root))?;
                if !there.is_dir() {
                    let problem =
                        format!("{} of the name of the folder in which the output is built", kind_of(&there));
                    return Err(Error::file(root, problem, "move it away, or give another output"));
                }
            }
        }
        Lock::check(root, &root.join(LOCK))?;
        check_entries(root)
    }

    /// Removes the folder if nothing but the lock is in it: of a process that was killed while it removed it.
    pub(crate) fn sweep(root: &Path) {
        let is_lock = |entry: &DirEntry| entry.file_name() == LOCK;
        if entries(root).is_ok_and(|entries| entries.iter().all(is_lock)) {
            // Another process may be faster.
            let _ = Self::enter(root.to_owned()).and_then(Self::leave);
        }
    }

    /// Creates the folder, or takes over the one that another process has left.
    ///
    /// # Errors
    /// As those of [`Partial::check`]; or if it can't be created.
    pub(crate) fn enter(root: PathBuf) -> Result<Self> {
        for _ in 0..ATTEMPTS {
            Self::check(&root)?;
            match fs::create_dir(&root) {
                Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                    return Err(io_of_new(&root)(error))
                }
                _ => {}
            }
            if let Some(lock) = Lock::take(&root, &root.join(LOCK))? {
                check_entries(&root)?;
                return Ok(Self { root, lock });
            }
        }
        Err(Error::file(&root, "it comes and goes: other processes write here", "give another output"))
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// The folder that becomes the output.
    pub(crate) fn model(&self) -> PathBuf {
        self.root.join(MODEL)
    }

    /// What was the output, where a system can't exchange folders.
    pub(super) fn replaced(&self) -> PathBuf {
        self.root.join(REPLACED)
    }

    /// The file that becomes the output, where that is no folder.
    pub(crate) fn made(&self) -> PathBuf {
        self.root.join(MADE)
    }

    /// The journal of what was begun in a folder; `None` if nothing was.
    ///
    /// # Errors
    /// If it can't be read, or no version like this one has written it.
    pub(crate) fn read_journal<J: DeserializeOwned>(root: &Path) -> Result<Option<J>> {
        let path = root.join(JOURNAL);
        let text = match fs::read(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            read => read.map_err(io(&path))?,
        };
        serde_json::from_slice(&text).map(Some).map_err(|error| {
            let problem = format!("not a journal of this version of candle-quant: {error}");
            Error::file(&path, problem, "remove the folder it is in, or give another output")
        })
    }

    /// The journal of what was begun in a folder, if the same command has begun it: what another one has begun is nothing
    /// to be resumed, and no obstacle either. Journals of this command have `own_key`.
    ///
    /// # Errors
    /// As those of [`read_journal`](Self::read_journal).
    pub(crate) fn read_own_journal<J: DeserializeOwned>(root: &Path, own_key: &str) -> Result<Option<J>> {
        Self::read_journal(root).or_else(|error| match Self::read_journal::<Value>(root) {
            // A damaged one is not another's.
            Ok(Some(other)) if other["files"].is_array() && other.get(own_key).is_none() => Ok(None),
            _ => Err(error),
        })
    }

    /// Replaces the journal as a whole. One has `files`, what is written below `model`, before anything is.
    pub(crate) fn write_journal(&self, journal: &impl Serialize) -> Result<()> {
        let text = serde_json::to_vec(journal)
            .map_err(|error| Error::file(&self.root, error.to_string(), "report this"))?;
        let (path, new) = (self.root.join(JOURNAL), self.root.join(NEW_JOURNAL));
        let write = || {
            let mut file = create(&new)?;
            file.write_all(&text)?;
            file.sync_all()
        };
        write().map_err(io(&new))?;
        fs::rename(&new, &path).map_err(io(&path))?;
        sync_folder(&self.root)
    }

    /// Removes what was begun, but for files that are to be kept.
    ///
    /// # Errors
    /// If there is anything else, which stays.
    pub(crate) fn clear(&self, keep: &dyn Fn(&str) -> bool) -> Result<()> {
        remove_file(&self.made())?;
        let model = self.model();
        if !is_there(&model) {
            return Ok(());
        }
        let files = expected_in(&model, Self::read_journal::<Begun>(&self.root)?.as_ref())?;
        match remove(&model, &files, keep)? {
            true => Ok(()),
            false => self.check_entries(),
        }
    }

    fn check_entries(&self) -> Result<()> {
        check_entries(&self.root)
    }

    /// Creates what becomes the output.
    pub(crate) fn create_model(&self) -> Result<()> {
        let model = self.model();
        fs::create_dir_all(&model).map_err(io(&model))
    }

    /// Removes the folder, in which nothing is left but the journal.
    ///
    /// # Errors
    /// If anything else is in it, which stays.
    pub(crate) fn leave(self) -> Result<()> {
        for folder in [self.model(), self.replaced()] {
            if !remove_empty(&folder)? {
                let problem = "it has what came into the output while that was replaced";
                return Err(Error::file(&folder, problem, "move it away; the new output is complete"));
            }
        }
        // The journal after all that it is about: without it nobody knows whose that is.
        for file in [MADE, NEW_JOURNAL, JOURNAL, LOCK] {
            remove_file(&self.root.join(file))?;
        }
        drop(self.lock);
        // Another process may have entered it.
        remove_empty(&self.root).map(drop)
    }
}

/// Whether all in the folder is what candle-quant puts there.
fn check_entries(root: &Path) -> Result<()> {
    let begun = Partial::read_journal::<Begun>(root)?;
    let refuse = |what: String| {
        let problem = format!("{what} in it is not of candle-quant, which builds the output in this folder");
        Err(Error::file(root, problem, "move it away, or give another output"))
    };
    for entry in entries(root)? {
        let (name, path) = (entry.file_name(), entry.path());
        let there = fs::symlink_metadata(&path).map_err(io(&path))?;
        let foreign = match name.to_str() {
            Some(LOCK | JOURNAL | NEW_JOURNAL | MADE) if there.is_file() => None,
            Some(MODEL | REPLACED) if there.is_dir() => {
                first_foreign(&path, &expected_in(&path, begun.as_ref())?)?
            }
            _ => Some(format!("{} ({})", kind_of(&there), name.to_string_lossy().escape_debug())),
        };
        if let Some(what) = foreign {
            return refuse(what);
        }
    }
    Ok(())
}

/// What may be below `model` or `replaced`, if anything was begun: what was to be written there, or what was the output
/// and has a manifest.
fn expected_in(folder: &Path, begun: Option<&Begun>) -> Result<BTreeSet<String>> {
    let Some(begun) = begun else {
        return Ok(BTreeSet::new());
    };
    let mut files = begun.files.clone();
    files.extend(listed_in(folder)?);
    Ok(files)
}
