//! What is finished of a conversion, so that it can be resumed.

use super::job::Work;
use super::plan::Plan;
use super::quality::{Quality, WrittenFile};
use crate::checkpoint::Checkpoint;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::Path;
use std::time::UNIX_EPOCH;

/// Bytes that are read at a time to be hashed.
const CHUNK: usize = 4 << 20;

/// What was begun, of what, and what of it is finished.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Journal {
    /// The SHA-256 of what the plan says.
    plan: String,
    /// For every file of the source its size and the time of its last change.
    source: BTreeMap<String, (u64, u128)>,
    /// In the order of the plan.
    pub finished: Vec<Finished>,
    /// Device and inode of the folder or manifest that becomes the output, noted before it does.
    #[serde(default)]
    pub published: Option<(u64, u64)>,
}

/// A finished file, and what is known of its tensors.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Finished {
    #[serde(flatten)]
    pub file: WrittenFile,
    pub tensors: Vec<Quality>,
}

impl Journal {
    /// That of a conversion of which nothing is finished.
    pub(super) fn new(plan: &Plan) -> Result<Self> {
        Ok(Self {
            plan: fingerprint(plan)?,
            source: source_of(&plan.source)?,
            finished: Vec::new(),
            published: None,
        })
    }

    /// That in a file; `None` if there is none.
    pub(super) fn read(path: &Path) -> Result<Option<Self>> {
        match fs::read(path) {
            Ok(text) => serde_json::from_slice(&text)
                .map(Some)
                .map_err(|error| Error::file(path, error.to_string(), "remove the folder it is in")),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::Io { path: path.to_owned(), error }),
        }
    }

    /// Whether the conversion that was begun in `root` is the one that is to be carried out `now`.
    pub(super) fn check(&self, now: &Self, root: &Path) -> Result<()> {
        if let Some(path) =
            now.source.iter().find_map(|(path, state)| (self.source.get(path) != Some(state)).then_some(path))
        {
            let problem = format!("begun when {path} was another file");
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
    for job in plan.jobs() {
        let tensor = &job.planned;
        // Scales that are bytes do not tell what their numbers were rounded to before.
        let rounded = match &job.work {
            Work::Pack(_, packing) => format!("{packing:?}"),
            Work::Copy(..) | Work::Cast(..) | Work::Repack(..) => String::new(),
        };
        hasher.update(format!("{}\0{}\0{}\0{rounded}\0", tensor.name, tensor.from, tensor.to));
    }
    hasher.update(plan.config_json()?.unwrap_or_default());
    Ok(hex(&hasher.finalize()))
}

/// For every file of weights its size and the time of its last change.
pub(super) fn source_of(source: &Checkpoint) -> Result<BTreeMap<String, (u64, u128)>> {
    let state = |path: &Path| {
        let metadata = fs::metadata(path)?;
        let changed = metadata.modified()?.duration_since(UNIX_EPOCH).unwrap_or_default();
        // JSON has no bytes: of a path that is no Unicode, what is none is left out.
        let path = fs::canonicalize(path)?.to_string_lossy().into_owned();
        Ok((path, (metadata.len(), changed.as_nanos())))
    };
    let files = source.weight_files().into_iter();
    files.map(|path| state(&path).map_err(|error| Error::Io { path, error })).collect()
}

pub(super) fn sha256(path: &Path) -> Result<String> {
    let io = |error| Error::Io { path: path.to_owned(), error };
    let mut file = File::open(path).map_err(io)?;
    let (mut hasher, mut chunk) = (Sha256::new(), vec![0; CHUNK]);
    loop {
        let read = file.read(&mut chunk).map_err(io)?;
        match chunk.get(..read) {
            None | Some([]) => return Ok(hex(&hasher.finalize())),
            Some(bytes) => hasher.update(bytes),
        }
    }
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
