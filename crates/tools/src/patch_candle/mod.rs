//! A candle-nn whose layers know of packed weights, made from the one in cargo's own registry.
//!
//! Crates that depend on candle-nn, such as candle-transformers, then run on packed weights as they are:
//!
//! ```toml
//! [patch.crates-io]
//! candle-nn = { path = "candle-nn" }
//! ```
//!
//! No source of candle is part of this crate: it changes some lines of a file whose SHA-256 it knows, and refuses any
//! other.

mod edits;

use crate::sha256;
use crate::staging::write_folder;
use candle_quant::{Error, Result};
use edits::EDITS;
use flate2::read::GzDecoder;
use std::{
    borrow::Cow,
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read},
    path::{Component, Path, PathBuf},
};
use tar::Archive;

/// The version of candle-nn that can be patched.
pub const VERSION: &str = "0.11.1";

/// The SHA-256 of its package, as every `Cargo.lock` that has it says.
pub const CHECKSUM: &str = "437fabe77547c2447c7bdf3cc946e19db29a2832440176b419f77c80b0a9a05e";

/// The largest file that a package is believed to hold.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// The package of candle-nn that cargo has downloaded, below `cargo_home`.
///
/// # Errors
/// If there is none.
pub fn downloaded_package(cargo_home: &Path) -> Result<PathBuf> {
    let cache = cargo_home.join("registry/cache");
    let name = format!("candle-nn-{VERSION}.crate");
    let registries = fs::read_dir(&cache).into_iter().flatten().flatten();
    let found = registries.map(|registry| registry.path().join(&name)).find(|package| package.is_file());
    found.ok_or_else(|| {
        let problem = format!("no registry in it has {name}");
        Error::file(
            &cache,
            problem,
            format!("run `cargo fetch` in a project that depends on candle-nn {VERSION}"),
        )
    })
}

/// Unpacks the package `package` of candle-nn into the folder `dir`, patched. A folder that this has written earlier is
/// replaced if `overwrite` says so.
///
/// # Errors
/// If the package is of another crate or version, or not the one that [`CHECKSUM`] belongs to; if `dir` exists and may not be
/// replaced, or a file can't be read or written.
pub fn patch_candle(package: &Path, dir: &Path, overwrite: bool) -> Result<()> {
    let expected = format!("candle-nn-{VERSION}");
    let name = name_in(package)?;
    if name != expected {
        let problem = format!("it holds {name}, expected {expected}");
        return Err(Error::file(package, problem, "only this version can be patched"));
    }
    let found = sha256::of_file(package).map_err(|error| failed(package, error))?;
    if found != CHECKSUM {
        let problem = format!("its SHA-256 is {found}, that of {expected} is {CHECKSUM}");
        return Err(Error::file(package, problem, "delete it and run `cargo fetch`"));
    }
    let mut files = unpack(package)?;
    patch(package, &mut files)?;
    write_folder(dir, &format!("candle-nn {VERSION}"), &files, overwrite)
}

/// The folder in which all files of a package lie: name and version of the crate.
fn name_in(package: &Path) -> Result<String> {
    let in_package = |error| failed(package, error);
    let mut archive = archive(package)?;
    let first = archive.entries().map_err(in_package)?.next().transpose().map_err(in_package)?;
    let path = first.map(|entry| entry.path().map(Cow::into_owned)).transpose().map_err(in_package)?;
    let folder = path.as_deref().and_then(|path| path.components().next());
    Ok(folder
        .map_or("nothing".into(), |folder| folder.as_os_str().to_string_lossy().escape_debug().to_string()))
}

fn archive(package: &Path) -> Result<Archive<GzDecoder<File>>> {
    let file = File::open(package).map_err(|error| failed(package, error))?;
    Ok(Archive::new(GzDecoder::new(file)))
}

/// What a build needs, by paths: the manifest, the sources and the licences.
fn unpack(package: &Path) -> Result<BTreeMap<String, Vec<u8>>> {
    let in_package = |error| failed(package, error);
    let mut archive = archive(package)?;
    let mut files = BTreeMap::new();
    for entry in archive.entries().map_err(in_package)? {
        let entry = entry.map_err(in_package)?;
        let path = entry.path().map_err(in_package)?.into_owned();
        // All lie in one folder, named after the crate.
        let part = |part| match part {
            Component::Normal(part) => part.to_str(),
            _ => None,
        };
        let Some(parts) = path.components().skip(1).map(part).collect::<Option<Vec<_>>>() else { continue };
        let is_needed = matches!(parts.as_slice(), [_] | ["src", ..]);
        if !(is_needed && entry.header().entry_type().is_file()) {
            continue;
        }
        let mut bytes = Vec::new();
        entry.take(MAX_FILE_BYTES).read_to_end(&mut bytes).map_err(in_package)?;
        files.insert(parts.join("/"), bytes);
    }
    Ok(files)
}

fn patch(package: &Path, files: &mut BTreeMap<String, Vec<u8>>) -> Result<()> {
    for edit in EDITS {
        let path = package.join(edit.file);
        let missing = || failed(&path, io::ErrorKind::NotFound.into());
        let bytes = files.get_mut(edit.file).ok_or_else(missing)?;
        let text = std::str::from_utf8(bytes).map_err(|error| failed(&path, io::Error::other(error)))?;
        *bytes = edit.apply(&path, text)?.into_bytes();
    }
    Ok(())
}

fn failed(path: &Path, error: io::Error) -> Error {
    Error::Io { path: path.to_owned(), error }
}
