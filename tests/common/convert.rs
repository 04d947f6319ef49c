//! What the tests of `convert` share: small sources, and readers of what is written that share no code with the crate.
#![allow(dead_code)] // Each test binary uses its part.

use candle_quant::Checkpoint;
use candle_quant_tools::convert::{self, ConvertOptions, ConvertPlan, RunOptions};
use serde_json::{json, Value};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Dtype, shape, bytes.
pub type Stored = (String, Vec<usize>, Vec<u8>);

/// An output in a folder that vanishes with this.
pub struct Out(TempDir);

impl Out {
    pub fn path(&self) -> PathBuf {
        self.0.path().join("out")
    }
}

/// A bundled model: `tiny` or `tiny-bf16`.
pub fn bundled(name: &str) -> Checkpoint {
    Checkpoint::open(bundled_path(name)).unwrap()
}

pub fn bundled_path(name: &str) -> PathBuf {
    PathBuf::from(env!("CANDLE_QUANT_REPOSITORY")).join("assets").join(name)
}

/// Converts to a new folder.
pub fn convert(source: &Checkpoint, options: &ConvertOptions) -> Out {
    let out = Out(tempfile::tempdir().unwrap());
    let plan = ConvertPlan::new(source, options).unwrap();
    convert::convert(&plan, out.path(), &RunOptions::default(), &|_| ()).unwrap();
    let left: Vec<_> = fs::read_dir(out.0.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["out"]);
    out
}

/// All tensors of the folder's safetensors files, by name.
pub fn tensors(folder: impl AsRef<Path>) -> BTreeMap<String, Stored> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            for (name, stored) in tensors_of(&path) {
                assert!(found.insert(name, stored).is_none());
            }
        }
    }
    found
}

/// All tensors of a safetensors file. They have to lie without gaps.
pub fn tensors_of(path: &Path) -> BTreeMap<String, Stored> {
    let bytes = fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: BTreeMap<String, Value> = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let data = &bytes[8 + length..];
    let (mut found, mut sum) = (BTreeMap::new(), 0);
    for (name, info) in header.into_iter().filter(|(name, _)| name != "__metadata__") {
        let shape: Vec<usize> = serde_json::from_value(info["shape"].clone()).unwrap();
        let dtype = info["dtype"].as_str().unwrap().to_owned();
        let range: [usize; 2] = serde_json::from_value(info["data_offsets"].clone()).unwrap();
        let bytes = &data[range[0]..range[1]];
        sum += bytes.len();
        found.insert(name, (dtype, shape, bytes.to_vec()));
    }
    assert_eq!(sum, data.len());
    found
}

/// One digest for each tensor, as `tests/peers/convert_mlx.py` makes them.
pub fn digests(tensors: &BTreeMap<String, Stored>) -> Vec<String> {
    let digest = |(name, (dtype, shape, bytes)): (&String, &Stored)| {
        let mut hasher = Sha256::new();
        hasher.update(format!("{name} {dtype} {shape:?}\n"));
        hasher.update(bytes);
        let hex: String = hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        hex[..16].to_owned()
    };
    tensors.iter().map(digest).collect()
}

/// All files of a folder.
pub fn files(folder: impl AsRef<Path>) -> BTreeMap<String, Vec<u8>> {
    let file =
        |entry: fs::DirEntry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap());
    fs::read_dir(folder).unwrap().map(|entry| file(entry.unwrap())).collect()
}

/// All files of an output but its manifest, which names the source.
pub fn content(folder: impl AsRef<Path>) -> BTreeMap<String, Vec<u8>> {
    let mut files = files(folder);
    files.remove("candle-quant.json").expect("a manifest");
    files
}

pub fn json_file(path: impl AsRef<Path>) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Numbers of a Gaussian look, the same on each machine.
pub fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..count).map(|_| (next() + next() + next()) * 0.1).collect()
}

/// A checkpoint of F32 tensors.
pub struct Source {
    pub folder: TempDir,
    header: Value,
    data: Vec<u8>,
}

impl Source {
    pub fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), header: json!({}), data: Vec::new() }
    }

    pub fn with(self, name: &str, shape: &[usize], numbers: &[f32]) -> Self {
        assert_eq!(shape.iter().product::<usize>(), numbers.len());
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        self.with_bytes(name, "F32", shape, &bytes)
    }

    /// A tensor of Gaussian numbers.
    pub fn random(self, name: &str, shape: &[usize]) -> Self {
        let seed = name.bytes().fold(7, |seed: u64, byte| seed.wrapping_mul(31).wrapping_add(byte.into()));
        let numbers = numbers(seed, shape.iter().product());
        self.with(name, shape, &numbers)
    }

    pub fn with_bytes(mut self, name: &str, dtype: &str, shape: &[usize], bytes: &[u8]) -> Self {
        let begin = self.data.len();
        self.data.extend_from_slice(bytes);
        self.header[name] = json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, self.data.len()]});
        self
    }

    pub fn with_config(self, config: &str) -> Self {
        fs::write(self.folder.path().join("config.json"), config).unwrap();
        self
    }

    /// Writes the file.
    pub fn finish(self) -> Self {
        let header = self.header.to_string();
        let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &self.data].concat();
        fs::write(self.folder.path().join("model.safetensors"), bytes).unwrap();
        self
    }

    pub fn open(&self) -> Checkpoint {
        Checkpoint::open(self.folder.path()).unwrap()
    }
}
