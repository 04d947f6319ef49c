//! A checkpoint as mlx-lm lays it out, and the dense weights that it stands for.

use crate::reference::reference;
use candle::{Device, Result, Tensor};
use candle_quant::{QuantFormat, QuantTensor};
use serde_json::{json, Value};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use tempfile::TempDir;

pub struct Written {
    folder: TempDir,
    /// Names of the weights that are packed.
    pub packed: BTreeSet<String>,
}

impl Written {
    /// Packs every matrix that is a module's weight, if groups divide its rows.
    pub fn new(mut config: Value, tensors: &BTreeMap<String, Tensor>, format: QuantFormat) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let mode = if format.has_biases() { "affine" } else { "mxfp4" };
        config["quantization"] =
            json!({"group_size": format.group_size(), "bits": format.bits(), "mode": mode});
        std::fs::write(folder.path().join("config.json"), config.to_string())?;

        let (mut packed, mut stored, mut dense) = (BTreeSet::new(), HashMap::new(), HashMap::new());
        for (name, tensor) in tensors {
            let module = name.strip_suffix(".weight");
            let (Some(module), [_, k]) = (module, tensor.dims()) else {
                stored.insert(name.clone(), tensor.clone());
                dense.insert(name.clone(), tensor.clone());
                continue;
            };
            if !k.is_multiple_of(format.group_size()) {
                stored.insert(name.clone(), tensor.clone());
                dense.insert(name.clone(), tensor.clone());
                continue;
            }
            let weight = QuantTensor::quantize(tensor, format)?;
            dense.insert(name.clone(), Tensor::from_vec(reference(&weight), tensor.dims(), &Device::Cpu)?);
            stored.insert(name.clone(), weight.packed().clone());
            stored.insert(format!("{module}.scales"), weight.scales().clone());
            stored.extend(weight.biases().map(|biases| (format!("{module}.biases"), biases.clone())));
            packed.insert(name.clone());
        }
        let written = Self { folder, packed };
        candle::safetensors::save(&stored, written.file())?;
        candle::safetensors::save(&dense, written.dense_file())?;
        Ok(written)
    }

    /// The packed weights, config.json beside them.
    pub fn file(&self) -> PathBuf {
        self.folder.path().join("model.safetensors")
    }

    /// The dense ones.
    pub fn dense_file(&self) -> PathBuf {
        self.folder.path().join("dense")
    }
}
