//! Writing into the cache: links of snapshots, and the commits of branches. Whatever is there is whole.

use super::cache::{Commit, Folder};
use crate::{Error, Result};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

impl Folder {
    pub fn blob(&self, etag: &str) -> PathBuf {
        self.dir.join("blobs").join(etag)
    }

    /// Whether a snapshot has a file.
    pub fn has(&self, commit: &Commit, file: &str) -> bool {
        self.pointer(commit, file).is_file()
    }

    fn pointer(&self, commit: &Commit, file: &str) -> PathBuf {
        file.split('/').fold(self.snapshot(commit), |path, part| path.join(part))
    }

    /// Puts a blob into a snapshot under the name of its file.
    pub fn link(&self, commit: &Commit, file: &str, etag: &str) -> Result<()> {
        self.link_by(commit, file, etag, symlink)
    }

    fn link_by(
        &self,
        commit: &Commit,
        file: &str,
        etag: &str,
        symlink: fn(&Path, &Path) -> io::Result<()>,
    ) -> Result<()> {
        let (pointer, blob) = (self.pointer(commit, file), self.blob(etag));
        let failed = |error| Error::Io { path: pointer.clone(), error };
        if let Some(dir) = pointer.parent() {
            fs::create_dir_all(dir).map_err(failed)?;
        }
        if pointer.is_file() {
            return Ok(());
        }
        // A link to a blob that is gone.
        if fs::symlink_metadata(&pointer).is_ok() {
            fs::remove_file(&pointer).map_err(failed)?;
        }
        // Relative, so that the cache can be moved.
        let up = "../".repeat(2 + file.matches('/').count());
        let linked = symlink(Path::new(&format!("{up}blobs/{etag}")), &pointer)
            .or_else(|_| fs::hard_link(&blob, &pointer))
            .or_else(|_| fs::rename(&blob, &pointer));
        match linked {
            // Somebody else was faster.
            Err(_) if pointer.is_file() => Ok(()),
            linked => linked.map_err(failed),
        }
    }

    /// Notes the commit of a branch or a tag.
    pub fn set_commit(&self, revision: &str, commit: &Commit) -> Result<()> {
        if self.commit(revision).is_ok_and(|known| known.as_ref() == Some(commit)) {
            return Ok(());
        }
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let path = self.dir.join("refs").join(revision);
        let failed = |error| Error::Io { path: path.clone(), error };
        // Not below `refs`, where it would be a branch.
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let written = self.dir.join(format!("commit-{}-{number}.tmp", std::process::id()));
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir).map_err(failed)?;
        }
        fs::write(&written, commit.as_str()).and_then(|()| fs::rename(&written, &path)).map_err(failed)
    }
}

#[cfg(unix)]
fn symlink(target: &Path, link: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

#[cfg(windows)]
fn symlink(target: &Path, link: &Path) -> io::Result<()> {
    std::os::windows::fs::symlink_file(target, link)
}

#[cfg(not(any(unix, windows)))]
fn symlink(_: &Path, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_symbolic_links_files_are_in_their_places() {
        let dir = tempfile::tempdir().unwrap();
        let folder = Folder { dir: dir.path().join("models--a--b"), locks: dir.path().join("locks") };
        let commit = Commit::parse(&"0123456789".repeat(4)).unwrap();
        fs::create_dir_all(folder.dir.join("blobs")).unwrap();
        fs::write(folder.blob("e"), "content").unwrap();
        let none = |_: &Path, _: &Path| Err(io::ErrorKind::Unsupported.into());
        for file in ["f", "sub/g"] {
            folder.link_by(&commit, file, "e", none).unwrap();
            let path = folder.snapshot(&commit).join(file);
            assert!(!path.is_symlink() && fs::read(path).unwrap() == b"content", "{file}");
        }
        folder.set_commit("refs/pr/1", &commit).unwrap();
        assert_eq!(folder.commit("refs/pr/1").unwrap(), Some(commit));
        assert_eq!(fs::read_dir(folder.dir.join("refs/refs/pr")).unwrap().count(), 1);
    }
}
