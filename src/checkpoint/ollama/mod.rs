//! Models of an Ollama store: a manifest, and safetensors blobs of one weight or one group of experts each.
//!
//! The layout has changed with nearly every version of Ollama, without a number that says so. So nothing is
//! concluded from versions: names come from the blobs' headers, formats from dtypes and shapes.

mod manifest;
mod name;
mod packed;
mod stated;
mod store;
mod tensors;
mod usual_dims;

use super::container::{Container, Opened};
use super::file::{Opening, Warnings};
use super::gguf;
use super::kind::CheckpointKind;
use super::sidecar::SidecarFiles;
use super::weight::{tensor_of, DenseTensor, GlobalScale, GlobalScaleMeaning, PackedWeight, Parts, Weight};
use crate::{Error, Result};
use manifest::{Layer, LayerKind, Manifest};
use packed::{Evidence, Packed};
use serde_json::Value;
use stated::Stated;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use store::ManifestFile;
use tensors::{BlobTensor, Tensors};

pub use name::Name;
pub(super) use store::default_roots;
pub use store::Store;

/// Opens the path of a store of one model, or of a manifest in a store; `None` if it is neither.
pub(super) fn open_path(path: &Path, opening: &Opening) -> Result<Option<Opened>> {
    let manifest = match path.is_dir() {
        true => Store::at(path)?.map(only_model).transpose()?,
        false => Store::manifest_at(path)?,
    };
    manifest.map(|manifest| open(&manifest, opening)).transpose()
}

/// Opens the model called `name`, at which there is no path, as `no_path` says.
pub(super) fn open_name(path: &Path, no_path: io::Error, opening: &Opening) -> Result<Opened> {
    match path.to_str().and_then(Name::parse).map(|name| find(&name)).transpose()?.flatten() {
        Some(manifest) => open(&manifest, opening),
        None => Err(Error::Io { path: path.to_owned(), error: no_path }),
    }
}

/// The manifest of a model, in the first store that has it.
pub(super) fn find(name: &Name) -> Result<Option<ManifestFile>> {
    for root in default_roots() {
        if let Some(manifest) = Store::at(&root)?.map(|store| store.find(name)).transpose()?.flatten() {
            return Ok(Some(manifest));
        }
    }
    Ok(None)
}

/// The model of a store that has no other.
fn only_model(store: Store) -> Result<ManifestFile> {
    let root = store.root().to_owned();
    let models = store.models()?;
    let found = match models.as_slice() {
        [name] => store.find(name)?,
        _ => None,
    };
    found.ok_or_else(|| {
        let names: Vec<_> = models.iter().map(|name| format!("`{name}`")).collect();
        let problem = match models.len() {
            0 => "an Ollama store without models".to_owned(),
            count => format!("an Ollama store of {count} models: {}", names.join(", ")),
        };
        Error::file(
            &root,
            problem,
            "set OLLAMA_MODELS to this path and give the name of a model, or give the path of its manifest",
        )
    })
}

fn open(file: &ManifestFile, opening: &Opening) -> Result<Opened> {
    let manifest = Manifest::read(file, opening)?;
    for layer in manifest.layers_of(LayerKind::Adapter) {
        opening.warnings.add(format!(
            "{}: {} is an adapter; it is not applied",
            manifest.path.display(),
            layer.label
        ));
    }
    if manifest.layers_of(LayerKind::Tensor).next().is_some() {
        return open_tensors(manifest, opening);
    }
    if let Some(layer) = manifest.layers_of(LayerKind::Gguf).next() {
        let opened = gguf::open(&layer.file, opening).map_err(|error| layer.explain(error))?;
        return Ok(Opened { digests: manifest.digests(), ollama_layers: manifest.other_layers(), ..opened });
    }
    Err(match manifest.remote_host(opening)? {
        Some(host) => Error::Unsupported {
            what: format!("model `{}`, which runs on {host} and has no weights here,", manifest.model),
            remedy: "pull a model that has weights".into(),
        },
        None => manifest.error("lists no layers with weights"),
    })
}

/// A model whose weights are in safetensors blobs.
struct OllamaModel {
    tensors: Tensors,
    config: Value,
    /// What `model_index.json` of the first versions says of the whole model.
    model_index: Stated,
    warnings: Warnings,
}

fn open_tensors(manifest: Manifest, opening: &Opening) -> Result<Opened> {
    let mut files: BTreeMap<String, PathBuf> = BTreeMap::new();
    for layer in manifest.layers_of(LayerKind::Json) {
        let name = layer.name.clone().unwrap_or_default();
        if files.insert(name.clone(), layer.file.clone()).is_some_and(|first| first != layer.file) {
            return Err(manifest.error(&format!("lists two layers `{name}` of different content")));
        }
    }
    let sidecars = SidecarFiles::Files(files);
    let json = |name: &str| {
        let layer = manifest.layers_of(LayerKind::Json).find(|layer| layer.name.as_deref() == Some(name));
        let json = |layer: &Layer| match sidecars.json(name, opening).map_err(|error| layer.explain(error))? {
            Some(json @ Value::Object(_)) => Ok(json),
            _ => Err(layer.explain(Error::file(&layer.file, "not a JSON object", manifest::REMEDY))),
        };
        layer.map(json).transpose()
    };
    let config = json("config.json")?.ok_or_else(|| manifest.error("lists no layer `config.json`"))?;
    let model_index = json("model_index.json")?.as_ref().map(Stated::of_model_index).unwrap_or_default();
    let (digests, ollama_layers) = (manifest.digests(), manifest.other_layers());
    let container = OllamaModel {
        tensors: tensors::open(manifest.layers, opening)?,
        config: config.clone(),
        model_index,
        warnings: opening.warnings.clone(),
    };
    Ok(Opened {
        kind: CheckpointKind::Ollama,
        config,
        sidecars,
        digests,
        ollama_layers,
        container: Box::new(container),
    })
}

impl OllamaModel {
    /// The weight of a module, and its full name. Experts that are stacked in the source may be called
    /// like the module.
    fn find(&self, module: &str) -> Option<(&str, &BlobTensor)> {
        let get = |name: &str| self.tensors.get_key_value(name);
        let (name, entry) = get(&tensor_of(module, "weight")).or_else(|| get(module))?;
        Some((name, entry))
    }

    /// MLX has the largest magnitude in this place, and Ollama passes it over: the file is ambiguous, so it is refused.
    fn refuse_foreign_global_scale(&self, module: &str, entry: &BlobTensor) -> Result<()> {
        let name = tensor_of(module, "global_scale");
        match self.tensors.contains_key(&name) && entry.parts.global_scale.is_none() {
            false => Ok(()),
            true => {
                let expected =
                    format!("`{}` as the name of a global scale", tensor_of(module, "weight.global_scale"));
                Err(entry.layer.tensor_error(&name, expected, "the name that MLX gives it"))
            }
        }
    }

    fn packed(&self, module: &str, packed: &Packed<'_>, in_features: Option<usize>) -> Result<PackedWeight> {
        let evidence = Evidence {
            in_features,
            usual_in_features: usual_dims::usual_in_features(&self.config, module),
            config: stated::entry_of_config(&self.config, module),
            model_index: &self.model_index,
        };
        let format = packed.resolve(&evidence, &self.warnings)?;
        let dims = packed.dims(format);
        let global_scale = packed.global_scale(format)?.cloned();
        let parts = Parts {
            module: module.to_owned(),
            format,
            dims: dims.clone(),
            codes: packed.words().clone(),
            scales: packed.scales.clone(),
            biases: packed.biases.cloned(),
            global_scale: global_scale.map(|tensor| GlobalScale {
                tensor,
                name: "global_scale",
                meaning: GlobalScaleMeaning::Multiplier,
            }),
        };
        Ok(PackedWeight::new(module, format, dims, parts))
    }
}

impl Container for OllamaModel {
    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(self.tensors.keys().map(String::as_str))
    }

    fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    fn weight(&self, module: &str, in_features: Option<usize>) -> Result<Option<Weight>> {
        let Some((name, entry)) = self.find(module) else {
            let raw = tensor_of(module, "weight_packed");
            return match self.tensors.get(&raw) {
                None => Ok(None),
                Some(_) => Err(Error::Unsupported {
                    what: format!("`{raw}` in the raw layout of compressed-tensors"),
                    remedy: "create the model again with a newer Ollama".into(),
                }),
            };
        };
        if let Some(packed) = Packed::of(name, entry)? {
            self.refuse_foreign_global_scale(module, entry)?;
            return Ok(Some(Weight::Packed(self.packed(module, &packed, in_features)?)));
        }
        let dense = DenseTensor::new(name, &entry.stored).map_err(|error| entry.layer.explain(error))?;
        match dense.dtype().is_float() {
            true => Ok(Some(Weight::Dense(dense))),
            // Not called a weight, and not one.
            false if name == module => Ok(None),
            false => {
                let found = format!("{:?} without scales", dense.dtype());
                Err(entry.layer.tensor_error(name, "a float weight, or a packed one with scales", found))
            }
        }
    }

    fn dense(&self, name: &str) -> Result<Option<DenseTensor>> {
        let Some(entry) = self.tensors.get(name) else {
            return Ok(None);
        };
        if Packed::of(name, entry)?.is_some() {
            let error = Error::tensor(
                entry.stored.path(),
                name,
                "a dense tensor",
                "a packed weight",
                "load the module's weight instead",
            );
            return Err(entry.layer.explain(error));
        }
        DenseTensor::new(name, &entry.stored).map_err(|error| entry.layer.explain(error)).map(Some)
    }

    fn file_of(&self, name: &str) -> Option<&Path> {
        self.tensors.get(name).map(|entry| entry.stored.path())
    }
}
