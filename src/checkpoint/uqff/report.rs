//! `uqff_report.json`: which shards make the model of a directory.

use crate::checkpoint::file::{is_plain_file_name, read_json, Opening};
use crate::{Error, Result};
use serde::Deserialize;
use std::collections::BTreeSet;
use std::path::Path;

pub(super) const FILE: &str = "uqff_report.json";

const REMEDY: &str =
    "write or fetch the model again; to ignore the report, open one of the .uqff files and not the directory";

#[derive(Deserialize)]
struct Report {
    schema: u64,
    outputs: Vec<Output>,
}

#[derive(Deserialize)]
struct Output {
    quant: String,
    shards: Vec<String>,
}

/// The names of the shards that the report at `path` lists; `None` if there is no report.
pub(super) fn shards(path: &Path, opening: &Opening) -> Result<Option<Vec<String>>> {
    let wrong = |problem: String| Error::file(path, problem, REMEDY);
    #[allow(clippy::wildcard_enum_match_arm, reason = "all other errors stay as they are")]
    let report = read_json::<Report>(path, opening).map_err(|error| match error {
        Error::File { problem, .. } => wrong(problem),
        other => other,
    })?;
    let Some(Report { schema, outputs }) = report else { return Ok(None) };
    if schema != 1 {
        return Err(wrong(format!("a report of schema {schema}; 1 is known")));
    }
    let (mut quants, mut files) = (BTreeSet::new(), BTreeSet::new());
    for Output { quant, shards } in &outputs {
        if quant.is_empty() || !quants.insert(quant) {
            return Err(wrong(format!("an output without a name of its own: {quant:?}")));
        }
        if shards.is_empty() {
            return Err(wrong(format!("the output {quant:?} lists no shards")));
        }
        for shard in shards {
            if !is_plain_file_name(shard) {
                return Err(wrong(format!("it lists the shard {shard:?}, which is not a plain file name")));
            }
            if !files.insert(shard) {
                return Err(wrong(format!("it lists the shard {shard:?} twice")));
            }
            if !path.with_file_name(shard).is_file() {
                return Err(wrong(format!("it lists the shard {shard:?}, which is missing")));
            }
        }
    }
    match <[Output; 1]>::try_from(outputs) {
        Ok([output]) => Ok(Some(output.shards)),
        Err(outputs) if outputs.is_empty() => Err(wrong("it lists no outputs".into())),
        Err(outputs) => {
            let list: Vec<_> = outputs.iter().map(|output| output.shards.join(", ")).collect();
            let problem = format!("{} UQFF models: {}", list.len(), list.join("; "));
            Err(Error::file(path, problem, "name a file of one of them instead of the directory"))
        }
    }
}
