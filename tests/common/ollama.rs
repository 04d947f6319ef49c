//! Small Ollama stores for tests, right and wrong ones.
#![allow(dead_code)] // Each test binary uses its part.

use crate::checkpoint::{entry, raw_file, Tensor};
use candle_core::{DType, Device};
use candle_quant::checkpoint::{Checkpoint, PackedWeight, Weight};
use candle_quant::Result;
use serde_json::{json, Value};
use sha2::{Digest, Sha256};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Where the manifest of the model `m` is in a store.
pub const MANIFEST: &str = "manifests/registry.ollama.ai/library/m/latest";

/// A store of the one model `m:latest`. It has a `config.json`, and no weights yet.
pub struct Model {
    pub dir: TempDir,
    pub manifest: Value,
}

impl Model {
    /// A model with this `config.json`.
    pub fn new(config: &Value) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("blobs")).unwrap();
        fs::create_dir_all(dir.path().join(MANIFEST).parent().unwrap()).unwrap();
        let mut model = Self { dir, manifest: json!({"schemaVersion": 2, "layers": []}) };
        model.manifest["config"] = model.blob(br#"{"model_format":"safetensors"}"#);
        model.add("json", Some("config.json"), config.to_string().as_bytes());
        model
    }

    /// A model of one blob of these tensors, each layer named after its first tensor.
    pub fn of(config: &Value, metadata: &Value, tensors: &[Tensor]) -> Self {
        let mut model = Self::new(config);
        model.tensors(tensors[0].0, metadata, tensors);
        model
    }

    pub fn root(&self) -> &Path {
        self.dir.path()
    }

    pub fn manifest_path(&self) -> PathBuf {
        self.root().join(MANIFEST)
    }

    /// Writes a blob; what a layer says of it.
    fn blob(&mut self, bytes: &[u8]) -> Value {
        let hex: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        fs::write(self.root().join(format!("blobs/sha256-{hex}")), bytes).unwrap();
        json!({"digest": format!("sha256:{hex}"), "size": bytes.len()})
    }

    /// Adds a layer of the media type that ends in `kind`.
    pub fn add(&mut self, kind: &str, name: Option<&str>, bytes: &[u8]) -> &mut Self {
        let mut layer = self.blob(bytes);
        layer["mediaType"] = format!("application/vnd.ollama.image.{kind}").into();
        if let Some(name) = name {
            layer["name"] = name.into();
        }
        self.manifest["layers"].as_array_mut().unwrap().push(layer);
        self
    }

    /// Adds a blob of tensors whose header has this `__metadata__`.
    pub fn tensors(&mut self, layer: &str, metadata: &Value, tensors: &[Tensor]) -> &mut Self {
        self.add("tensor", Some(layer), &blob_of(metadata, tensors))
    }

    /// The last layer.
    pub fn last(&mut self) -> &mut Value {
        self.manifest["layers"].as_array_mut().unwrap().last_mut().unwrap()
    }

    /// The digest of the last layer, in hexadecimal.
    pub fn digest(&mut self) -> String {
        self.last()["digest"].as_str().unwrap()["sha256:".len()..].to_owned()
    }

    /// Removes the last layer from the manifest.
    pub fn pop(&mut self) -> Value {
        self.manifest["layers"].as_array_mut().unwrap().pop().unwrap()
    }

    /// Writes the manifest and opens the store by its path.
    pub fn open(&self) -> Result<Checkpoint> {
        fs::write(self.manifest_path(), self.manifest.to_string() + "\n").unwrap();
        Checkpoint::open(self.root())
    }
}

/// A blob of these tensors as MLX writes it: without padding, at an odd offset. Bytes are 0, 1, 2, .. 62, 0, ..
pub fn blob_of(metadata: &Value, tensors: &[Tensor]) -> Vec<u8> {
    let mut header = json!({"__metadata__": metadata});
    let mut end = 0;
    for tensor in tensors {
        let (name, value, size) = entry(*tensor, end);
        header[name] = value;
        end += size;
    }
    let mut header = header.to_string();
    if header.len().is_multiple_of(2) {
        header.push(' ');
    }
    let data: Vec<u8> = (0..end).map(|i| (i % 63) as u8).collect();
    raw_file(&header, &data)
}

/// 4 bits in groups of 64 if K is 128.
pub const INT4: [Tensor; 3] =
    [("m.weight", "U32", &[8, 16]), ("m.weight.scale", "BF16", &[8, 2]), ("m.weight.bias", "BF16", &[8, 2])];
/// 8 bits in groups of 64 if K is 128.
pub const INT8: [Tensor; 3] =
    [("m.weight", "U32", &[8, 32]), ("m.weight.scale", "BF16", &[8, 2]), ("m.weight.bias", "BF16", &[8, 2])];
pub const NVFP4: [Tensor; 2] = [("m.weight", "U32", &[8, 16]), ("m.weight.scale", "U8", &[8, 8])];
pub const MXFP4: [Tensor; 2] = [("m.weight", "U32", &[8, 16]), ("m.weight.scale", "U8", &[8, 4])];
pub const MXFP8: [Tensor; 2] = [("m.weight", "U32", &[8, 32]), ("m.weight.scale", "U8", &[8, 4])];

pub fn stated(quant_type: &str, group_size: &str) -> Value {
    json!({"quant_type": quant_type, "group_size": group_size})
}

/// Opens a model of one layer of these tensors and asks for the weight of `module`.
pub fn weight_of(
    config: &Value,
    metadata: &Value,
    module: &str,
    tensors: &[Tensor],
    k: Option<usize>,
) -> Result<(Checkpoint, PackedWeight)> {
    let checkpoint = Model::of(config, metadata, tensors).open()?;
    match checkpoint.weight(module, k)? {
        Weight::Packed(packed) => Ok((checkpoint, packed)),
        other => panic!("{other:?}"),
    }
}

/// The weight of `m`, with nothing in the config.
pub fn weight(metadata: &Value, tensors: &[Tensor], k: Option<usize>) -> Result<(Checkpoint, PackedWeight)> {
    weight_of(&json!({}), metadata, "m", tensors, k)
}

/// The numbers of a weight, as bits.
pub fn bits(weight: &PackedWeight) -> Vec<u32> {
    let tensor = weight.load(&Device::Cpu).unwrap().dequantize(DType::F32).unwrap();
    tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}
