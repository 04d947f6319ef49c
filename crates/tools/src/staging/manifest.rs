//! The manifest of a folder that was written: `--overwrite` removes what is listed in it, and nothing else.

use super::disk::{entries, io, is_there, kind_of, remove_empty, remove_file, write_synced};
use crate::sha256;
use candle_quant::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, Metadata};
use std::path::Path;

/// The manifest of a folder. It lies in it, and belongs to no other.
pub(crate) const MANIFEST: &str = "candle-quant.json";

/// Files up to this size are known by their digest, larger ones by their size: they would take minutes to read.
const SMALL: u64 = 16 << 20;

/// What was written into a folder.
#[derive(Serialize, Deserialize)]
pub(crate) struct Manifest {
    /// The program and its version.
    pub(crate) written_by: String,
    /// The name of what it was made of. No path, for folders are passed on.
    #[serde(default)]
    pub(crate) source: String,
    /// What was done with it, in words.
    #[serde(default)]
    pub(crate) recipe: String,
    /// By paths below the folder, with `/` between their parts.
    files: BTreeMap<String, Written>,
}

#[derive(Serialize, Deserialize)]
struct Written {
    bytes: u64,
    sha256: String,
}

impl Written {
    /// Whether a regular file of so many bytes is what was written, as far as that is soon told.
    fn is(&self, path: &Path, bytes: u64) -> Result<bool> {
        Ok(bytes == self.bytes && (bytes > SMALL || sha256::of_file(path).map_err(io(path))? == self.sha256))
    }
}

/// What there is in a folder.
enum Entry<'a> {
    /// A regular file that is listed, and its size.
    Listed(&'a str, u64),
    /// A folder of listed files, after these.
    Folder,
    /// Anything else, in words.
    Foreign(String),
}

impl Manifest {
    /// Of the files in a folder that are to be listed; `digest` may know the SHA-256 of some.
    pub(crate) fn of(
        folder: &Path,
        (source, recipe): (&str, &str),
        files: &BTreeSet<String>,
        digest: impl Fn(&str) -> Option<String>,
    ) -> Result<Self> {
        let written = |name: &String| {
            let path = folder.join(name);
            let sha256 = match digest(name) {
                Some(sha256) => sha256,
                None => sha256::of_file(&path).map_err(io(&path))?,
            };
            let bytes = fs::symlink_metadata(&path).map_err(io(&path))?.len();
            Ok((name.clone(), Written { bytes, sha256 }))
        };
        let there = files.iter().filter(|name| is_there(&folder.join(name)));
        Ok(Self {
            written_by: concat!("candle-quant ", env!("CARGO_PKG_VERSION")).into(),
            source: source.to_owned(),
            recipe: recipe.to_owned(),
            files: there.map(written).collect::<Result<_>>()?,
        })
    }

    /// Writes it into the folder.
    pub(crate) fn write(&self, folder: &Path) -> Result<()> {
        let text = serde_json::to_vec_pretty(self)
            .map_err(|error| Error::file(folder, error.to_string(), "report this"))?;
        write_synced(&folder.join(MANIFEST), &text)
    }

    /// That of a folder; `None` if it has none.
    fn read(folder: &Path) -> Result<Option<Result<Self, serde_json::Error>>> {
        let path = folder.join(MANIFEST);
        match fs::symlink_metadata(&path) {
            Ok(there) if there.is_file() => {
                Ok(Some(serde_json::from_slice(&fs::read(&path).map_err(io(&path))?)))
            }
            _ => Ok(None),
        }
    }
}

/// The names in the manifest of a folder, and that of the manifest itself; none if it has no manifest.
pub(super) fn listed_in(folder: &Path) -> Result<BTreeSet<String>> {
    let manifest = Manifest::read(folder)?.and_then(Result::ok);
    let names = manifest.map(|manifest| manifest.files.into_keys().chain([MANIFEST.to_owned()]).collect());
    Ok(names.unwrap_or_default())
}

/// Whether a folder may be replaced: it is empty, or everything in it is listed in its manifest, and as it was written.
/// Errors call it `named`.
///
/// # Errors
/// If not: names what would be lost.
pub(super) fn check_replaceable(folder: &Path, named: &Path) -> Result<()> {
    let refuse = |problem: String, remedy: &str| {
        Err(Error::file(named, format!("not overwritten: {problem}"), remedy))
    };
    let there = fs::symlink_metadata(folder).map_err(io(folder))?;
    if !there.is_dir() {
        return refuse(format!("not a folder, but {}", kind_of(&there)), "give another output");
    }
    let remedy = "move away what you want to keep and remove the folder, or give another output";
    let names: Vec<_> =
        entries(folder)?.iter().map(|entry| shown(&entry.file_name().to_string_lossy())).collect();
    if names.is_empty() {
        return Ok(());
    }
    let manifest = match Manifest::read(folder)? {
        Some(Ok(manifest)) => manifest,
        Some(Err(_)) => {
            return refuse(format!("its {MANIFEST} is not one that candle-quant writes"), remedy);
        }
        None => {
            let first = names.iter().take(3).cloned().collect::<Vec<_>>().join(", ");
            let more =
                names.len().checked_sub(4).map_or(String::new(), |more| format!(" and {} more", more + 1));
            let problem = format!(
                "it has no {MANIFEST}, in which candle-quant lists what it wrote, so that it may be replaced (earlier \
                 versions wrote none); in it are {first}{more}"
            );
            return refuse(problem, remedy);
        }
    };
    let mut problem = None;
    let listed = manifest.files.keys().cloned().chain([MANIFEST.to_owned()]).collect();
    walk(folder, &listed, &mut |path, entry| {
        let wrong = match entry {
            _ if problem.is_some() => None,
            Entry::Folder => None,
            Entry::Foreign(what) => Some(format!("it has {what} that its {MANIFEST} does not list")),
            Entry::Listed(name, bytes) => match manifest.files.get(name) {
                Some(written) => (!written.is(path, bytes)?)
                    .then(|| format!("{} was changed since it was written", shown(name))),
                None => None,
            },
        };
        problem = problem.take().or(wrong);
        Ok(())
    })?;
    match problem {
        Some(problem) => refuse(problem, remedy),
        None => Ok(()),
    }
}

/// Whether all that the manifest of a folder lists is there, as it was written.
pub(crate) fn is_whole(folder: &Path) -> bool {
    let Ok(Some(Ok(manifest))) = Manifest::read(folder) else { return false };
    let is_as_written = |(name, written): (&String, &Written)| {
        let path = folder.join(name);
        let there = fs::symlink_metadata(&path).ok().filter(Metadata::is_file);
        there.is_some_and(|there| written.is(&path, there.len()).unwrap_or(false))
    };
    manifest.files.iter().all(is_as_written)
}

/// Removes what the manifest of a folder lists, and the folder, if nothing else is in it. Returns whether all is gone.
pub(crate) fn remove_listed(folder: &Path) -> Result<bool> {
    if !is_there(folder) {
        return Ok(true);
    }
    // The manifest goes last: if it is there, whatever was killed can be done again.
    let mut files = listed_in(folder)?;
    files.remove(MANIFEST);
    let alone = remove(folder, &files, &|name| name == MANIFEST)?;
    if alone {
        remove_file(&folder.join(MANIFEST))?;
    }
    remove_empty(folder)
}

/// Removes these files from a folder, and folders in it that are empty then. Returns whether nothing else was in it but
/// files to be kept.
pub(super) fn remove(folder: &Path, files: &BTreeSet<String>, keep: &dyn Fn(&str) -> bool) -> Result<bool> {
    let mut alone = true;
    let known: BTreeSet<_> = files.iter().cloned().chain(kept(folder, keep)?).collect();
    walk(folder, &known, &mut |path, entry| {
        match entry {
            Entry::Listed(name, _) if keep(name) => {}
            Entry::Listed(..) => remove_file(path)?,
            Entry::Folder => alone &= remove_empty(path)?,
            Entry::Foreign(_) => alone = false,
        }
        Ok(())
    })?;
    Ok(alone)
}

/// Files in a folder, not in those below it, that are to be kept.
fn kept(folder: &Path, keep: &dyn Fn(&str) -> bool) -> Result<Vec<String>> {
    let names = entries(folder)?.into_iter().filter_map(|entry| entry.file_name().into_string().ok());
    Ok(names.filter(|name| keep(name)).collect())
}

/// The first thing in a folder that is none of these files, in words.
pub(super) fn first_foreign(folder: &Path, files: &BTreeSet<String>) -> Result<Option<String>> {
    let mut first = None;
    walk(folder, files, &mut |_, entry| {
        if let Entry::Foreign(what) = entry {
            first = first.take().or(Some(what));
        }
        Ok(())
    })?;
    Ok(first)
}

/// Goes through a folder, in which these files may be, and follows no link.
fn walk(
    folder: &Path,
    files: &BTreeSet<String>,
    visit: &mut dyn FnMut(&Path, Entry) -> Result<()>,
) -> Result<()> {
    within(folder, "", files, visit)
}

fn within(
    folder: &Path,
    prefix: &str,
    files: &BTreeSet<String>,
    visit: &mut dyn FnMut(&Path, Entry) -> Result<()>,
) -> Result<()> {
    for entry in entries(folder)? {
        let (file_name, path) = (entry.file_name(), entry.path());
        let there = fs::symlink_metadata(&path).map_err(io(&path))?;
        let name = file_name.to_str().map(|name| format!("{prefix}{name}"));
        match name {
            Some(name) if there.is_file() && files.contains(&name) => {
                visit(&path, Entry::Listed(&name, there.len()))?;
            }
            Some(name) if there.is_dir() && has_below(files, &format!("{name}/")) => {
                within(&path, &format!("{name}/"), files, visit)?;
                visit(&path, Entry::Folder)?;
            }
            _ => {
                let name = shown(&format!("{prefix}{}", file_name.to_string_lossy()));
                visit(&path, Entry::Foreign(format!("{} ({name})", kind_of(&there))))?;
            }
        }
    }
    Ok(())
}

fn has_below(files: &BTreeSet<String>, folder: &str) -> bool {
    files.range(folder.to_owned()..).next().is_some_and(|name| name.starts_with(folder))
}

/// A name that does nothing to a terminal.
fn shown(name: &str) -> String {
    name.escape_debug().to_string()
}
