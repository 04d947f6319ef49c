//! Copies of fixtures with something changed in them, and the command line run on them.

use serde_json::{json, Map, Value};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Exit code, stdout and stderr of the command line.
pub fn run(args: &[&str]) -> (i32, String, String) {
    let output = crate::run(args);
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

/// As [`run`], for output that is JSON.
pub fn run_json(args: &[&str]) -> (i32, Value) {
    let (code, stdout, stderr) = run(args);
    (code, serde_json::from_str(&stdout).unwrap_or_else(|error| panic!("{error}: {stdout}{stderr}")))
}

/// A copy of a checkpoint's directory.
pub struct Copy(TempDir);

impl Copy {
    pub fn of(directory: &Path) -> Self {
        let copy = TempDir::new().unwrap();
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap();
            if !["refs.safetensors", "expect.json"].map(Path::new).contains(&Path::new(name)) {
                fs::copy(&path, copy.path().join(name)).unwrap();
            }
        }
        Self(copy)
    }

    pub fn path(&self) -> &str {
        self.0.path().to_str().unwrap()
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn remove(&self, file: &str) {
        fs::remove_file(self.file(file)).unwrap();
    }

    pub fn change_config(&self, key: &str, value: impl Into<Value>) {
        let path = self.file("config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        config[key] = value.into();
        fs::write(&path, config.to_string()).unwrap();
    }

    /// Changes bytes of one tensor in `model.safetensors`, from byte `offset` of it on.
    pub fn patch(&self, tensor: &str, offset: usize, bytes: &[u8]) {
        self.patch_in("model.safetensors", tensor, offset, bytes);
    }

    /// As [`patch`](Copy::patch), in another file of the same layout.
    pub fn patch_in(&self, file: &str, tensor: &str, offset: usize, bytes: &[u8]) {
        let path = self.file(file);
        let mut file = fs::read(&path).unwrap();
        let range = range_of(&file, tensor);
        assert!(offset + bytes.len() <= range.len());
        file[range.start + offset..][..bytes.len()].copy_from_slice(bytes);
        fs::write(path, file).unwrap();
    }

    /// The bytes of one tensor in `model.safetensors`.
    pub fn bytes_of(&self, tensor: &str) -> Vec<u8> {
        let file = fs::read(self.file("model.safetensors")).unwrap();
        file[range_of(&file, tensor)].to_vec()
    }

    /// Changes the list of tensors in `model.safetensors`: what `change` does to name, dtype, shape and bytes.
    /// The index, which would contradict, is removed.
    pub fn rewrite(&self, change: impl Fn(&mut Vec<Stored>)) {
        let path = self.file("model.safetensors");
        let file = fs::read(&path).unwrap();
        let (header, _) = header_of(&file);
        let mut tensors: Vec<_> = header
            .iter()
            .filter(|(name, _)| *name != "__metadata__")
            .map(|(name, info)| Stored {
                name: name.clone(),
                dtype: info["dtype"].as_str().unwrap().into(),
                shape: info["shape"].as_array().unwrap().iter().map(|d| d.as_u64().unwrap()).collect(),
                bytes: file[range_of(&file, name)].to_vec(),
            })
            .collect();
        change(&mut tensors);
        fs::write(path, write(&tensors)).unwrap();
        let _ = fs::remove_file(self.file("model.safetensors.index.json"));
    }
}

/// One tensor of a safetensors file.
#[derive(Clone)]
pub struct Stored {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<u64>,
    pub bytes: Vec<u8>,
}

impl Stored {
    pub fn new(name: &str, dtype: &str, shape: &[usize], bytes: Vec<u8>) -> Self {
        let shape = shape.iter().map(|&dim| dim as u64).collect();
        Self { name: name.into(), dtype: dtype.into(), shape, bytes }
    }

    pub fn f32(name: &str, shape: &[usize], numbers: &[f32]) -> Self {
        Self::new(name, "F32", shape, numbers.iter().flat_map(|number| number.to_le_bytes()).collect())
    }
}

/// A safetensors file of these tensors.
pub fn write(tensors: &[Stored]) -> Vec<u8> {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for Stored { name, dtype, shape, bytes } in tensors {
        let begin = data.len();
        data.extend_from_slice(bytes);
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, data.len()]});
        header.insert(name.clone(), entry);
    }
    let header = Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(&data);
    file
}

/// A file of these tensors, alone in a directory.
pub fn file_of(tensors: &[Stored]) -> (TempDir, String) {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("some.safetensors");
    fs::write(&path, write(tensors)).unwrap();
    let path = path.to_str().unwrap().to_string();
    (directory, path)
}

fn header_of(file: &[u8]) -> (Map<String, Value>, usize) {
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    (serde_json::from_slice(&file[8..8 + length]).unwrap(), 8 + length)
}

fn range_of(file: &[u8], tensor: &str) -> Range<usize> {
    let (header, data) = header_of(file);
    let offset = |index: usize| data + header[tensor]["data_offsets"][index].as_u64().unwrap() as usize;
    offset(0)..offset(1)
}
