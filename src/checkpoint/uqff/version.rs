//! The version of a UQFF model: three numbers, in at least one shard, in others again or not at all.

use super::entries::{Shard, REMEDY, VERSION};
use crate::checkpoint::file::Tensors;
use crate::{Error, Result};
use safetensors::Dtype;
use std::path::Path;

const MAJOR: u32 = 1;

/// Later ones may mean other things by the same entries.
const NEWEST_MINOR: u32 = 2;

const REGENERATE: &str = "write it again with mistral.rs 0.8.4 or later (`mistralrs quantize`)";

/// Whether these are the tensors of a UQFF file, by its version.
pub(in crate::checkpoint) fn is_versioned(tensors: &Tensors) -> bool {
    VERSION.iter().all(|part| tensors.contains_key(part))
}

/// Checks that the shards are of one version, which is understood.
pub(super) fn check(shards: &[Shard]) -> Result<()> {
    let mut first: Option<(&Path, [u32; 3])> = None;
    for shard in shards {
        let Some(version) = of(shard)? else { continue };
        match first {
            None => {
                understood(&shard.path, version)?;
                first = Some((&shard.path, version));
            }
            Some((_, same)) if same == version => {}
            Some((path, other)) => {
                return Err(Error::tensor(
                    &shard.path,
                    "uqff.version",
                    format!("{}, as in {}", dotted(other), path.display()),
                    dotted(version),
                    "the shards are of two models: fetch or write them again",
                ));
            }
        }
    }
    match (first, shards.first()) {
        (None, Some(shard)) => Err(missing(shard, shards)),
        _ => Ok(()),
    }
}

/// The version in one shard, if there is one.
fn of(shard: &Shard) -> Result<Option<[u32; 3]>> {
    if !VERSION.iter().any(|part| shard.tensors.contains_key(part)) {
        return Ok(None);
    }
    let mut version = [0; 3];
    for (part, number) in VERSION.into_iter().zip(&mut version) {
        let wrong = |found: String| {
            Error::tensor(&shard.path, part, "a version number, U32 of shape []", found, REMEDY)
        };
        let tensor = shard.tensors.get(part).ok_or_else(|| wrong("no such entry".into()))?;
        let value = shard.values.get(part).and_then(|bytes| bytes.as_slice().try_into().ok());
        match (tensor.dtype(), tensor.dims(), value) {
            (Dtype::U32, [], Some(bytes)) => *number = u32::from_le_bytes(bytes),
            (dtype, dims, _) => return Err(wrong(format!("{dtype:?} {dims:?}"))),
        }
    }
    Ok(Some(version))
}

fn understood(path: &Path, version: [u32; 3]) -> Result<()> {
    let [major, minor, _] = version;
    let (found, remedy) = match (major, minor) {
        (MAJOR, 0..=NEWEST_MINOR) => return Ok(()),
        (MAJOR, _) => ("written by a newer version of mistral.rs", "upgrade this crate"),
        (0, _) => ("written by an early mistral.rs", REGENERATE),
        _ => ("incompatible", "upgrade this crate, or write the file again in version 1 of the format"),
    };
    Err(Error::tensor(
        path,
        "uqff.version",
        format!("{MAJOR}.0 to {MAJOR}.{NEWEST_MINOR}"),
        format!("{}, {found}", dotted(version)),
        remedy,
    ))
}

/// No shard has a version: either these are no UQFF files, or they are older than the version's entries.
fn missing(first: &Shard, shards: &[Shard]) -> Error {
    let mut names = shards.iter().flat_map(|shard| shard.tensors.keys()).peekable();
    let is_number = |name: &str| name.bytes().all(|byte| byte.is_ascii_digit());
    if names.peek().is_some() && names.all(is_number) {
        let problem = "UQFF of a version before 1.0, whose layers have numbers and no names";
        return Error::file(&first.path, problem, format!("regenerate it: {REGENERATE}"));
    }
    let [major, ..] = VERSION;
    Error::tensor(&first.path, major, "the version of the format, in this or another shard", "none", REMEDY)
}

fn dotted([major, minor, patch]: [u32; 3]) -> String {
    format!("{major}.{minor}.{patch}")
}
