//! Which files make a model.
//!
//! mistral.rs writes shards `<stem>-<i>.uqff`, counted from 0 also if there is only one, and beside them
//! `residual.safetensors`, `config.json` and `uqff_report.json`. Accepted are
//!
//! * a directory: its `uqff_report.json` says which shards belong to the model; without one all `.uqff` files
//!   there, which have to be of one model,
//! * any shard: all shards of its stem, without gaps; the report is not read, which is the way around a stale one,
//! * a path without `-<i>.uqff`, or with `.uqff` alone: as a shard of this stem,
//! * a file of a name without number: that file alone.
//!
//! A directory with `model*.safetensors` beside `.uqff` files could mean either; it is refused.

use super::report;
use crate::checkpoint::file::{names_in, Opening};
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// The files of one model.
#[derive(Debug)]
pub(in crate::checkpoint) struct Files {
    /// Where the residual and the config are.
    pub dir: PathBuf,
    pub shards: Vec<PathBuf>,
}

impl Files {
    /// A file alone.
    pub(in crate::checkpoint) fn single(path: &Path) -> Self {
        Self { dir: parent(path).to_owned(), shards: vec![path.to_owned()] }
    }
}

/// The UQFF model that `path` names; `None` if it names something else or nothing.
pub(in crate::checkpoint) fn find(path: &Path, opening: &Opening) -> Result<Option<Files>> {
    let name = path.file_name().and_then(|name| name.to_str());
    match (fs::metadata(path), name) {
        (Ok(metadata), _) if metadata.is_dir() => in_directory(path, opening),
        (Ok(_), Some(name)) => match Name::parse(name) {
            Some(Name { stem, index: Some(_) }) => shards_of(parent(path), stem).map(Some),
            Some(_) => Ok(Some(Files::single(path))),
            None => Ok(None),
        },
        (Err(error), Some(name)) if error.kind() == io::ErrorKind::NotFound => {
            stem(parent(path), name.strip_suffix(".uqff").unwrap_or(name))
        }
        _ => Ok(None),
    }
}

/// The directory that a file is in.
fn parent(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The name of a `.uqff` file: `afq4-0.uqff` is shard 0 of `afq4`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Name<'a> {
    stem: &'a str,
    index: Option<u32>,
}

impl<'a> Name<'a> {
    fn parse(name: &'a str) -> Option<Self> {
        let whole = name.strip_suffix(".uqff")?;
        let number = |digits: &str| digits.parse().ok().filter(|number: &u32| number.to_string() == digits);
        let split = whole.rsplit_once('-').and_then(|(stem, digits)| Some((stem, number(digits)?)));
        Some(match split {
            Some((stem, index)) => Self { stem, index: Some(index) },
            None => Self { stem: whole, index: None },
        })
    }
}

fn in_directory(dir: &Path, opening: &Opening) -> Result<Option<Files>> {
    let names = names_in(dir)?;
    let uqff: Vec<&str> =
        names.iter().map(String::as_str).filter(|name| Name::parse(name).is_some()).collect();
    let other: Vec<&str> = names
        .iter()
        .map(String::as_str)
        .filter(|name| name.starts_with("model") && name.ends_with(".safetensors"))
        .collect();
    let report = dir.join(report::FILE);
    if uqff.is_empty() && (!report.is_file() || !other.is_empty()) {
        return Ok(None);
    }
    if !other.is_empty() {
        let problem =
            format!("two models: UQFF ({}) and safetensors ({})", uqff.join(", "), other.join(", "));
        let remedy = "name the .uqff file to open the first, or move the .uqff files away to open the other";
        return Err(Error::file(dir, problem, remedy));
    }
    let Some(shards) = report::shards(&report, opening)? else {
        return only_set(dir, &uqff).map(Some);
    };
    let extra: Vec<&str> =
        uqff.into_iter().filter(|name| !shards.iter().any(|shard| shard == name)).collect();
    if !extra.is_empty() {
        opening.warnings.add(format!(
            "{}: {} files that it does not list are ignored: {}",
            report.display(),
            extra.len(),
            extra.join(", ")
        ));
    }
    let shards = shards.iter().map(|shard| dir.join(shard)).collect();
    Ok(Some(Files { dir: dir.to_owned(), shards }))
}

/// The files of a directory, if they are all of one model.
fn only_set(dir: &Path, names: &[&str]) -> Result<Files> {
    // Sharded models by their stem, files without number each by itself.
    let mut sets: BTreeMap<(&str, bool), &str> = BTreeMap::new();
    for name in names {
        if let Some(Name { stem, index }) = Name::parse(name) {
            sets.entry((stem, index.is_some())).or_insert(name);
        }
    }
    let firsts: Vec<&str> = sets.values().copied().collect();
    match (sets.first_key_value(), firsts.as_slice()) {
        (Some((&(stem, true), _)), [_]) => shards_of(dir, stem),
        (_, [name]) => Ok(Files::single(&dir.join(name))),
        _ => {
            let problem = format!("{} UQFF models: {}", firsts.len(), firsts.join(", "));
            Err(Error::file(dir, problem, "name one of these files instead of the directory"))
        }
    }
}

/// The model of a name that is no file: a stem, of shards or of one file.
fn stem(dir: &Path, stem: &str) -> Result<Option<Files>> {
    let names = names_in(dir)?;
    let mut same: Vec<_> = names.iter().filter_map(|name| Name::parse(name)).collect();
    same.retain(|name| name.stem == stem);
    // The one without a number first.
    same.sort_unstable();
    match same.as_slice() {
        [] => Ok(None),
        [Name { index: None, .. }] => Ok(Some(Files::single(&dir.join(format!("{stem}.uqff"))))),
        [Name { index: None, .. }, _, ..] => Err(Error::file(
            &dir.join(stem),
            format!("two UQFF models: {stem}.uqff and shards {stem}-<i>.uqff"),
            "name one of these files",
        )),
        _ => shards_of(dir, stem).map(Some),
    }
}

/// All shards of `stem`, from 0 on without gaps.
fn shards_of(dir: &Path, stem: &str) -> Result<Files> {
    let names = names_in(dir)?;
    let mut indices: Vec<u32> = names
        .iter()
        .filter_map(|name| Name::parse(name))
        .filter(|name| name.stem == stem)
        .filter_map(|name| name.index)
        .collect();
    indices.sort_unstable();
    let path = |index: u32| dir.join(format!("{stem}-{index}.uqff"));
    if let Some((missing, _)) = (0..).zip(&indices).find(|(expected, found)| expected != *found) {
        return Err(Error::file(
            &path(missing),
            format!("this shard is missing; there are {stem}-{indices:?}.uqff"),
            "fetch the missing file; if these are no shards, rename them: -<number> counts shards from 0",
        ));
    }
    Ok(Files { dir: dir.to_owned(), shards: indices.into_iter().map(path).collect() })
}
