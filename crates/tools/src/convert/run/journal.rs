//! What is finished of a conversion, so that it can be resumed.

use super::quality::{Quality, WrittenFile};
use crate::convert::disk::states_of_files;
use crate::convert::output::Work;
use crate::convert::plan::ConvertPlan;
use crate::sha256;
use candle_quant::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

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
    pub(super) fn new(plan: &ConvertPlan) -> Result<Self> {
        Ok(Self {
            plan: fingerprint(plan)?,
            source: states_of_files(&plan.source)?,
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
fn fingerprint(plan: &ConvertPlan) -> Result<String> {
    let mut hasher = sha256::Hasher::default();
    hasher.update(env!("CARGO_PKG_VERSION"));
    for file in &plan.files {
        hasher.update(&file.file);
        hasher.update(&file.header);
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
    Ok(hasher.finish())
}
