//! The tensors of a checkpoint, read as the model of its config knows them.

use crate::sha256;
use candle_quant::checkpoint::{module_of, Checkpoint, Weight};
use candle_quant::{Error, Result};
use candle_quant_models::Config;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::UNIX_EPOCH;

/// A checkpoint, and the model that its config describes, if it describes one that is known.
pub(crate) struct Source<'c> {
    pub checkpoint: &'c Checkpoint,
    model: Option<Config>,
}

impl<'c> Source<'c> {
    pub(crate) fn new(checkpoint: &'c Checkpoint) -> Self {
        Self::with_model(checkpoint, Config::from_json(checkpoint.config()).ok())
    }

    /// A checkpoint of a model that the caller has read from its config.
    pub(crate) fn with_model(checkpoint: &'c Checkpoint, model: Option<Config>) -> Self {
        Self { checkpoint, model }
    }

    /// Whether the model has layers of linear attention.
    pub(crate) fn has_linear_attention(&self) -> bool {
        self.model.as_ref().is_some_and(|model| model.linear.is_some())
    }

    /// K of a tensor, as the model knows it.
    pub(crate) fn in_features(&self, tensor: &str) -> Option<usize> {
        self.model.as_ref()?.in_features(module_of(tensor).unwrap_or(tensor))
    }

    /// A tensor, with the K that the model knows.
    pub(crate) fn tensor(&self, name: &str) -> Result<Weight> {
        self.checkpoint.tensor(name, self.in_features(name))
    }
}

/// For every file of weights its size and the time of its last change.
fn states_of_files(source: &Checkpoint) -> Result<BTreeMap<String, (u64, u128)>> {
    let state = |path: &Path| {
        let metadata = fs::metadata(path)?;
        let changed = metadata.modified()?.duration_since(UNIX_EPOCH).unwrap_or_default();
        // JSON has no bytes: of a path that is no Unicode, what is none is left out.
        let path = fs::canonicalize(path)?.to_string_lossy().into_owned();
        Ok((path, (metadata.len(), changed.as_nanos())))
    };
    let files = source.weight_files().into_iter();
    files.map(|path| state(&path).map_err(|error| Error::Io { path, error })).collect()
}

/// The SHA-256 of names, sizes and times of the files of weights.
pub(crate) fn fingerprint(source: &Checkpoint) -> Result<String> {
    let files = format!("{:?}", states_of_files(source)?);
    Ok(sha256::of_bytes(files))
}
