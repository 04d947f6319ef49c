//! What is finished of a conversion, so that it can be resumed.

use super::quality::{Quality, WrittenFile};
use super::sidecars::file_names;
use crate::convert::output::Work;
use crate::convert::plan::ConvertPlan;
use crate::sha256;
use candle_quant::Result;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// What was begun, and what of it is finished.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Journal {
    /// The files that are written.
    pub files: BTreeSet<String>,
    /// The SHA-256 of what the plan says.
    pub plan: String,
    /// In the order of their names.
    pub finished: Vec<Finished>,
    /// Device and inode of the folder or manifest that becomes the output, noted before it does.
    pub published: Option<(u64, u64)>,
}

/// A finished file, and what is known of its tensors.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Finished {
    #[serde(flatten)]
    pub file: WrittenFile,
    /// The digest of the numbers and codes of the source that it was made of, as they were read.
    pub source: String,
    pub tensors: Vec<Quality>,
}

impl Journal {
    /// A field that journals of other commands do not have.
    pub const OWN_KEY: &str = "plan";

    /// That of a conversion of which nothing is finished.
    pub(super) fn new(plan: &ConvertPlan) -> Result<Self> {
        Ok(Self { files: file_names(plan)?, plan: fingerprint(plan)?, finished: Vec::new(), published: None })
    }
}

/// The SHA-256 of all that decides about the bytes of the output, but for the numbers of the source.
pub(in crate::convert) fn fingerprint(plan: &ConvertPlan) -> Result<String> {
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
            Work::Copy(..) | Work::Cast(..) | Work::Repack(..) | Work::Blocks(..) => String::new(),
        };
        let scaled = job.scaling.as_ref().map_or_else(String::new, |scaling| format!("{scaling:?}\0"));
        hasher.update(format!("{}\0{}\0{}\0{rounded}\0{scaled}", tensor.name, tensor.from, tensor.to));
    }
    hasher.update(plan.config_json()?.unwrap_or_default());
    Ok(hasher.finish())
}
