//! A name for an output that no other has, known before anything is made.

use super::journal;
use crate::convert::plan::ConvertPlan;
use crate::sha256;
use crate::staging::io;
use candle_quant::Result;
use std::fs::{self, Metadata};
use std::time::UNIX_EPOCH;

/// The most characters of the source's name in it, and of the digest.
const LONGEST: usize = 80;
const DIGITS: usize = 16;

/// A name for the folder of an output: that of its source, and a digest that is another one if the source is, or what is
/// made of it, or the version of this crate.
///
/// Of weights, headers are read alone. That their files are the same is told by paths, sizes and times, among them that of
/// the last change of any kind where the system has one, which nobody can set back. The files beside them are read.
///
/// # Errors
/// If a file of the source is gone or can't be read.
pub(crate) fn distinct_name(plan: &ConvertPlan) -> Result<String> {
    let mut hasher = sha256::Hasher::default();
    hasher.update(journal::fingerprint(plan)?);
    for file in plan.source.weight_files() {
        let path = fs::canonicalize(&file).map_err(io(&file))?;
        let metadata = fs::metadata(&path).map_err(io(&path))?;
        hasher.update(format!("{}\0{}\0{}\0", path.display(), metadata.len(), times(&metadata)));
    }
    for (name, path) in plan.copied_files()? {
        hasher.update(format!("{name}\0{}\0", sha256::of_file(&path).map_err(io(&path))?));
    }
    let plain =
        |letter: char| if letter.is_ascii_alphanumeric() || "-_.".contains(letter) { letter } else { '-' };
    let source: String = plan.source_name().replace('/', "--").chars().map(plain).take(LONGEST).collect();
    let digest: String = hasher.finish().chars().take(DIGITS).collect();
    Ok(format!("{}-{digest}", source.trim_start_matches(['.', '-'])))
}

/// When a file was written, and when anything of it was changed.
fn times(metadata: &Metadata) -> String {
    let written = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    format!("{:?} {:?}", written, changed(metadata))
}

#[cfg(unix)]
fn changed(metadata: &Metadata) -> Option<(i64, i64)> {
    use std::os::unix::fs::MetadataExt;
    Some((metadata.ctime(), metadata.ctime_nsec()))
}

#[cfg(not(unix))]
fn changed(_: &Metadata) -> Option<(i64, i64)> {
    None
}
