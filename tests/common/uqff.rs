//! UQFF files for tests, and what their tensors have to be.
#![allow(dead_code)] // each test binary uses its own part

use super::checkpoint::{folder_of, header, raw_file};
use candle_core::{DType, Device, Tensor};
use candle_quant::checkpoint::{Checkpoint, Weight};
use candle_quant::Result;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::fs;
use std::path::PathBuf;
use tempfile::TempDir;

/// The fixtures that open.
pub const FIXTURES: [&str; 15] = [
    "afq4",
    "afq8",
    "f8q8",
    "families",
    "fp8",
    "frommlx6",
    "hqq4",
    "moe_afq4",
    "mxfp4",
    "odd_afq4",
    "q4k",
    "q8_0",
    "qwen2_afq4",
    "v0816_afq4",
    "v090_q4k",
];

/// The folder of a fixture.
pub fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures/uqff").join(name)
}

/// A fixture that opens.
pub fn open(name: &str) -> Checkpoint {
    Checkpoint::open(fixture(name)).unwrap()
}

pub fn json(path: PathBuf) -> Value {
    serde_json::from_slice(&fs::read(&path).unwrap()).unwrap_or_else(|error| panic!("{path:?}: {error}"))
}

/// What is expected of the tensors of a fixture: name to `shape` and `sha256`.
pub fn expected(name: &str) -> serde_json::Map<String, Value> {
    match json(fixture("expected.json")).get(name) {
        Some(Value::Object(tensors)) => tensors.clone(),
        other => panic!("{name}: {other:?}"),
    }
}

/// The SHA-256 of a tensor's little-endian F32 bytes.
pub fn sha256(tensor: &Tensor) -> String {
    let tensor = tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
    let mut hash = Sha256::new();
    for value in tensor.to_vec1::<f32>().unwrap() {
        hash.update(value.to_le_bytes());
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A tensor of a checkpoint, dequantized to F32.
pub fn dequantized(checkpoint: &Checkpoint, name: &str) -> Result<Tensor> {
    checkpoint.tensor(name, None)?.to_dense(DType::F32, &Device::Cpu)
}

/// Asserts that a tensor is what is expected of it.
#[track_caller]
pub fn assert_expected(checkpoint: &Checkpoint, name: &str, expected: &Value) {
    let tensor = dequantized(checkpoint, name).unwrap();
    assert_eq!(serde_json::json!(tensor.dims()), expected["shape"], "{name}");
    assert_eq!(sha256(&tensor), expected["sha256"].as_str().unwrap(), "{name}");
}

/// One entry of a file: name, dtype, shape, bytes.
pub type Entry = (String, &'static str, Vec<usize>, Vec<u8>);

pub fn entry(name: &str, dtype: &'static str, shape: &[usize], bytes: impl Into<Vec<u8>>) -> Entry {
    (name.into(), dtype, shape.to_vec(), bytes.into())
}

pub fn u8(name: &str, value: u8) -> Entry {
    entry(name, "U8", &[], [value])
}

pub fn u32(name: &str, value: u32) -> Entry {
    entry(name, "U32", &[], value.to_le_bytes())
}

pub fn f32s(name: &str, shape: &[usize], values: &[f32]) -> Entry {
    entry(name, "F32", shape, values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>())
}

pub fn u32s(name: &str, values: &[u32]) -> Entry {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    entry(name, "U32", &[values.len()], bytes)
}

/// The three entries of a version.
pub fn version(numbers: [u32; 3]) -> Vec<Entry> {
    let names = ["uqff.version.major", "uqff.version.minor", "uqff.version.patch"];
    names.iter().zip(numbers).map(|(name, number)| u32(name, number)).collect()
}

/// The entries of module `m` of each family, small and right, by the family's name.
pub fn layer(family: &str) -> Vec<Entry> {
    let ones = |count: usize| vec![0x11; count];
    let bf16 = |count: usize| [0x80, 0x3f].repeat(count);
    match family {
        "GGML" => vec![
            entry("m.weight", "U8", &[2 * 34], ones(2 * 34)),
            u8("m.weight.format", 0),
            u32("m.weight.dtype", 8),
            u32s("m.weight.shape", &[2, 32]),
        ],
        "Unquant" => vec![entry("m.weight", "BF16", &[2, 3], bf16(6)), u8("m.weight.format", 1)],
        "HQQ" => vec![
            entry("m.weight", "U8", &[16, 4], ones(64)),
            u8("m.weight.format", 2),
            f32s("m.weight.scales", &[1, 4], &[1., 2., 3., 4.]),
            f32s("m.weight.zeros", &[1, 4], &[0.5; 4]),
            u32s("m.weight.shape", &[2, 64]),
            u8("m.weight.bits", 4),
            u32("m.weight.group_size", 32),
            u8("m.weight.axis", 0),
            u32("m.weight.optimization_steps", 10),
            u8("m.weight.round_zeros", 0),
            u8("m.weight.channel_wise", 1),
        ],
        "FP8" => vec![
            entry("m.weight", "F8_E4M3", &[2, 32], ones(64)),
            u8("m.weight.format", 3),
            f32s("m.weight.dequant_w_scale", &[], &[0.5]),
            f32s("m.weight.dequant_x_scale", &[], &[0.5]),
            f32s("m.weight.quant_scale", &[], &[416.]),
            u32("m.weight.dtype", 9),
        ],
        "AFQ" => vec![
            entry("m.weight", "U32", &[2, 8], ones(64)),
            u8("m.weight.format", 4),
            entry("m.weight.scales", "BF16", &[2, 1], bf16(2)),
            entry("m.weight.biases", "BF16", &[2, 1], bf16(2)),
            u8("m.weight.bits", 4),
            u8("m.weight.group_size", 64),
        ],
        "F8Q8" => vec![
            entry("m.weight", "U8", &[66], ones(66)),
            u8("m.weight.format", 5),
            u32("m.weight.num_blocks", 2),
            u32s("m.weight.shape", &[2, 32]),
        ],
        "MXFP4" => vec![
            entry("m.weight", "U8", &[2, 16], ones(32)),
            u8("m.weight.format", 6),
            entry("m.weight.scales", "U8", &[2, 1], [127; 2]),
        ],
        other => panic!("{other}"),
    }
}

pub const FAMILIES: [&str; 7] = ["GGML", "Unquant", "HQQ", "FP8", "AFQ", "F8Q8", "MXFP4"];

/// A file of these entries, whose data begins at an odd offset.
pub fn file(entries: &[Entry]) -> Vec<u8> {
    let tensors: Vec<_> =
        entries.iter().map(|(name, dtype, shape, _)| (name.as_str(), *dtype, shape.as_slice())).collect();
    let (header, size) = header(&tensors);
    let data: Vec<u8> = entries.iter().flat_map(|(.., bytes)| bytes).copied().collect();
    assert_eq!(data.len(), size, "bytes of entries");
    raw_file(&header, &data)
}

/// A file of a version 1.2 with these entries.
pub fn versioned(entries: &[Entry]) -> Vec<u8> {
    file(&[version([1, 2, 0]), entries.to_vec()].concat())
}

/// A directory with the shards `x-0.uqff`, `x-1.uqff` ..
pub fn shards(files: &[Vec<u8>]) -> TempDir {
    let names: Vec<_> = (0..files.len()).map(|index| format!("x-{index}.uqff")).collect();
    let files: Vec<_> = names.iter().map(String::as_str).zip(files.iter().map(Vec::as_slice)).collect();
    folder_of(&files)
}

/// Opens a model of one shard with these entries.
pub fn open_entries(entries: &[Entry]) -> Result<Checkpoint> {
    Checkpoint::open(shards(&[versioned(entries)]).path())
}

/// `entries` with those of the same name replaced, and others added.
pub fn with(entries: &[Entry], changes: &[Entry]) -> Vec<Entry> {
    let kept = entries.iter().filter(|entry| !changes.iter().any(|change| change.0 == entry.0));
    kept.chain(changes).cloned().collect()
}

/// `entries` without the one of this name.
pub fn without(entries: &[Entry], name: &str) -> Vec<Entry> {
    let kept: Vec<_> = entries.iter().filter(|entry| entry.0 != name).cloned().collect();
    assert_eq!(kept.len() + 1, entries.len(), "{name}");
    kept
}

/// The weight of module `m`.
pub fn weight_of(entries: &[Entry]) -> Weight {
    open_entries(entries).unwrap().weight("m", None).unwrap()
}

/// All numbers of a tensor.
pub fn values(checkpoint: &Checkpoint, name: &str) -> Vec<f32> {
    dequantized(checkpoint, name).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}
