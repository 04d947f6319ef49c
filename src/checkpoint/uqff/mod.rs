//! UQFF 1.0, 1.1 and 1.2, the container of mistral.rs: linear layers, stacks of experts and embeddings in several
//! quantizations, side by side in one model.
//!
//! A layer `<key>` consists of the entries `<key>.weight`, `<key>.weight.*` and perhaps `<key>.bias`, in any of
//! the shards. Its byte `<key>.weight.format` says which family it is of; nothing is guessed, and `config.json`
//! is not asked (a converted MLX checkpoint keeps MLX's `quantization` there).
//!
//! | format | family | here | computed |
//! |---|---|---|---|
//! | 0 | GGML Q4_0 to Q8_1, Q2_K to Q8_K | [`Ggml`](Weight::Ggml) | on the codes, exact; or by candle, activations rounded to 8 bits |
//! | 0 | GGML F32, F16, BF16 | dense | dense |
//! | 1 | Unquant | dense | dense |
//! | 2 | HQQ 1, 2, 3, 4 and 8 bits | integers with scales and zeros of columns, for classes of rows | on the codes, exact |
//! | 2 | the same, fewer than four rows of a class, or few columns | dense F32, dequantized when loaded | dense |
//! | 3 | FP8 E4M3 with one scale | MXFP8, unit group scales, the scale as global scale | on the codes, exact |
//! | 3 | the same, K no multiple of 32 or scale negative | FP8 with F32 scales, rows filled up | on the codes, exact |
//! | 4 | AFQ 2, 3, 4, 6, 8 bits | affine | on the codes, exact |
//! | 5 | F8Q8 | affine 8-bit g32, symmetric, F32 scales | on the codes, exact |
//! | 5 | the same, K a multiple of 16 alone | the same, rows filled up | on the codes, exact |
//! | 5 | the same, other K | dense F32, dequantized when loaded: blocks run across rows | dense |
//! | 6 | MXFP4 | MXFP4 | on the codes, exact |
//!
//! Where weights are dequantized, a warning of the checkpoint says how many and why. In HQQ element `i` of the flattened
//! weight belongs to group `i mod G`, of `G` groups, so that neighbours along K never share one: an affine format can not hold
//! the same numbers, but integers can that are multiplied by an x for each class of rows that share groups.
//!
//! # Entries that do not belong to a layer
//! Norms, routers and, up to 1.1, dense embeddings are in `residual.safetensors`; an embedding may lie in either
//! place. Whether the output head is tied is for the model to decide, by the presence of `lm_head.weight`: 1.1
//! has a quantized `lm_head` beside the dense embedding of a tied model, 1.2 the embedding alone. Other entries
//! are ignored and listed by a warning.
//!
//! # gpt-oss
//! `<block>.experts.gate_up_proj` of gpt-oss has the rows of two projections in turn, gate rows at even places: see
//! [`alternating`].
//!
//! # Exactness
//! Computed with or dequantized, every number is that of its definition in F32, bit for bit. Two liberties: affine weights
//! with F32 scales (mistral.rs writes 16-bit ones) are rounded twice, after the multiplication and after the sum; and
//! in F8Q8 blocks whose scale is negative or zero, which mistral.rs does not write, a zero is `+0`.
//!
//! # Which files
//! See [`files`].

mod afq;
mod alternating;
mod eight_bit;
mod entries;
mod families;
mod files;
mod hqq;
mod layer;
mod report;
mod version;

use super::container::{check_in_features, Container, Opened};
use super::file::{self, Opening, StoredTensor, Warnings};
use super::kind::CheckpointKind;
use super::sidecar::SidecarFiles;
use super::weight::{tensor_of, DenseTensor, Weight};
use crate::format::UqffType;
use crate::{Error, Result};
use entries::{merge, twice, Entries, Shard, REMEDY};
use layer::Layer;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

pub(super) use files::{find, Files};
pub(super) use version::is_versioned;

const RESIDUAL: &str = "residual.safetensors";

struct UqffCheckpoint {
    tensors: BTreeMap<String, Tensor>,
    /// Of all layers.
    entries: Entries,
}

enum Tensor {
    /// The weight of a layer, or its bias, and the file of the former's codes.
    Layer(Weight, PathBuf),
    /// From the residual.
    Residual(StoredTensor),
}

/// Opens the files of one model and checks every layer.
pub(super) fn open(files: Files, opening: &Opening) -> Result<Opened> {
    let shards =
        files.shards.into_iter().map(|path| Shard::open(path, opening)).collect::<Result<Vec<_>>>()?;
    version::check(&shards)?;
    let sidecars = SidecarFiles::Directory(files.dir.clone());
    let config = sidecars.config(opening)?;
    let entries = alternating::separated(merge(shards)?, &config)?;
    let mut tensors = layers(&entries, &opening.warnings)?;
    let residual = files.dir.join(RESIDUAL);
    if residual.is_file() {
        for (name, tensor) in file::open(&residual, opening)? {
            match tensors.entry(name.into()) {
                Entry::Vacant(vacant) => vacant.insert(Tensor::Residual(tensor)),
                Entry::Occupied(taken) => {
                    return Err(twice(taken.key(), taken.get().path(), &residual));
                }
            };
        }
    }
    Ok(Opened::new(CheckpointKind::Uqff, config, sidecars, UqffCheckpoint { tensors, entries }))
}

/// The weights and biases of all layers.
fn layers(entries: &Entries, warnings: &Warnings) -> Result<BTreeMap<String, Tensor>> {
    let keys: BTreeSet<&str> = entries.keys().filter_map(|name| layer::key_of(name)).collect();
    let mut tensors = BTreeMap::new();
    let mut dequantized: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for key in keys {
        let layer = Layer::find(entries, key)?;
        let (weight, why_dequantized) = families::weight(&layer)?;
        if let Some(bias) = families::bias(&layer, weight.dims())? {
            let path = layer.file_of("bias").to_owned();
            tensors.insert(tensor_of(key, "bias"), Tensor::Layer(Weight::Dense(bias), path));
        }
        tensors.insert(tensor_of(key, "weight"), Tensor::Layer(weight, layer.file_of("weight").to_owned()));
        if let Some(why) = why_dequantized {
            dequantized.entry(why).or_default().push(key);
        }
    }
    for (why, keys) in dequantized {
        let name = keys.first().map(|key| tensor_of(key, "weight")).unwrap_or_default();
        let path = tensors.get(&name).map_or(Path::new(""), Tensor::path);
        warnings.add(format!(
            "{}: {} weights are dequantized to F32 when they are loaded, `{name}` among them: {why}",
            path.display(),
            keys.len()
        ));
    }
    let mut unknown =
        entries.iter().filter(|(name, _)| !tensors.contains_key(*name) && layer::key_of(name).is_none());
    if let Some((name, entry)) = unknown.next() {
        warnings.add(format!(
            "{}: {} entries that belong to no layer are ignored, `{name}` among them",
            entry.tensor.path().display(),
            unknown.count() + 1
        ));
    }
    Ok(tensors)
}

impl Tensor {
    fn path(&self) -> &Path {
        match self {
            Self::Layer(_, path) => path,
            Self::Residual(stored) => stored.path(),
        }
    }
}

impl Container for UqffCheckpoint {
    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(self.tensors.keys().map(String::as_str))
    }

    fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    fn weight(&self, module: &str, in_features: Option<usize>) -> Result<Option<Weight>> {
        let name = tensor_of(module, "weight");
        let Some(tensor) = self.tensors.get(&name) else {
            return Ok(None);
        };
        match tensor {
            Tensor::Layer(weight, path) => {
                check_in_features(path, &name, weight.dims(), in_features)?;
                Ok(Some(weight.clone()))
            }
            Tensor::Residual(stored) => match DenseTensor::new(&name, stored)? {
                dense if dense.dtype().is_float() => Ok(Some(Weight::Dense(dense))),
                dense => Err(Error::tensor(
                    stored.path(),
                    name,
                    "a float weight",
                    format!("{:?}", dense.dtype()),
                    REMEDY,
                )),
            },
        }
    }

    fn dense(&self, name: &str) -> Result<Option<DenseTensor>> {
        match self.tensors.get(name) {
            None => Ok(None),
            Some(Tensor::Residual(stored)) => DenseTensor::new(name, stored).map(Some),
            Some(Tensor::Layer(Weight::Dense(dense), _)) => Ok(Some(dense.clone())),
            Some(Tensor::Layer(weight, path)) => Err(Error::tensor(
                path,
                name,
                "a dense tensor",
                format!("a weight of {}", weight.format_name()),
                "load the module's weight instead",
            )),
        }
    }

    fn file_of(&self, name: &str) -> Option<&Path> {
        self.tensors.get(name).map(Tensor::path)
    }

    fn uqff_entries(&self, module: &str) -> Result<Option<(UqffType, Vec<DenseTensor>)>> {
        if !self.entries.contains_key(&tensor_of(module, "weight.format")) {
            return Ok(None);
        }
        let layer = Layer::find(&self.entries, module)?;
        let Some(kind) = families::whole_type(&layer)? else { return Ok(None) };
        Ok(Some((kind, layer.stored()?)))
    }
}
