//! Small checkpoints for tests, right and wrong ones. Written without the crate under test and without
//! the safetensors crate, which could not write the wrong ones.
#![allow(dead_code)] // Each test binary uses its part.

use candle_quant::checkpoint::{Checkpoint, PackedWeight, Weight};
use candle_quant::Result;
use serde_json::{json, Value};
use std::fs;
use tempfile::TempDir;

/// One tensor: name, safetensors dtype, shape.
pub type Tensor<'a> = (&'a str, &'a str, &'a [usize]);

/// Where the tensors of every file written here begin, unless a test says otherwise: an odd offset.
pub const ODD: usize = 1;

/// A safetensors file from any header text and any data.
pub fn raw_file(header: &str, data: &[u8]) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(data);
    file
}

/// The header entry of a tensor that begins at `begin`, and its size in bytes.
pub fn entry((name, dtype, shape): Tensor, begin: usize) -> (String, Value, usize) {
    let bits = match dtype {
        "U8" | "I8" | "BOOL" | "F8_E4M3" | "F8_E8M0" => 8,
        "F16" | "BF16" | "I16" => 16,
        "U32" | "I32" | "F32" => 32,
        "F64" | "I64" => 64,
        other => panic!("{other}"),
    };
    let size = shape.iter().product::<usize>() * bits / 8;
    (name.into(), json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + size]}), size)
}

/// The header of a file with these tensors, padded so that the data begins at an odd offset, and the
/// number of data bytes.
pub fn header(tensors: &[Tensor]) -> (String, usize) {
    let mut header = json!({"__metadata__": {"format": "mlx"}});
    let mut end = 0;
    for tensor in tensors {
        let (name, value, size) = entry(*tensor, end);
        header[name] = value;
        end += size;
    }
    let mut header = header.to_string();
    if header.len() % 2 != ODD {
        header.push(' ');
    }
    (header, end)
}

/// A file of these tensors. The bytes of the data are 0, 1, 2, .. 62, 0, .. (finite in every dtype).
pub fn file(tensors: &[Tensor]) -> Vec<u8> {
    let (header, size) = header(tensors);
    let data: Vec<u8> = (0..size).map(|i| (i % 63) as u8).collect();
    raw_file(&header, &data)
}

/// A directory with these files.
pub fn folder_of(files: &[(&str, &[u8])]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        fs::write(dir.path().join(name), bytes).unwrap();
    }
    dir
}

/// A directory with `model.safetensors` and, unless null, `config.json`.
pub fn folder(config: &Value, tensors: &[Tensor]) -> TempDir {
    let config = config.as_object().map(|config| json!(config).to_string());
    let mut files = vec![("model.safetensors", file(tensors))];
    files.extend(config.map(|config| ("config.json", config.into_bytes())));
    let files: Vec<_> = files.iter().map(|(name, bytes)| (*name, bytes.as_slice())).collect();
    folder_of(&files)
}

/// Opens a checkpoint of these tensors and asks for the weight of module `m`.
pub fn weight(
    config: &Value,
    tensors: &[Tensor],
    in_features: Option<usize>,
) -> Result<(Checkpoint, Weight)> {
    let dir = folder(config, tensors);
    let checkpoint = Checkpoint::open(dir.path())?;
    let weight = checkpoint.weight("m", in_features)?;
    Ok((checkpoint, weight))
}

/// As [`weight`], for a module that has to be packed.
pub fn packed(
    config: &Value,
    tensors: &[Tensor],
    in_features: Option<usize>,
) -> Result<(Checkpoint, PackedWeight)> {
    match weight(config, tensors, in_features)? {
        (checkpoint, Weight::Packed(packed)) => Ok((checkpoint, packed)),
        (_, other) => panic!("{other:?}"),
    }
}

/// Asserts that the result is an error whose message has all these parts.
#[track_caller]
pub fn rejected<T>(result: Result<T>, parts: &[&str]) {
    let Err(error) = result else { panic!("accepted; expected an error with {parts:?}") };
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "no {part:?} in: {message}");
    }
}

/// Asserts that there is one warning, with all these parts.
#[track_caller]
pub fn warned(checkpoint: &Checkpoint, parts: &[&str]) {
    let warnings = checkpoint.warnings();
    assert_eq!(warnings.len(), 1, "{warnings:#?}");
    for part in parts {
        assert!(warnings[0].contains(part), "no {part:?} in: {}", warnings[0]);
    }
}
