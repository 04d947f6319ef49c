//! The files beside the weights of an output.

use super::blobs;
use super::stored_files::stored_files;
use crate::convert::plan::ConvertPlan;
use crate::staging::{write_synced, MANIFEST};
use candle_quant::{Error, Result};
use candle_quant_models::generate::stored_tokenizer;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The file of a tokenizer.
const TOKENIZER: &str = "tokenizer.json";

enum Sidecar {
    Text(String),
    /// A file beside the weights of the source.
    Copy(PathBuf),
    /// What the weights' own file has, if it can be read.
    StoredTokenizer,
}

/// The names of all files that are written for an output.
pub(super) fn file_names(plan: &ConvertPlan) -> Result<BTreeSet<String>> {
    let weights = plan.files.iter().map(|file| file.file.clone());
    let others = [MANIFEST, blobs::MODEL].map(str::to_owned);
    Ok(weights.chain(sidecars(plan)?.into_keys()).chain(others).collect())
}

/// Writes the files beside the weights into a folder.
pub(super) fn write_sidecars(plan: &ConvertPlan, folder: &Path) -> Result<()> {
    for (name, sidecar) in sidecars(plan)? {
        let bytes = match sidecar {
            Sidecar::Text(text) => text.into_bytes(),
            Sidecar::Copy(path) => fs::read(&path).map_err(|error| Error::Io { path, error })?,
            Sidecar::StoredTokenizer => {
                // That there is none that can be read is among the plan's notes.
                let stored = stored_tokenizer(&plan.source).ok().flatten();
                match stored.and_then(|tokenizer| tokenizer.to_string(false).ok()) {
                    Some(text) => text.into_bytes(),
                    None => continue,
                }
            }
        };
        write_synced(&folder.join(name), &bytes)?;
    }
    Ok(())
}

/// Where names meet, the later ones hold.
fn sidecars(plan: &ConvertPlan) -> Result<BTreeMap<String, Sidecar>> {
    let mut files = BTreeMap::from([(TOKENIZER.to_owned(), Sidecar::StoredTokenizer)]);
    let stored = stored_files(plan)?;
    files.extend(stored.into_iter().map(|(name, text)| (name.to_owned(), Sidecar::Text(text))));
    files.extend(plan.config_json()?.map(|config| ("config.json".to_owned(), Sidecar::Text(config))));
    let texts = plan.target.kind().sidecars(&plan.files);
    files.extend(texts.into_iter().map(|(name, text)| (name.to_owned(), Sidecar::Text(text))));
    files.extend(plan.copied_files()?.into_iter().map(|(name, path)| (name, Sidecar::Copy(path))));
    Ok(files)
}
