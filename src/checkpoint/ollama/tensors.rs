//! The tensors of a model's blobs, and which of them belong together.

use super::manifest::{Layer, LayerKind};
use super::stated::Stated;
use crate::checkpoint::file::{self, Opening, StoredTensor};
use crate::checkpoint::weight::{module_of, tensor_of};
use crate::{Error, Result};
use safetensors::Dtype;
use std::collections::{btree_map, BTreeMap};
use std::sync::Arc;

/// The key of the one tensor in each blob of the first versions; only the manifest has the name.
const NAMELESS: &str = "data";

/// All tensors by name, without those that are parts of a packed weight.
pub(super) type Tensors = BTreeMap<String, BlobTensor>;

/// A tensor, or a packed weight.
pub(super) struct BlobTensor {
    pub stored: StoredTensor,
    pub layer: Arc<Layer>,
    /// What the blob says of its format.
    pub stated: Stated,
    /// The other parts of a weight that is packed.
    pub parts: PackedParts,
}

/// What lies beside the packed words of a weight.
#[derive(Default)]
pub(super) struct PackedParts {
    pub scales: Option<StoredTensor>,
    pub biases: Option<StoredTensor>,
    pub global_scale: Option<StoredTensor>,
}

/// Opens the blobs of all tensors.
pub(super) fn open(layers: Vec<Layer>, opening: &Opening) -> Result<Tensors> {
    let mut tensors = Tensors::new();
    for layer in layers.into_iter().filter(|layer| layer.kind == LayerKind::Tensor) {
        let layer = Arc::new(layer);
        let blob = file::open_with_metadata(&layer.file, opening);
        let (blob, metadata) = blob.map_err(|error| layer.explain(error))?;
        let malformed =
            |problem: &str| layer.explain(Error::file(&layer.file, problem, super::manifest::REMEDY));
        if blob.is_empty() {
            return Err(malformed("the header lists no tensors"));
        }
        let nameless = blob.len() == 1;
        for (key, stored) in blob {
            let stated = Stated::of_tensor(&key, &metadata);
            let name = match nameless && *key == *NAMELESS {
                true => layer
                    .name
                    .clone()
                    .ok_or_else(|| malformed("neither header nor manifest name the tensor"))?,
                false => key.into(),
            };
            let entry =
                BlobTensor { stored, layer: Arc::clone(&layer), stated, parts: PackedParts::default() };
            match tensors.entry(name) {
                btree_map::Entry::Vacant(vacant) => drop(vacant.insert(entry)),
                btree_map::Entry::Occupied(first) if first.get().layer.digest == layer.digest => {}
                btree_map::Entry::Occupied(first) => {
                    let found = format!("another one in {}", first.get().layer.label);
                    return Err(layer.tensor_error(first.key(), "each tensor in one layer", found));
                }
            }
        }
    }
    gather(&mut tensors);
    if let Some((name, entry)) = tensors.iter().find(|(name, entry)| {
        entry.parts.scales.is_some() && ["vision", "visual"].iter().any(|tower| name.contains(tower))
    }) {
        opening.warnings.add(format!(
            "{}: `{name}` and others of the vision tower are quantized, as older versions of Ollama did: expect less accurate images",
            entry.stored.path().display()
        ));
    }
    Ok(tensors)
}

/// Moves the parts of each packed weight into its entry. Names alone tell nothing: `X.bias` is the bias of a linear
/// layer, and models have parameters called `scale`. A part is what has the name of a packed tensor, extended.
fn gather(tensors: &mut Tensors) {
    let is_words = |entry: &BlobTensor| matches!(entry.stored.dtype(), Dtype::U32 | Dtype::U8);
    let words: Vec<_> =
        tensors.iter().filter(|(_, entry)| is_words(entry)).map(|(name, _)| name.clone()).collect();
    for name in words {
        let module = module_of(&name).unwrap_or(&name);
        let scales = [format!("{name}.scale"), format!("{name}_scale"), tensor_of(module, "scales")];
        let biases = [format!("{name}.bias"), format!("{name}_qbias"), tensor_of(module, "biases")];
        let globals = [format!("{name}.global_scale"), format!("{name}_scale_2")];
        let scales = scales.into_iter().find(|scales| tensors.contains_key(scales));
        // Words may be bytes in weights that another tool has packed, and then scales are bytes as well.
        let are_bytes = |name: &String| {
            let dtype = tensors.get(name).map(|entry| entry.stored.dtype());
            matches!(dtype, Some(Dtype::U8 | Dtype::F8_E4M3))
        };
        match tensors.get(&name).map(|entry| entry.stored.dtype()) {
            Some(Dtype::U32) => {}
            Some(Dtype::U8) if scales.as_ref().is_some_and(are_bytes) => {}
            _ => continue,
        }
        let mut take =
            |names: &[String]| names.iter().find_map(|name| tensors.remove(name)).map(|entry| entry.stored);
        let parts = PackedParts {
            scales: take(scales.as_slice()),
            biases: take(&biases),
            global_scale: take(&globals),
        };
        // What activations would be multiplied with, were they quantized.
        drop(take(&[tensor_of(module, "input_scale")]));
        if let Some(entry) = tensors.get_mut(&name) {
            entry.parts = parts;
        }
    }
}
