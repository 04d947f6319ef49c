//! The cache of the hub on disk, as Python's huggingface_hub lays it out.
//!
//! ```text
//! models--org--model/
//!   refs/main                       the commit of a branch or a tag
//!   blobs/<etag>                    files by their SHA-256, or their hash in git
//!   snapshots/<commit>/config.json  links to blobs; where there are no links, the files themselves
//! .locks/models--org--model/<etag>.lock
//! ```

use super::name::Name;
use super::selection::{all, select, Selection, INDEX};
use crate::checkpoint::file::{names_in, shards_of_index, Opening};
use crate::{Error, Result};
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Folders below a snapshot, and parts of the names of branches, that are looked into.
const DEPTH: usize = 4;

/// The cache of the hub on disk.
#[derive(Clone, Debug)]
pub struct HubCache {
    root: PathBuf,
}

/// A model in the cache, complete.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CachedModel {
    /// By which it is found; with a choice if it is one of several GGUF or UQFF models.
    pub name: Name,
    /// What is opened: a folder, or a file.
    pub path: PathBuf,
}

/// The hash of a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Commit(String);

impl Commit {
    /// `None` if it is none: 40 hexadecimal digits.
    pub fn parse(text: &str) -> Option<Self> {
        let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        (text.len() == 40 && text.bytes().all(is_digit)).then(|| Self(text.to_owned()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// What one repository has in the cache.
pub(super) struct Folder {
    pub dir: PathBuf,
    #[cfg(feature = "hub")]
    pub locks: PathBuf,
}

impl HubCache {
    /// The cache in this folder, be it there or not.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    pub(super) fn folder(&self, name: &Name) -> Folder {
        Folder {
            dir: self.root.join(name.folder()),
            #[cfg(feature = "hub")]
            locks: self.root.join(".locks").join(name.folder()),
        }
    }

    /// Where the model of this name is in the cache; `None` if it is not there, or not completely.
    ///
    /// # Errors
    /// If there are several that the name may mean, or if files can't be read.
    pub fn find(&self, name: &Name) -> Result<Option<PathBuf>> {
        let folder = self.folder(name);
        let Some(commit) = folder.commit(name.revision())? else { return Ok(None) };
        let files = folder.files(&commit)?;
        match select(&files, name.choice()) {
            // Python may have fetched the weights alone.
            Ok(selection) if selection.opens.is_none() && !files.iter().any(|file| file == "config.json") => {
                Ok(None)
            }
            Ok(selection) => folder.place(&commit, &files, &selection),
            // Of several here none was chosen, and no other is meant.
            Err(unfit) if name.choice().is_none() && unfit.is_ambiguous => {
                Err(Error::hub(name, unfit.problem, unfit.remedy))
            }
            Err(_) => Ok(None),
        }
    }

    /// All models that are completely in the cache, by name.
    pub fn models(&self) -> Result<Vec<CachedModel>> {
        let mut models = Vec::new();
        for folder in names_in(&self.root)? {
            let repo = folder.strip_prefix("models--").and_then(|repo| repo.split_once("--"));
            if let Some(name) = repo.and_then(|(org, model)| Name::of_repo(org, model)) {
                models.extend(self.models_of(&name)?);
            }
        }
        models.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(models)
    }

    fn models_of(&self, name: &Name) -> Result<Vec<CachedModel>> {
        let folder = self.folder(name);
        let mut refs: Vec<(String, String)> = Vec::new();
        for name in folder.walk(&folder.dir.join("refs"))? {
            // One that is damaged is told to whoever opens it.
            if let Ok(Some(commit)) = folder.commit(&name) {
                refs.push((commit.0, name));
            }
        }
        let mut models = Vec::new();
        for commit in names_in(&folder.dir.join("snapshots"))?.iter().filter_map(|name| Commit::parse(name)) {
            // As a user would name it.
            let of = |(of, _): &&(String, String)| *of == commit.0;
            let revision =
                refs.iter().filter(of).map(|(_, name)| name).min_by_key(|name| (*name != "main", *name));
            let name = name.at(revision.unwrap_or(&commit.0));
            let files = folder.files(&commit)?;
            for choice in all(&files) {
                let name = match &choice {
                    Some(choice) => name.choose(choice),
                    None => Ok(name.clone()),
                };
                // Safetensors, not the only one of other models, which has a choice.
                let selection = select(&files, choice.as_deref());
                let selection =
                    selection.ok().filter(|selection| choice.is_some() || selection.opens.is_none());
                if let (Ok(name), Some(selection)) = (name, selection) {
                    let path = folder.place(&commit, &files, &selection);
                    models.extend(path.ok().flatten().map(|path| CachedModel { name, path }));
                }
            }
        }
        Ok(models)
    }

    /// Repositories with the second part of a name, which was written without the first.
    pub(in crate::checkpoint) fn similar(&self, model: &str) -> Vec<String> {
        let names = names_in(&self.root).unwrap_or_default();
        let repos = names.iter().filter_map(|folder| folder.strip_prefix("models--")?.split_once("--"));
        let names = repos.filter_map(|(org, model)| Name::of_repo(org, model));
        names.filter(|name| name.model().eq_ignore_ascii_case(model)).map(|name| name.repo()).collect()
    }
}

impl Folder {
    /// The commit that a revision is; `None` if nothing is known of it.
    pub fn commit(&self, revision: &str) -> Result<Option<Commit>> {
        if let Some(commit) = Commit::parse(revision) {
            return Ok(Some(commit));
        }
        let path = self.dir.join("refs").join(revision);
        let failed = |error| Error::Io { path: path.clone(), error };
        match fs::metadata(&path) {
            Ok(metadata) if metadata.is_file() => {}
            Ok(_) => return Ok(None),
            Err(error) if is_absent(&error) => return Ok(None),
            Err(error) => return Err(failed(error)),
        }
        let mut text = String::new();
        let file = fs::File::open(&path).map_err(failed)?;
        match file.take(100).read_to_string(&mut text) {
            Err(error) if error.kind() != io::ErrorKind::InvalidData => Err(failed(error)),
            _ => match Commit::parse(text.trim()) {
                Some(commit) => Ok(Some(commit)),
                None => Err(Error::file(
                    &path,
                    "no commit is written there",
                    "remove it, and fetch the model again",
                )),
            },
        }
    }

    pub fn snapshot(&self, commit: &Commit) -> PathBuf {
        self.dir.join("snapshots").join(commit.as_str())
    }

    /// The names of the files of a snapshot. Links to blobs that are not there are none.
    fn files(&self, commit: &Commit) -> Result<Vec<String>> {
        self.walk(&self.snapshot(commit))
    }

    /// The names of all files below a folder, parted by slashes.
    fn walk(&self, root: &Path) -> Result<Vec<String>> {
        let (mut files, mut folders) = (Vec::new(), vec![String::new()]);
        for _ in 0..DEPTH {
            for folder in std::mem::take(&mut folders) {
                for name in names_in(&root.join(&folder))? {
                    let name = if folder.is_empty() { name } else { format!("{folder}/{name}") };
                    match fs::metadata(root.join(&name)) {
                        Ok(metadata) if metadata.is_dir() => folders.push(name),
                        Ok(metadata) if metadata.is_file() => files.push(name),
                        _ => {}
                    }
                }
            }
        }
        files.sort();
        Ok(files)
    }

    /// What is opened of these files; `None` if one of them is not there.
    fn place(&self, commit: &Commit, files: &[String], selection: &Selection) -> Result<Option<PathBuf>> {
        let snapshot = self.snapshot(commit);
        if selection.has_index {
            let shards = shards_of_index(&snapshot.join(INDEX), &Opening::default())?;
            if !shards.iter().all(|shard| files.contains(shard)) {
                return Ok(None);
            }
        }
        Ok(Some(selection.place(&snapshot)))
    }
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}
