//! A folder that is written: it comes to its place as a whole, and one that is there already stays until then.

use super::disk::{exchange, io, is_there, plain, sync_folder, write_synced};
use super::manifest::{check_replaceable, remove_listed, Manifest, MANIFEST};
use super::partial::Partial;
use candle_quant::{Error, Result};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// Whether a folder can be written at `out`: there is nothing, or it may be replaced.
///
/// # Errors
/// If not.
pub(crate) fn check_folder(out: &Path, overwrite: bool) -> Result<()> {
    if out.file_name().is_none() {
        return Err(Error::file(out, "not the name of a folder to create", "give another output"));
    }
    match fs::symlink_metadata(out) {
        Err(_) => Ok(()),
        Ok(there) if there.is_dir() && !overwrite => {
            let remedy = "replace it (--overwrite), or give another output";
            Err(Error::file(out, "it exists already, and is not overwritten", remedy))
        }
        Ok(_) => check_replaceable(out, out),
    }
}

/// Makes what was built the folder `out`. One that was there is where it was built then, or beside that, for
/// [`recover_folder`] and [`remove_listed`].
///
/// # Errors
/// If there is a folder that may not be replaced, which stays.
pub(crate) fn put_folder(partial: &Partial, out: &Path, overwrite: bool) -> Result<()> {
    let (made, aside) = (partial.model(), partial.replaced());
    check_folder(out, overwrite)?;
    if is_there(out) {
        let old = exchange(out, &made, &aside).map_err(io(out))?;
        // Something may have come into it since it was checked. Nothing more does now.
        if let Err(error) = check_replaceable(old, out) {
            let back = match old == made {
                true => exchange(out, old, &aside).map(drop),
                false => fs::rename(out, &made).and_then(|()| fs::rename(old, out)),
            };
            back.map_err(io(out))?;
            return Err(error);
        }
    } else {
        // Fails if anything but an empty folder has come.
        fs::rename(&made, out).map_err(io(out))?;
    }
    sync_folder(out.parent().unwrap_or(out))
}

/// Ends what was killed between two renames, where a system can't exchange folders: what was the output becomes that
/// again, or is removed if another took its place.
pub(crate) fn recover_folder(partial: &Partial, out: &Path) -> Result<()> {
    let replaced = partial.replaced();
    if !is_there(&replaced) {
        return Ok(());
    }
    match is_there(out) {
        true => remove_listed(&replaced).map(drop),
        false => fs::rename(&replaced, out).map_err(io(out)),
    }
}

/// Writes a folder of these files, by paths with `/` between their parts; `source` is what they were made of.
///
/// # Errors
/// If there is something that may not be replaced, another process writes there, or a file can't be written.
pub(crate) fn write_folder(
    out: &Path,
    source: &str,
    files: &BTreeMap<String, Vec<u8>>,
    overwrite: bool,
) -> Result<()> {
    #[derive(Serialize)]
    struct Journal<'a> {
        files: &'a BTreeSet<String>,
    }
    let out = &plain(out);
    check_folder(out, overwrite)?;
    if let Some(parent) = out.parent() {
        fs::create_dir_all(parent).map_err(io(parent))?;
    }
    let partial = Partial::enter(Partial::of(out))?;
    recover_folder(&partial, out)?;
    check_folder(out, overwrite)?;
    partial.clear(&|_| false)?;
    let names: BTreeSet<_> = files.keys().cloned().chain([MANIFEST.to_owned()]).collect();
    partial.write_journal(&Journal { files: &names })?;
    partial.create_model()?;
    let model = partial.model();
    for (name, bytes) in files {
        let path = model.join(name);
        let folder = path.parent().unwrap_or(&model);
        fs::create_dir_all(folder).map_err(io(folder))?;
        write_synced(&path, bytes)?;
    }
    Manifest::of(&model, (source, ""), &files.keys().cloned().collect(), |_| None)?.write(&model)?;
    sync_folder(&model)?;
    put_folder(&partial, out, overwrite)?;
    remove_listed(&partial.model())?;
    recover_folder(&partial, out)?;
    partial.leave()
}
