//! What the commands open: a path, or a name. A model of the Hugging Face hub is fetched first if it is not there yet.

use super::progress::Progress;
use candle_quant::checkpoint::{locate as locate_with, HubEvent, HubName, HubOptions, OpenOptions};
use candle_quant::{Checkpoint, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The checkpoint at a path, or of a name.
pub fn open(path: &Path) -> Result<Checkpoint> {
    open_with(path, OpenOptions::default())
}

/// As [`open`], in another way.
pub fn open_with(path: &Path, options: OpenOptions) -> Result<Checkpoint> {
    Checkpoint::open_with(locate(path)?, options)
}

/// Where the checkpoint of a name is; a path is itself.
pub fn locate(path: &Path) -> Result<PathBuf> {
    with_progress(|options| locate_with(path, options))
}

/// Fetches what is missing of a model, or new.
pub fn pull(name: &HubName) -> Result<PathBuf> {
    with_progress(|options| name.pull(options))
}

fn with_progress<T>(work: impl FnOnce(&HubOptions) -> Result<T>) -> Result<T> {
    let progress = Arc::new(Progress::new("files", false, false));
    let mut options = HubOptions::from_env();
    let told = progress.clone();
    options.progress = Some(Arc::new(move |event: &HubEvent<'_>| match *event {
        HubEvent::Planned { files, bytes } => told.plan(files, bytes),
        HubEvent::Resumed { bytes, .. } => told.skip(0, bytes),
        HubEvent::Advanced { file, bytes } => told.advance(file, bytes),
        HubEvent::Finished { file } => told.finish_one(file),
        _ => {}
    }));
    let result = work(&options);
    progress.finish();
    result
}
