//! A finished model in a store of Ollama: its files become blobs, which a manifest names.

use super::journal::Finished;
use crate::convert::plan::ConvertPlan;
use crate::convert::target::ollama_manifest::{self, ManifestLayer};
use crate::sha256;
use crate::staging::{io, kind_of, sync_folder, write_synced};
use candle_quant::checkpoint::OllamaStore;
use candle_quant::{Error, Result};
use std::fs;
use std::path::Path;

/// The file of what Ollama knows of a model, before it is a blob.
pub(super) const MODEL: &str = "model";

/// Moves the files of a model, which are in `folder`, to the blobs of a store, and returns the manifest that names them.
pub(super) fn into_blobs(
    out: &Path,
    plan: &ConvertPlan,
    folder: &Path,
    finished: &[Finished],
) -> Result<String> {
    let blobs = OllamaStore::create(out)?.blobs();
    let take = |file: &str, sha256: &str| {
        let blob = blobs.join(format!("sha256-{sha256}"));
        // A file that is there has the same bytes, unless it is damaged.
        match fs::symlink_metadata(&blob) {
            Ok(there) if !there.is_file() => {
                let problem = format!("not a file, but {}", kind_of(&there));
                Err(Error::file(&blob, problem, "put the blob itself there, or remove this"))
            }
            _ => fs::rename(folder.join(file), &blob).map_err(io(&blob)),
        }
    };
    let mut layers = Vec::new();
    for file in &plan.files {
        let entry = finished.iter().find(|entry| entry.file.file == file.file);
        let sha256 = entry.map_or("", |entry| entry.file.sha256.as_str());
        take(&file.file, sha256)?;
        layers.push(ManifestLayer::tensor(&file.layer, sha256, file.size));
    }
    let listed = fs::read_dir(folder).and_then(Iterator::collect::<std::io::Result<Vec<_>>>);
    let names =
        listed.map_err(io(folder))?.into_iter().filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<_> = names.collect();
    names.sort();
    let hashed = |name: &str| {
        let path = folder.join(name);
        let size = fs::metadata(&path).map_err(io(&path))?.len();
        Ok::<_, Error>((sha256::of_file(&path).map_err(io(&path))?, size))
    };
    for name in names {
        let (sha256, size) = hashed(&name)?;
        take(&name, &sha256)?;
        layers.push(ManifestLayer::json(&name, &sha256, size));
    }
    let unwritten = |error: serde_json::Error| Error::file(folder, error.to_string(), "report this");
    write_synced(
        &folder.join(MODEL),
        ollama_manifest::model(plan.source.config(), plan.top_format()).map_err(unwritten)?.as_bytes(),
    )?;
    let (sha256, size) = hashed(MODEL)?;
    take(MODEL, &sha256)?;
    sync_folder(&blobs)?;
    ollama_manifest::manifest(&ManifestLayer::config(&sha256, size), &layers).map_err(unwritten)
}
