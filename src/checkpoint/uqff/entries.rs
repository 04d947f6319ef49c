//! The entries of the files of a model, by name.

use crate::checkpoint::file::{self, Opening, StoredTensor, Tensors, Values};
use crate::{Error, Result};
use std::collections::btree_map::Entry;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The entries of the version, and what they are called.
pub(super) const VERSION: [&str; 3] = ["uqff.version.major", "uqff.version.minor", "uqff.version.patch"];

pub(super) const REMEDY: &str = "the file is damaged or not of mistral.rs: fetch or write it again";

/// Larger entries are not read while opening. Shapes have at most three numbers of 4 bytes.
const MAX_VALUE_BYTES: usize = 12;

/// One of the files of a model.
pub(super) struct Shard {
    pub path: PathBuf,
    pub tensors: Tensors,
    pub values: Values,
}

/// A tensor of a shard, with its bytes if they are few.
#[derive(Clone)]
pub(super) struct LayerEntry {
    pub tensor: StoredTensor,
    pub value: Vec<u8>,
}

pub(super) type Entries = BTreeMap<String, LayerEntry>;

impl Shard {
    pub(super) fn open(path: PathBuf, opening: &Opening) -> Result<Self> {
        let (tensors, values) = file::open_with_values(&path, MAX_VALUE_BYTES, opening)?;
        Ok(Self { path, tensors, values })
    }
}

/// All entries but those of the version.
pub(super) fn merge(shards: Vec<Shard>) -> Result<Entries> {
    let mut entries = Entries::new();
    for Shard { path, tensors, mut values } in shards {
        for (name, tensor) in tensors {
            if is_version(&name) {
                continue;
            }
            let value = values.remove(&name).unwrap_or_default();
            match entries.entry(name.into()) {
                Entry::Vacant(vacant) => vacant.insert(LayerEntry { tensor, value }),
                Entry::Occupied(taken) => {
                    return Err(twice(taken.key(), taken.get().tensor.path(), &path));
                }
            };
        }
    }
    Ok(entries)
}

pub(super) fn twice(name: &str, first: &Path, second: &Path) -> Error {
    Error::tensor(
        second,
        name,
        "each entry in one file",
        format!("the same entry in {}", first.display()),
        "remove the file that does not belong to this model",
    )
}

/// Whether an entry is a part of the version.
fn is_version(name: &str) -> bool {
    VERSION.contains(&name)
}
