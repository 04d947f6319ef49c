//! Which files a checkpoint consists of: one file, an index and its shards, or `model*.safetensors`.

use super::json_map::{self, Entries, Text};
use super::opening::{Opening, JSON_VALUE};
use super::tensors::{Tensors, Twice};
use super::{json, open};
use crate::{Error, Result};
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Component, Path, PathBuf};
use std::{fmt, fs, io};

const INDEX: &str = "model.safetensors.index.json";

/// Larger JSON files are refused unread; indices of the largest checkpoints have a few megabytes.
const MAX_JSON_BYTES: u64 = 100_000_000;

/// All tensors of the checkpoint in the directory `dir`.
pub(in crate::checkpoint) fn open_directory(dir: &Path, opening: &Opening) -> Result<Tensors> {
    let path = dir.join(INDEX);
    match read_text(&path, opening)? {
        Some(text) => {
            let index = Index::parse(&path, &text, opening)?;
            drop(text);
            open_index(dir, index, opening)
        }
        None => open_all(&model_files(dir)?, opening),
    }
}

/// Parses a JSON file; `None` if there is none. Python's `NaN` and `Infinity` are strings in it.
pub(in crate::checkpoint) fn read_json<T: serde::de::DeserializeOwned>(
    path: &Path,
    opening: &Opening,
) -> Result<Option<T>> {
    let Some(text) = read_text(path, opening)? else { return Ok(None) };
    // Every value but the first stands behind one of these.
    let values = text.bytes().filter(|byte| matches!(byte, b',' | b'[' | b'{')).count();
    opening.spend_entries(path, values as u64, JSON_VALUE)?;
    serde_json::from_str(&json::with_strings(&text)).map(Some).map_err(|error| malformed(path, &error))
}

/// The text of a JSON file; `None` if there is none.
fn read_text(path: &Path, opening: &Opening) -> Result<Option<String>> {
    let failed = |error| Error::Io { path: path.to_owned(), error };
    let wrong = |problem: String| Error::file(path, problem, JSON_REMEDY);
    let metadata = match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.map_err(failed)?,
    };
    if !metadata.is_file() {
        return Err(wrong("not a regular file".into()));
    }
    if metadata.len() > MAX_JSON_BYTES {
        let problem = format!("{} bytes are too many for a JSON file of a checkpoint", metadata.len());
        return Err(wrong(problem));
    }
    opening.spend_bytes(path, metadata.len())?;
    let mut text = Vec::with_capacity(metadata.len() as usize);
    // No more than it had, should it grow.
    let file = fs::File::open(path).map_err(failed)?;
    file.take(metadata.len()).read_to_end(&mut text).map_err(failed)?;
    String::from_utf8(text).map(Some).map_err(|error| malformed(path, &error))
}

const JSON_REMEDY: &str = "correct it or fetch it again";

fn malformed(path: &Path, error: &dyn fmt::Display) -> Error {
    Error::file(path, format!("malformed JSON: {error}"), JSON_REMEDY)
}

/// Which tensors are in which shard.
struct Index {
    shards: Vec<Box<str>>,
    /// Names of tensors and numbers of shards, by shard and name.
    tensors: Vec<(u32, Box<str>)>,
}

/// The shard of a tensor.
struct Shard<'de>(Text<'de>);

impl<'de> Entries<'de> for Shard<'de> {
    fn value<A: MapAccess<'de>>(_: &str, map: &mut A) -> Result<Self, A::Error> {
        map.next_value().map(Self)
    }
}

impl Index {
    fn parse(path: &Path, text: &str, opening: &Opening) -> Result<Self> {
        let (mut numbers, mut tensors) = (BTreeMap::<Box<str>, u32>::new(), Vec::new());
        let most = opening.entries_left();
        let mut take = |name: &str, Shard(Text(shard)): Shard| {
            let next = numbers.len() as u32;
            let number = match numbers.get(&*shard) {
                Some(number) => *number,
                None => *numbers.entry(Box::from(&*shard)).or_insert(next),
            };
            tensors.push((number, name.into()));
            tensors.len() as u64 <= most
        };
        let text = json::with_strings(text);
        let mut deserializer = serde_json::Deserializer::from_str(&text);
        let parsed = WeightMap(&mut take).deserialize(&mut deserializer).and_then(|()| deserializer.end());
        opening.spend_entries(path, tensors.len() as u64, 1)?;
        parsed.map_err(|error| malformed(path, &error))?;
        let mut names: Vec<&str> = tensors.iter().map(|(_, name): &(u32, Box<str>)| &**name).collect();
        names.sort_unstable();
        if let Some([name, _]) = names.windows(2).find(|pair| pair.first() == pair.last()) {
            return Err(malformed(path, &format!("`{name}` is listed twice")));
        }
        drop(names);
        // By the names of the shards, so that of several errors it is always the same.
        let order: BTreeMap<u32, u32> = numbers.values().copied().zip(0..).collect();
        for (shard, _) in &mut tensors {
            *shard = order.get(shard).copied().unwrap_or_default();
        }
        tensors.sort_unstable();
        Ok(Self { shards: numbers.into_keys().collect(), tensors })
    }
}
/// The member `weight_map` of an index.
struct WeightMap<'f, F>(&'f mut F);

impl<'de, F: FnMut(&str, Shard<'de>) -> bool> DeserializeSeed<'de> for WeightMap<'_, F> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de, F: FnMut(&str, Shard<'de>) -> bool> Visitor<'de> for WeightMap<'_, F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object with a weight_map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut found = false;
        while let Some(Text(key)) = map.next_key()? {
            match (&*key, found) {
                ("weight_map", false) => map.next_value_seed(json_map::seed(&mut *self.0))?,
                ("weight_map", true) => return Err(serde::de::Error::duplicate_field("weight_map")),
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
            found |= key == "weight_map";
        }
        if !found {
            return Err(serde::de::Error::missing_field("weight_map"));
        }
        Ok(())
    }
}

/// The files that an index lists, each beside it; none if there is no index.
pub(in crate::checkpoint) fn shards_of_index(path: &Path, opening: &Opening) -> Result<Vec<String>> {
    let Some(text) = read_text(path, opening)? else { return Ok(vec![]) };
    let dir = path.parent().unwrap_or(Path::new(""));
    let name = |shard: Box<str>| shard_path(dir, &shard).map(|_| shard.into_string());
    Index::parse(path, &text, opening)?.shards.into_iter().map(name).collect()
}

fn open_index(dir: &Path, index: Index, opening: &Opening) -> Result<Tensors> {
    let index_path = dir.join(INDEX);
    if index.tensors.is_empty() {
        let problem = "the weight_map lists no tensors";
        return Err(Error::file(&index_path, problem, "fetch or write the index again"));
    }
    let mut tensors = Vec::with_capacity(index.tensors.len());
    for names in index.tensors.chunk_by(|(a, _), (b, _)| a == b) {
        let Some((number, first)) = names.first() else { continue };
        let shard = index.shards.get(*number as usize).map_or("", |shard| &**shard);
        let path = shard_path(dir, shard)?;
        let stored = match open::open(&path, opening) {
            Err(Error::Io { error, .. }) if error.kind() == io::ErrorKind::NotFound => {
                let problem = format!(
                    "this shard is missing; {} expects {} tensors in it, `{first}` among them",
                    index_path.display(),
                    names.len(),
                );
                return Err(Error::file(&path, problem, "fetch the missing file"));
            }
            other => other?,
        };
        if let Some((_, name)) = names.iter().find(|(_, name)| !stored.contains_key(name)) {
            return Err(Error::tensor(
                &path,
                &**name,
                format!("this tensor, which {} places here", index_path.display()),
                "no such tensor",
                "fetch index and shards again, of one revision; without the index every model*.safetensors is read",
            ));
        }
        let (mut extra, mut count) = (None, 0usize);
        for (name, tensor) in stored {
            match names.binary_search_by(|(_, other)| other.cmp(&name)) {
                Ok(_) => tensors.push((name, tensor)),
                Err(_) => {
                    count += 1;
                    extra.get_or_insert(name);
                }
            }
        }
        if let Some(extra) = extra {
            opening.warnings.add(format!(
                "{}: {count} tensors that {INDEX} does not list are ignored, `{extra}` among them",
                path.display(),
            ));
        }
    }
    Tensors::new(tensors)
        .map_err(|Twice { name, .. }| malformed(&index_path, &format!("`{name}` is listed twice")))
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
pub(in crate::checkpoint) fn open_all(paths: &[PathBuf], opening: &Opening) -> Result<Tensors> {
    if let [path] = paths {
        return open::open(path, opening);
    }
    let mut tensors = Vec::new();
    for path in paths {
        tensors.extend(open::open(path, opening)?);
    }
    Tensors::new(tensors).map_err(|Twice { name, files: [first, second] }| {
        Error::tensor(
            &second,
            name,
            "each tensor in one file",
            format!("the same tensor in {}", first.display()),
            format!("remove the file that does not belong here, or add {INDEX}"),
        )
    })
}
