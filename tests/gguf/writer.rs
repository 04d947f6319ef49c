//! Writes GGUF files, right and wrong ones, by the letter of the format.

use candle_quant::{Checkpoint, Result};
use std::path::Path;
use tempfile::TempDir;

/// Numbers of the types of values.
pub const U32: u32 = 4;
pub const F32: u32 = 6;
pub const BOOL: u32 = 7;
pub const TEXT: u32 = 8;
pub const ARRAY: u32 = 9;

/// A tensor: name, shape with rows before columns, number of the type, bytes.
#[derive(Clone)]
pub struct Tensor {
    pub name: String,
    pub dims: Vec<u64>,
    pub type_id: u32,
    /// Offset behind the header; the next free one if it is not given.
    pub offset: Option<u64>,
    pub data: Vec<u8>,
}

pub fn tensor(name: &str, dims: &[u64], type_id: u32, data: Vec<u8>) -> Tensor {
    Tensor { name: name.into(), dims: dims.to_vec(), type_id, offset: None, data }
}

pub fn f32_tensor(name: &str, dims: &[u64], values: &[f32]) -> Tensor {
    tensor(name, dims, 0, values.iter().flat_map(|value| value.to_le_bytes()).collect())
}

#[derive(Clone)]
pub struct File {
    pub version: u32,
    /// Key, type, and the bytes of the value.
    pub values: Vec<(Vec<u8>, u32, Vec<u8>)>,
    pub tensors: Vec<Tensor>,
    pub alignment: u64,
}

impl File {
    /// A file of this architecture.
    pub fn of(architecture: &str) -> Self {
        let file = Self { version: 3, values: vec![], tensors: vec![], alignment: 32 };
        file.text("general.architecture", architecture)
    }

    /// A small but complete model of the architecture llama: 1 layer, hidden 64, 2 heads, 1 of them for keys.
    pub fn llama() -> Self {
        Self::of("llama")
            .u32("llama.attention.head_count", 2)
            .u32("llama.attention.head_count_kv", 1)
            .u32("llama.embedding_length", 64)
            .u32("llama.feed_forward_length", 64)
            .u32("llama.block_count", 1)
            .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    }

    pub fn value(mut self, key: &str, kind: u32, bytes: Vec<u8>) -> Self {
        self.values.push((key.into(), kind, bytes));
        self
    }

    pub fn text(self, key: &str, value: &str) -> Self {
        self.value(key, TEXT, text(value.as_bytes()))
    }

    pub fn u32(self, key: &str, value: u32) -> Self {
        self.value(key, U32, value.to_le_bytes().to_vec())
    }

    pub fn f32(self, key: &str, value: f32) -> Self {
        self.value(key, F32, value.to_le_bytes().to_vec())
    }

    pub fn bool(self, key: &str, value: u8) -> Self {
        self.value(key, BOOL, vec![value])
    }

    /// An array of `count` elements of type `item` in these bytes.
    pub fn array(self, key: &str, item: u32, count: u64, bytes: &[u8]) -> Self {
        self.value(key, ARRAY, [&item.to_le_bytes()[..], &count.to_le_bytes(), bytes].concat())
    }

    pub fn texts<T: AsRef<str>>(self, key: &str, values: &[T]) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|value| text(value.as_ref().as_bytes())).collect();
        self.array(key, TEXT, values.len() as u64, &bytes)
    }

    pub fn tensor(mut self, tensor: Tensor) -> Self {
        self.tensors.push(tensor);
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let counts = [self.tensors.len() as u64, self.values.len() as u64];
        let mut file = [b"GGUF", &self.version.to_le_bytes()[..]].concat();
        file.extend(counts.iter().flat_map(|count| count.to_le_bytes()));
        for (key, kind, value) in &self.values {
            file.extend(text(key));
            file.extend(kind.to_le_bytes());
            file.extend(value);
        }
        let (mut next, mut data) = (0, Vec::new());
        for tensor in &self.tensors {
            file.extend(text(tensor.name.as_bytes()));
            file.extend((tensor.dims.len() as u32).to_le_bytes());
            file.extend(tensor.dims.iter().rev().flat_map(|dim| dim.to_le_bytes()));
            file.extend(tensor.type_id.to_le_bytes());
            file.extend(tensor.offset.unwrap_or(next).to_le_bytes());
            data.extend_from_slice(&tensor.data);
            data.resize(data.len().next_multiple_of(self.alignment as usize), 0);
            next = data.len() as u64;
        }
        file.resize(file.len().next_multiple_of(self.alignment as usize), 0);
        [file, data].concat()
    }

    pub fn open(&self) -> Result<Checkpoint> {
        open(&self.bytes())
    }
}

/// Opens `model.gguf` of these bytes.
pub fn open(bytes: &[u8]) -> Result<Checkpoint> {
    let dir = write(bytes);
    Checkpoint::open(path(&dir))
}

pub fn write(bytes: &[u8]) -> TempDir {
    crate::checkpoint::folder_of(&[("model.gguf", bytes)])
}

pub fn path(dir: &TempDir) -> impl AsRef<Path> {
    dir.path().join("model.gguf")
}

fn text(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text].concat()
}
