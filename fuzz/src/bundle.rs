//! Files as one string of bytes.

use std::fs;
use std::io;
use std::path::{Component, Path};

/// The files of a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bundle {
    /// What is opened: a path relative to the files' directory, empty for the directory itself.
    pub open: String,
    /// Relative paths and contents.
    pub files: Vec<(String, Vec<u8>)>,
}

impl Bundle {
    /// Each part as its length and its bytes: what is opened, then names and contents in turn.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut add = |part: &[u8]| {
            bytes.extend_from_slice(&(part.len() as u32).to_le_bytes());
            bytes.extend_from_slice(part);
        };
        add(self.open.as_bytes());
        for (name, content) in &self.files {
            add(name.as_bytes());
            add(content);
        }
        bytes
    }

    /// The last part may be shorter than its length says. `None` if a path is none inside a directory.
    pub fn decode(mut bytes: &[u8]) -> Option<Self> {
        let mut part = || {
            let (length, rest) = bytes.split_first_chunk::<4>()?;
            let (part, rest) = rest.split_at((u32::from_le_bytes(*length) as usize).min(rest.len()));
            bytes = rest;
            Some(part)
        };
        let path = |bytes: &[u8]| {
            let path = String::from_utf8(bytes.to_vec()).ok()?;
            let inside = |component| matches!(component, Component::Normal(_));
            (path.len() < 200 && Path::new(&path).components().all(inside)).then_some(path)
        };
        let mut bundle = Self { open: path(part()?)?, files: Vec::new() };
        while let (Some(name), Some(content)) = (part(), part()) {
            bundle.files.push((path(name)?, content.to_vec()));
        }
        Some(bundle)
    }

    /// Writes the files. Those whose names can't be are left out.
    pub fn write(&self, directory: &Path) -> io::Result<()> {
        for (name, content) in &self.files {
            let path = directory.join(name);
            if let Some(parent) = path.parent() {
                let _ = fs::create_dir_all(parent);
            }
            let _ = fs::write(path, content);
        }
        Ok(())
    }

    /// All files below a directory of which `take` wants to have the relative path.
    pub fn read(directory: &Path, open: &str, take: impl Fn(&str) -> bool) -> io::Result<Self> {
        let mut bundle = Self { open: open.to_owned(), files: Vec::new() };
        let mut directories = vec![directory.to_owned()];
        while let Some(next) = directories.pop() {
            for entry in fs::read_dir(next)? {
                let path = entry?.path();
                if path.is_dir() {
                    directories.push(path);
                    continue;
                }
                let name = path.strip_prefix(directory).ok().and_then(Path::to_str);
                if let Some(name) = name.filter(|name| take(name)) {
                    bundle.files.push((name.to_owned(), fs::read(&path)?));
                }
            }
        }
        bundle.files.sort();
        Ok(bundle)
    }
}
