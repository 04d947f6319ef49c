//! Where Ollama keeps models: manifests by name, and blobs by the SHA-256 of their content.

use super::name::Name;
use crate::{Error, Result};
use std::{
    env,
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
};

const MANIFESTS: &str = "manifests";
const BLOBS: &str = "blobs";

/// The store that a server installed as a Linux service keeps.
#[cfg(target_os = "linux")]
const SERVICE_STORE: Option<&str> = Some("/usr/share/ollama/.ollama/models");
#[cfg(not(target_os = "linux"))]
const SERVICE_STORE: Option<&str> = None;

/// A store on disk.
pub struct Store {
    /// Without links, so that what lies in it is found by comparing paths.
    root: PathBuf,
}

/// The manifest of one model.
pub(in crate::checkpoint) struct ManifestFile {
    pub store: Store,
    pub name: Name,
    pub path: PathBuf,
}

/// The directories in which names are looked up, in this order: that of `OLLAMA_MODELS`, or else the user's
/// and that of the service.
pub(in crate::checkpoint) fn default_roots() -> Vec<PathBuf> {
    match env::var_os("OLLAMA_MODELS").filter(|root| !root.is_empty()) {
        Some(root) => vec![root.into()],
        None => {
            let home = env::home_dir().map(|home| home.join(".ollama").join("models"));
            home.into_iter().chain(SERVICE_STORE.map(PathBuf::from)).collect()
        }
    }
}

impl Store {
    /// The stores in which names are looked up, as far as they are there: that of `OLLAMA_MODELS`, or else the user's and
    /// that of the Linux service.
    pub fn usual() -> Result<Vec<Self>> {
        default_roots().iter().filter_map(|root| Self::at(root).transpose()).collect()
    }

    /// The store in the directory `root`; `None` if there is none.
    pub fn at(root: &Path) -> Result<Option<Self>> {
        if !root.join(MANIFESTS).is_dir() || !root.join(BLOBS).is_dir() {
            return Ok(None);
        }
        let root = root.canonicalize().map_err(|error| Error::Io { path: root.to_owned(), error })?;
        Ok(Some(Self { root }))
    }

    /// The manifest that the file `path` is, by its place in a store: `manifests/host/namespace/model/tag`.
    pub(super) fn manifest_at(path: &Path) -> Result<Option<ManifestFile>> {
        let (Ok(dir), Some(tag)) =
            (path.parent().map_or(Ok(PathBuf::new()), canonicalize_dir), path.file_name())
        else {
            return Ok(None);
        };
        let path = dir.join(tag);
        let mut ancestors = path.ancestors();
        let mut part = || ancestors.next()?.file_name()?.to_str();
        let (Some(tag), Some(model), Some(namespace), Some(host)) = (part(), part(), part(), part()) else {
            return Ok(None);
        };
        if part() != Some(MANIFESTS) {
            return Ok(None);
        }
        let (Some(name), Some(root)) = (Name::new([host, namespace, model, tag]), ancestors.next()) else {
            return Ok(None);
        };
        let Some(store) = Self::at(root)? else {
            return Ok(None);
        };
        let path = store.contained(&path)?;
        Ok(Some(ManifestFile { store, name, path }))
    }

    /// The manifest of a model; `None` if there is none of this name. Upper and lower case are the same.
    pub(super) fn find(self, name: &Name) -> Result<Option<ManifestFile>> {
        let Some(path) = self.manifest(name)? else {
            return Ok(None);
        };
        let path = self.contained(&path)?;
        Ok(Some(ManifestFile { store: self, name: name.clone(), path }))
    }

    /// Where the manifest of a model lies in the store, perhaps as a link; `None` if there is none of this name.
    pub fn manifest(&self, name: &Name) -> Result<Option<PathBuf>> {
        let mut path = self.root.join(MANIFESTS);
        for part in name.parts() {
            match entry_of(&path, part)? {
                Some(entry) => path = entry,
                None => return Ok(None),
            }
        }
        Ok(Some(path))
    }

    /// The store in the directory `root`, which is made if it is not there.
    pub fn create(root: &Path) -> Result<Self> {
        for folder in [MANIFESTS, BLOBS].map(|folder| root.join(folder)) {
            fs::create_dir_all(&folder).map_err(|error| Error::Io { path: folder, error })?;
        }
        let store = Self::at(root)?.ok_or_else(|| {
            Error::file(
                root,
                "not an Ollama store",
                "give a folder that is one, or is empty, or is not there",
            )
        })?;
        store.contained(&store.root.join(BLOBS))?;
        Ok(store)
    }

    /// Where the manifest of a model is to lie: at that of this name, if there is one. The folders on the way are made;
    /// none of them leads out of the store.
    pub fn make_place(&self, name: &Name) -> Result<PathBuf> {
        let mut path = self.contained(&self.root.join(MANIFESTS))?;
        let [folders @ .., tag] = name.parts();
        for part in folders {
            path = match entry_of(&path, part)? {
                Some(entry) => entry,
                None => {
                    let folder = path.join(part);
                    fs::create_dir(&folder).map_err(|error| Error::Io { path: folder.clone(), error })?;
                    folder
                }
            };
            self.contained(&path)?;
        }
        Ok(entry_of(&path, tag)?.unwrap_or_else(|| path.join(tag)))
    }

    /// Where the blobs are.
    pub fn blobs(&self) -> PathBuf {
        self.root.join(BLOBS)
    }

    /// All models, sorted by name. Files that are no manifests by their place are passed over.
    pub fn models(&self) -> Result<Vec<Name>> {
        let mut paths = vec![(self.root.join(MANIFESTS), Vec::new())];
        for _ in 0..4 {
            let mut below = Vec::new();
            for (dir, parts) in paths.into_iter().filter(|(dir, _)| dir.is_dir()) {
                for entry in entries(&dir)? {
                    let mut parts: Vec<OsString> = parts.clone();
                    parts.push(entry.clone());
                    below.push((dir.join(entry), parts));
                }
            }
            paths = below;
        }
        let name_of = |(path, parts): (PathBuf, Vec<OsString>)| {
            let parts: Vec<_> = parts.iter().filter_map(|part| part.to_str()).collect();
            Name::new(parts.try_into().ok()?).filter(|_| path.is_file())
        };
        let mut names: Vec<_> = paths.into_iter().filter_map(name_of).collect();
        names.sort();
        Ok(names)
    }

    /// The file of a blob, under its name of today or that of the first versions.
    ///
    /// # Errors
    /// If there is none, or if it is a link out of the store.
    pub(super) fn blob(&self, digest: &BlobDigest) -> Result<PathBuf> {
        let blobs = self.root.join(BLOBS);
        let today = blobs.join(format!("sha256-{}", digest.hex()));
        let first = blobs.join(format!("sha256:{}", digest.hex()));
        self.contained(if !today.exists() && first.exists() { &first } else { &today })
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// The path without links, which has to be in the store: manifests come from anywhere, and what a link
    /// leads to was not put there by Ollama.
    fn contained(&self, path: &Path) -> Result<PathBuf> {
        let real = path.canonicalize().map_err(|error| Error::Io { path: path.to_owned(), error })?;
        if real.starts_with(&self.root) {
            return Ok(real);
        }
        Err(Error::file(
            path,
            format!("a link that leads out of the store {}, to {}", self.root.display(), real.display()),
            "put the file itself there",
        ))
    }
}

/// The SHA-256 of a blob, as text that is safe in a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BlobDigest(String);

impl BlobDigest {
    /// `sha256:` or `sha256-` and 64 hexadecimal digits; `None` for anything else.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let hex = text.strip_prefix("sha256")?.strip_prefix([':', '-'])?;
        (hex.len() == 64 && hex.bytes().all(|byte| byte.is_ascii_hexdigit())).then(|| Self(hex.to_owned()))
    }

    pub(super) fn hex(&self) -> &str {
        &self.0
    }
}

/// The real path of a directory, of the working directory if the path is empty.
fn canonicalize_dir(dir: &Path) -> io::Result<PathBuf> {
    if dir.as_os_str().is_empty() {
        Path::new(".").canonicalize()
    } else {
        dir.canonicalize()
    }
}

/// What is called `name` in a directory. Upper and lower case are the same.
fn entry_of(dir: &Path, name: &str) -> Result<Option<PathBuf>> {
    let exact = dir.join(name);
    if exact.exists() {
        return Ok(Some(exact));
    }
    let same = |entry: &OsString| entry.to_str().is_some_and(|entry| entry.eq_ignore_ascii_case(name));
    Ok(entries(dir)?.into_iter().find(same).map(|entry| dir.join(entry)))
}

/// What is in a directory, sorted.
fn entries(dir: &Path) -> Result<Vec<OsString>> {
    let failed = |error| Error::Io { path: dir.to_owned(), error };
    let entries = fs::read_dir(dir).map_err(failed)?.map(|entry| entry.map(|entry| entry.file_name()));
    let mut entries: Vec<_> = entries.collect::<io::Result<_>>().map_err(failed)?;
    entries.sort();
    Ok(entries)
}
