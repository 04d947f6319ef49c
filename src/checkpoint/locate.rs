//! What a path or a name leads to: what is there, a model of an Ollama store, or one of the Hugging Face hub.

use super::file::Opening;
use super::hub::{self, HubCache, HubOptions, Unknown};
use super::{ollama, uqff, HubName, OllamaName};
use crate::{Error, Result};
use std::path::{Path, PathBuf};
use std::{fs, io};

/// What [`Checkpoint::open`](super::Checkpoint::open) would open, as a path, or as a name if it is one of an Ollama store.
/// A model of the hub that is not in its cache is fetched, with the feature `hub`.
///
/// # Errors
/// If there is nothing of this name, or if it can't be fetched.
pub fn locate(path: impl AsRef<Path>, options: &HubOptions) -> Result<PathBuf> {
    find(path.as_ref(), || options.clone(), &Opening::default())
}

/// As [`locate`]; the options are only made if they are needed.
pub(super) fn find(path: &Path, options: impl FnOnce() -> HubOptions, opening: &Opening) -> Result<PathBuf> {
    let absent = match fs::metadata(path) {
        Ok(_) => return Ok(path.to_owned()),
        Err(error) => error,
    };
    // A name of shards, without their numbers.
    if uqff::find(path, opening)?.is_some() {
        return Ok(path.to_owned());
    }
    let io_error = |problem: String| {
        let error = io::Error::new(absent.kind(), problem);
        Err(Error::Io { path: path.to_owned(), error })
    };
    let Some(text) = path.to_str() else { return io_error(absent.to_string()) };
    let mut problem = absent.to_string();
    let ollama_name = OllamaName::parse(text);
    if let Some(name) = &ollama_name {
        if ollama::find(name)?.is_some() {
            return Ok(path.to_owned());
        }
        let roots: Vec<_> = ollama::default_roots().iter().map(|root| root.display().to_string()).collect();
        problem = format!("{problem}, no model `{name}` in an Ollama store ({})", roots.join(", "));
    }
    let name = match HubName::parse(text) {
        Ok(name) if hub::has_host(text) || !is_file_name(text) => name,
        Err(error) if hub::has_host(text) => return Err(error),
        // It was meant as a path.
        _ if ollama_name.is_none() => return io_error(problem),
        _ => {
            return io_error(format!(
                "{problem}, and names of the Hugging Face hub are org/model{}",
                similar(text, options)
            ))
        }
    };
    let options = options();
    name.find_or_pull(&options)?.map_err(|Unknown { problem: unknown, remedy }| {
        // Who names the hub has meant nothing else.
        let elsewhere = if hub::has_host(text) { String::new() } else { format!("{problem}, ") };
        let cache = options.cache.display();
        Error::hub(text, format!("{elsewhere}not in the cache of the hub ({cache}), and {unknown}"), remedy)
    })
}

/// Whether a text ends as the names of files do that are opened, and those of repositories don't.
fn is_file_name(text: &str) -> bool {
    [".safetensors", ".gguf", ".uqff", ".slm"].iter().any(|end| text.ends_with(end))
}

/// What may have been meant by a name without its first part.
fn similar(text: &str, options: impl FnOnce() -> HubOptions) -> String {
    let model = text.split(':').next().unwrap_or(text);
    match HubCache::at(options().cache).similar(model).as_slice() {
        [] => String::new(),
        names => format!(": is {} meant?", names.join(" or ")),
    }
}
