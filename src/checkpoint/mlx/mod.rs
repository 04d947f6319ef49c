//! Checkpoints as `mlx_lm.convert` writes them: safetensors whose modules are dense, or packed words with scales.
//!
//! A checkpoint of dense tensors only is the special case without packed modules.

mod config;
mod triplet;

use super::container::{Container, Opened};
use super::file::{Tensors, Warnings};
use super::kind::CheckpointKind;
use super::sidecar::SidecarFiles;
use super::weight::{module_of, tensor_of, DenseTensor, PackedWeight, Parts, Weight};
use crate::{Error, Result};
use config::Quantization;
use safetensors::Dtype;
use serde_json::Value;
use std::path::Path;
use triplet::Triplet;

/// The names of a packed module's tensors beside `weight`.
const PARTS: [&str; 3] = ["scales", "biases", "global_scale"];

struct MlxCheckpoint {
    tensors: Tensors,
    quantization: Quantization,
    warnings: Warnings,
}

/// A checkpoint of these tensors, of the config `config` beside them.
pub(super) fn open(
    tensors: Tensors,
    sidecars: SidecarFiles,
    config: Value,
    warnings: &Warnings,
) -> Result<Opened> {
    let is_module = |module: &str| tensors.contains_key(&tensor_of(module, "weight"));
    let config_path = sidecars.path("config.json").unwrap_or_default();
    let quantization = config::parse(&config, &config_path, is_module, warnings)?;
    let container = MlxCheckpoint { tensors, quantization, warnings: warnings.clone() };
    let kind = match container.tensors.keys().filter_map(module_of).any(|m| container.is_packed(m)) {
        true => CheckpointKind::Mlx,
        false => CheckpointKind::Dense,
    };
    Ok(Opened::new(kind, config, sidecars, container))
}

impl MlxCheckpoint {
    fn is_packed(&self, module: &str) -> bool {
        let is_words = |weight: &super::file::StoredTensor| weight.dtype() == Dtype::U32;
        self.tensors.get(&tensor_of(module, "weight")).is_some_and(is_words)
            && self.tensors.contains_key(&tensor_of(module, "scales"))
    }

    /// Whether a tensor belongs to a packed weight, which has one name for all.
    fn is_part(&self, name: &str) -> bool {
        let (module, part) = name.rsplit_once('.').unwrap_or(("", name));
        PARTS.contains(&part) && self.is_packed(module)
    }
}

impl Container for MlxCheckpoint {
    fn names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(self.tensors.keys().filter(|name| !self.is_part(name)))
    }

    fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name) && !self.is_part(name)
    }

    fn weight(&self, module: &str, in_features: Option<usize>) -> Result<Option<Weight>> {
        if let Some(triplet) = Triplet::find(&self.tensors, module)? {
            let format = triplet.resolve(&self.quantization, in_features, &self.warnings)?;
            let dims = triplet.dims(format);
            let parts = Parts {
                module: module.to_owned(),
                format,
                dims: dims.clone(),
                codes: triplet.weight.clone(),
                scales: triplet.scales.clone(),
                biases: triplet.biases.cloned(),
                global_scale: triplet.global_scale(),
            };
            return Ok(Some(Weight::Packed(PackedWeight::new(module, format, dims, parts))));
        }
        let name = tensor_of(module, "weight");
        let Some(dense) = self.dense(&name)? else {
            return Ok(None);
        };
        if dense.dtype().is_float() {
            return Ok(Some(Weight::Dense(dense)));
        }
        Err(Error::tensor(
            self.file_of(&name).unwrap_or(Path::new("")),
            name,
            "a float weight, as there are no scales beside it",
            format!("{:?}", dense.dtype()),
            "this looks like the layout of another tool; use an MLX conversion of the model",
        ))
    }

    fn dense(&self, name: &str) -> Result<Option<DenseTensor>> {
        let Some(stored) = self.tensors.get(name) else {
            return Ok(None);
        };
        match module_of(name) {
            Some(module) if stored.dtype() == Dtype::U32 => {
                let (found, remedy) = match self.is_packed(module) {
                    true => ("a packed weight", "load the module's weight instead"),
                    false => ("U32 words without scales", "fetch or convert the file again"),
                };
                Err(Error::tensor(stored.path(), name, "a dense tensor", found, remedy))
            }
            _ => DenseTensor::new(name, stored).map(Some),
        }
    }

    fn file_of(&self, name: &str) -> Option<&Path> {
        self.tensors.get(name).map(super::file::StoredTensor::path)
    }
}
