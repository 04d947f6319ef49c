//! Damaged stores: whatever is wrong with a manifest or a blob, it is an error of this crate that names a file, and
//! never a panic. More than 20,000 stores.

use crate::checkpoint::{raw_file, Tensor};
use crate::ollama::Model;
use candle_core::{DType, Device};
use candle_quant::{Checkpoint, Error, Result};
use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::{json, Value};
use std::fs;
use std::path::Path;

/// Where the layers are that are damaged: the config, and blobs of all kinds.
const CONFIG: usize = 0;
const BLOBS: std::ops::Range<usize> = 1..5;

/// A small model that has something of everything.
fn model() -> Model {
    let mut model = Model::new(&json!({"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32,
        "intermediate_size": 128, "quantization": {"bits": 4, "l.up_proj": {"bits": 4, "group_size": 64}}}));
    let affine: [Tensor; 3] = [
        ("l.up_proj.weight", "U32", &[2, 8]),
        ("l.up_proj.weight.scale", "BF16", &[2, 1]),
        ("l.up_proj.weight.bias", "BF16", &[2, 1]),
    ];
    model.tensors("l.up_proj.weight", &json!({"quant_type": "int4", "group_size": "64"}), &affine);
    let stack: [Tensor; 5] = [
        ("l.switch_mlp.down_proj.weight", "U32", &[2, 2, 8]),
        ("l.switch_mlp.down_proj.weight.scale", "U8", &[2, 2, 4]),
        ("l.switch_mlp.down_proj.weight.global_scale", "F32", &[2]),
        ("l.switch_mlp.up_proj.weight", "U32", &[2, 2, 16]),
        ("l.switch_mlp.up_proj.weight.scale", "U8", &[2, 2, 2]),
    ];
    let metadata = json!({"l.switch_mlp.down_proj.weight.quant_type": "nvfp4", "l.switch_mlp.up_proj.weight.quant_type": "mxfp8"});
    model.tensors("l.experts", &metadata, &stack);
    model.tensors("l.norm.weight", &Value::Null, &[("data", "F32", &[4])]);
    let raw: [Tensor; 4] = [
        ("r.weight", "U8", &[2, 32]),
        ("r.weight_scale", "F8_E4M3", &[2, 4]),
        ("r.weight_scale_2", "F32", &[]),
        ("r.bias", "BF16", &[2]),
    ];
    model.tensors("r.weight", &Value::Null, &raw);
    model.add("json", Some("model_index.json"), br#"{"group_size":32,"quantization":"INT4"}"#);
    model
}

/// Opens the store and loads all that is in it.
fn open_and_load_everything(model: &Model) -> Result<()> {
    let checkpoint = Checkpoint::open(model.root())?;
    let mut first_error = Ok(());
    for name in checkpoint.tensor_names() {
        for k in [None, Some(64)] {
            let load = || checkpoint.tensor(name, k)?.to_dense(DType::F32, &Device::Cpu).map(drop);
            first_error = first_error.and(load());
        }
    }
    checkpoint.warnings();
    first_error
}

fn check(model: &Model) -> std::result::Result<(), TestCaseError> {
    if let Err(error) = open_and_load_everything(model) {
        prop_assert!(
            !matches!(error, Error::Candle(_) | Error::Mismatch { .. }),
            "unchecked before use: {error:?}"
        );
        prop_assert!(
            error.to_string().contains("m:latest")
                || error.to_string().contains(model.root().to_str().unwrap()),
            "{error}"
        );
    }
    Ok(())
}

/// One change of some bytes.
fn damage(bytes: &mut Vec<u8>, edits: &[(Index, u8, u8)]) {
    for (at, value, kind) in edits {
        let at = at.index(bytes.len().max(1));
        match kind {
            _ if at >= bytes.len() => bytes.push(*value),
            0 => bytes[at] = *value,
            1 => bytes[at] ^= 1 << (value % 8),
            2 => bytes.insert(at, *value),
            3 if value % 8 == 0 => bytes.truncate(at),
            _ => drop(bytes.remove(at)),
        }
    }
}

fn edits() -> impl Strategy<Value = Vec<(Index, u8, u8)>> {
    prop::collection::vec((any::<Index>(), any::<u8>(), 0u8..5), 1..4)
}

/// Values that fit nowhere, or in the wrong place.
fn odd_value(which: u8) -> Value {
    match which % 24 {
        0 => Value::Null,
        1 => json!(-1),
        2 => json!(0),
        3 => json!(1),
        4 => json!(2),
        5 => json!(8),
        6 => json!(u64::MAX),
        7 => json!(i64::MIN),
        8 => json!(1u64 << 40),
        9 => json!(1.5),
        10 => json!(1e300),
        11 => json!(""),
        12 => json!(".."),
        13 => json!("data"),
        14 => json!("F32"),
        15 => json!("U8"),
        16 => json!("U32"),
        17 => json!("F8_E4M3"),
        18 => json!([]),
        19 => json!([0, 0]),
        20 => json!([2, 1, 4]),
        21 => json!({}),
        22 => json!("application/vnd.ollama.image.tensor"),
        _ => json!(true),
    }
}

/// Changes one node of a JSON value, chosen by `at`: replaces it, removes it, or puts another node there.
fn change(value: &mut Value, at: &Index, which: u8, kind: u8, other: &Index) {
    fn pointers(value: &Value, path: &str, all: &mut Vec<String>) {
        all.push(path.to_owned());
        match value {
            Value::Array(items) => {
                items.iter().enumerate().for_each(|(i, item)| pointers(item, &format!("{path}/{i}"), all));
            }
            Value::Object(items) => {
                items.iter().for_each(|(key, item)| {
                    pointers(item, &format!("{path}/{}", key.replace('/', "~1")), all)
                });
            }
            _ => {}
        }
    }
    let mut all = Vec::new();
    pointers(value, "", &mut all);
    let (path, other) = (at.get(&all).clone(), other.get(&all).clone());
    let new = match kind {
        0 | 1 => odd_value(which),
        _ => value.pointer(&other).unwrap().clone(),
    };
    let Some((parent, key)) = path.rsplit_once('/') else {
        *value = new;
        return;
    };
    match value.pointer_mut(parent) {
        Some(Value::Object(items)) if kind == 3 => drop(items.remove(&key.replace("~1", "/"))),
        Some(Value::Array(items)) if kind == 3 => drop(items.remove(key.parse().unwrap())),
        // The value of one key under another.
        Some(Value::Object(items)) if kind == 4 => {
            items.insert(other.rsplit('/').next().unwrap().replace("~1", "/"), new);
        }
        _ => *value.pointer_mut(&path).unwrap() = new,
    }
}

fn changes() -> impl Strategy<Value = Vec<(Index, u8, u8, Index)>> {
    prop::collection::vec((any::<Index>(), any::<u8>(), 0u8..5, any::<Index>()), 1..4)
}

thread_local! {
    /// One store for all cases of a test.
    static STORE: Model = model();
}

/// Writes a file in the place of another. File systems wait for the disk when a file is overwritten.
fn write_anew(path: &Path, bytes: &[u8]) {
    // There may be none.
    let _ = fs::remove_file(path);
    fs::write(path, bytes).unwrap();
}

/// Opens the store with the manifest as `change` makes it of the right one.
fn with_manifest(change: impl FnOnce(&Value) -> Vec<u8>) -> std::result::Result<(), TestCaseError> {
    STORE.with(|model| {
        write_anew(&model.manifest_path(), &change(&model.manifest));
        check(model)
    })
}

/// Opens the store with another content of a layer, of which the manifest states the size.
fn with_blob(layer: usize, change: impl FnOnce(&mut Vec<u8>)) -> std::result::Result<(), TestCaseError> {
    STORE.with(|model| {
        let mut manifest = model.manifest.clone();
        let stated = &mut manifest["layers"][layer];
        let file = stated["digest"].as_str().unwrap().replace(':', "-");
        let path = model.root().join("blobs").join(file);
        let right = fs::read(&path).unwrap();
        let mut bytes = right.clone();
        change(&mut bytes);
        stated["size"] = bytes.len().into();
        write_anew(&path, &bytes);
        write_anew(&model.manifest_path(), manifest.to_string().as_bytes());
        let result = check(model);
        write_anew(&path, &right);
        result
    })
}

fn json_with(mut value: Value, changes: &[(Index, u8, u8, Index)]) -> String {
    for (at, which, kind, other) in changes {
        change(&mut value, at, *which, *kind, other);
    }
    value.to_string()
}

fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, max_shrink_iters: 200, ..ProptestConfig::default() }
}

#[test]
fn the_undamaged_store_loads() {
    let model = model();
    fs::write(model.manifest_path(), model.manifest.to_string()).unwrap();
    open_and_load_everything(&model).unwrap();
}

proptest! {
    #![proptest_config(cases(5000))]

    #[test]
    fn manifests_of_other_bytes(edits in edits()) {
        with_manifest(|manifest| {
            let mut bytes = manifest.to_string().into_bytes();
            damage(&mut bytes, &edits);
            bytes
        })?;
    }

    #[test]
    fn manifests_of_other_values(changes in changes()) {
        with_manifest(|manifest| json_with(manifest.clone(), &changes).into_bytes())?;
    }

    #[test]
    fn blobs_of_other_bytes(layer in BLOBS, edits in edits()) {
        with_blob(layer, |bytes| damage(bytes, &edits))?;
    }

    #[test]
    fn blobs_of_other_headers(layer in BLOBS, changes in changes()) {
        with_blob(layer, |bytes| {
            let end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let header = serde_json::from_slice(&bytes[8..end]).unwrap();
            *bytes = raw_file(&json_with(header, &changes), &bytes[end..]);
        })?;
    }
}

proptest! {
    #![proptest_config(cases(1000))]

    #[test]
    fn configs_of_other_values(changes in changes()) {
        with_blob(CONFIG, |bytes| {
            *bytes = json_with(serde_json::from_slice(bytes).unwrap(), &changes).into_bytes();
        })?;
    }
}
