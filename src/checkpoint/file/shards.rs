//! Which files a checkpoint consists of: one file, an index and its shards, or `model*.safetensors`.

use super::{data::Reads, header::UniqueMap, json, open, stored::StoredTensor, warnings::Warnings};
use crate::{Error, Result};
use std::{
    collections::BTreeMap,
    fs, io,
    path::{Component, Path, PathBuf},
};

const INDEX: &str = "model.safetensors.index.json";

/// Larger JSON files are refused unread; indices of the largest checkpoints have a few megabytes.
const MAX_JSON_BYTES: u64 = 100_000_000;

pub(in crate::checkpoint) type Tensors = BTreeMap<String, StoredTensor>;

/// All tensors of the checkpoint in the directory `dir`.
pub(in crate::checkpoint) fn open_directory(
    dir: &Path,
    reads: Reads,
    warnings: &Warnings,
) -> Result<Tensors> {
    match read_json(&dir.join(INDEX))? {
        Some(index) => open_index(dir, &index, reads, warnings),
        None => open_all(&model_files(dir)?, reads),
    }
}

/// Parses a JSON file; `None` if there is none. Python's `NaN` and `Infinity` are strings in it.
pub(in crate::checkpoint) fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    let failed = |error| Error::Io { path: path.to_owned(), error };
    let malformed = |problem: String| Error::File {
        path: path.to_owned(),
        problem,
        remedy: "correct it or fetch it again".into(),
    };
    let metadata = match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.map_err(failed)?,
    };
    if !metadata.is_file() {
        return Err(malformed("not a regular file".into()));
    }
    if metadata.len() > MAX_JSON_BYTES {
        return Err(malformed(format!(
            "{} bytes are too many for a JSON file of a checkpoint",
            metadata.len()
        )));
    }
    let wrong = |error: &dyn std::fmt::Display| malformed(format!("malformed JSON: {error}"));
    let text = String::from_utf8(fs::read(path).map_err(failed)?).map_err(|error| wrong(&error))?;
    serde_json::from_str(&json::with_strings(&text)).map(Some).map_err(|error| wrong(&error))
}

#[derive(serde::Deserialize)]
struct Index {
    weight_map: UniqueMap<String>,
}

fn open_index(dir: &Path, index: &Index, reads: Reads, warnings: &Warnings) -> Result<Tensors> {
    let index_path = dir.join(INDEX);
    let mut by_shard: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (tensor, shard) in &index.weight_map.entries {
        by_shard.entry(shard).or_default().push(tensor);
    }
    if by_shard.is_empty() {
        return Err(Error::File {
            path: index_path,
            problem: "the weight_map lists no tensors".into(),
            remedy: "fetch or write the index again".into(),
        });
    }
    let mut tensors = Tensors::new();
    for (shard, names) in by_shard {
        let path = shard_path(dir, shard)?;
        let mut stored = match open::open(&path, reads) {
            Err(Error::Io { error, .. }) if error.kind() == io::ErrorKind::NotFound => {
                return Err(Error::File {
                    problem: format!(
                        "this shard is missing; {} expects {} tensors in it, `{}` among them",
                        index_path.display(),
                        names.len(),
                        names.first().copied().unwrap_or_default()
                    ),
                    remedy: "fetch the missing file".into(),
                    path,
                });
            }
            other => other?,
        };
        for name in names {
            let tensor = stored.remove(name).ok_or_else(|| Error::Tensor {
                file: path.as_path().into(),
                tensor: name.to_owned(),
                expected: format!("this tensor, which {} places here", index_path.display()),
                found: "no such tensor".into(),
                remedy: "fetch index and shards again, of one revision; without the index every model*.safetensors is read".into(),
            })?;
            tensors.insert(name.to_owned(), tensor);
        }
        if let Some(extra) = stored.keys().next() {
            warnings.add(format!(
                "{}: {} tensors that {INDEX} does not list are ignored, `{extra}` among them",
                path.display(),
                stored.len()
            ));
        }
    }
    Ok(tensors)
}

/// The path of a shard named by an index. An index is as little trusted as any download: it may name
/// files beside it and no others.
fn shard_path(dir: &Path, shard: &str) -> Result<PathBuf> {
    if is_plain_file_name(shard) {
        return Ok(dir.join(shard));
    }
    Err(Error::File {
        path: dir.join(INDEX),
        problem: format!("the weight_map names the shard {shard:?}, which is not a plain file name"),
        remedy: "fetch or write the index again".into(),
    })
}

/// Whether `name` can only mean a file in the directory that it is joined to.
pub(in crate::checkpoint) fn is_plain_file_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    matches!((components.next(), components.next()), (Some(Component::Normal(only)), None) if only == name)
}

/// The files `model*.safetensors` of a directory, by name.
fn model_files(dir: &Path) -> Result<Vec<PathBuf>> {
    let failed = |error| Error::Io { path: dir.to_owned(), error };
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        if name.to_str().is_some_and(|name| name.starts_with("model") && name.ends_with(".safetensors")) {
            files.push(dir.join(name));
        }
    }
    if files.is_empty() {
        return Err(Error::File {
            path: dir.to_owned(),
            problem: format!("no {INDEX} and no model*.safetensors in this directory"),
            remedy: "give the directory of a checkpoint, or a .safetensors file itself".into(),
        });
    }
    files.sort();
    Ok(files)
}

/// All tensors of several files, each tensor in one file only.
pub(in crate::checkpoint) fn open_all(paths: &[PathBuf], reads: Reads) -> Result<Tensors> {
    let mut tensors = Tensors::new();
    for path in paths {
        for (name, tensor) in open::open(path, reads)? {
            if let Some(first) = tensors.get(&name) {
                return Err(Error::Tensor {
                    file: path.as_path().into(),
                    tensor: name,
                    expected: "each tensor in one file".into(),
                    found: format!("the same tensor in {}", first.path().display()),
                    remedy: format!("remove the file that does not belong here, or add {INDEX}"),
                });
            }
            tensors.insert(name, tensor);
        }
    }
    Ok(tensors)
}
