//! The list of what a conversion wrote, which lies in the folder that it made: `--overwrite` removes what is listed, and
//! nothing else.

use super::journal::Finished;
use crate::convert::disk::{io, write_synced};
use crate::convert::output::FILE_LIST;
use crate::sha256;
use candle_quant::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

/// Files up to this size are known by their digest, larger ones by their size: they would take minutes to read.
const SMALL: u64 = 16 << 20;

#[derive(Serialize, Deserialize)]
struct FileList {
    /// The program and its version.
    written_by: String,
    files: BTreeMap<String, Written>,
}

#[derive(Serialize, Deserialize)]
struct Written {
    bytes: u64,
    sha256: String,
}

/// Lists the files of an output. Those that are `finished` are not read again.
pub(super) fn write(output: &Path, finished: &[Finished]) -> Result<()> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(output).map_err(io(output))? {
        let entry = entry.map_err(io(output))?;
        let (name, path) = (entry.file_name().to_string_lossy().into_owned(), entry.path());
        let known = finished.iter().find(|finished| finished.file.file == name);
        let sha256 = match known {
            Some(finished) => finished.file.sha256.clone(),
            None => sha256::of_file(&path).map_err(io(&path))?,
        };
        files.insert(name, Written { bytes: entry.metadata().map_err(io(&path))?.len(), sha256 });
    }
    let list = FileList { written_by: concat!("candle-quant ", env!("CARGO_PKG_VERSION")).into(), files };
    let text = serde_json::to_vec_pretty(&list)
        .map_err(|error| Error::file(output, error.to_string(), "report this"))?;
    write_synced(&output.join(FILE_LIST), &text)
}

/// Whether a folder may be replaced: it is empty, or everything in it is as a conversion wrote it.
///
/// # Errors
/// If not: names the file that would be lost.
pub(super) fn check_replaceable(folder: &Path) -> Result<()> {
    let refuse = |problem: &str| {
        Err(Error::file(folder, format!("not overwritten: {problem}"), "remove it or give another output"))
    };
    if !fs::symlink_metadata(folder).map_err(io(folder))?.is_dir() {
        return refuse("not a folder");
    }
    let entries = fs::read_dir(folder).and_then(Iterator::collect::<std::io::Result<Vec<_>>>);
    let entries = entries.map_err(io(folder))?;
    if entries.is_empty() {
        return Ok(());
    }
    let path = folder.join(FILE_LIST);
    let text = match fs::read(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return refuse(&format!("it has no {FILE_LIST}, in which a conversion lists what it wrote"));
        }
        Err(error) => return Err(io(&path)(error)),
    };
    let Ok(list) = serde_json::from_slice::<FileList>(&text) else {
        return refuse(&format!("its {FILE_LIST} is not what a conversion writes"));
    };
    for entry in entries {
        let (name, path) = (entry.file_name(), entry.path());
        if name == FILE_LIST {
            continue;
        }
        let metadata = fs::symlink_metadata(&path).map_err(io(&path))?;
        let written = name.to_str().and_then(|name| list.files.get(name));
        let Some(written) = written.filter(|_| metadata.is_file()) else {
            let what = if metadata.is_dir() { "a folder in it" } else { "a file in it" };
            return refuse(&format!("it has {what} that no conversion has written: {}", name.display()));
        };
        let same = metadata.len() == written.bytes
            && (written.bytes > SMALL || sha256::of_file(&path).map_err(io(&path))? == written.sha256);
        if !same {
            return refuse(&format!("{} was changed since it was written", name.display()));
        }
    }
    Ok(())
}
