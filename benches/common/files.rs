//! Files of weights for benchmarks.
#![allow(dead_code)] // Each benchmark uses its part.

use candle_core::Result;
use serde_json::{json, Map, Value};
use std::fs::File;
use std::io::Write;
use std::path::Path;

/// The `config.json` of files of [`packed`] weights.
pub const CONFIG: &str = r#"{"quantization": {"bits": 4, "group_size": 64}}"#;

/// One tensor of a header: name, dtype, shape, bytes.
pub type Stored = (String, &'static str, Vec<usize>, usize);

/// A 4-bit weight in groups of 64.
pub fn packed(module: &str, n: usize, k: usize) -> [Stored; 3] {
    let groups = |part| (format!("{module}.{part}"), "BF16", vec![n, k / 64], n * k / 64 * 2);
    [(format!("{module}.weight"), "U32", vec![n, k / 8], n * k / 2), groups("scales"), groups("biases")]
}

/// Writes a safetensors file; returns its size. The data is not all zeros, which some file systems leave out.
pub fn write(path: &Path, tensors: &[Stored]) -> std::io::Result<usize> {
    let block: Vec<u8> = (0..1 << 20).map(|i| (i % 63) as u8).collect();
    write_block(path, tensors, &block)
}

/// Writes a safetensors file whose data is this block, again and again; returns its size.
pub fn write_block(path: &Path, tensors: &[Stored], block: &[u8]) -> std::io::Result<usize> {
    let (mut header, mut end) = (Map::new(), 0);
    for (name, dtype, shape, bytes) in tensors {
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [end, end + bytes]});
        header.insert(name.clone(), entry);
        end += bytes;
    }
    let header = Value::Object(header).to_string();
    let mut file = File::create(path)?;
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    let mut left = end;
    while left > 0 {
        let part = left.min(block.len());
        file.write_all(&block[..part])?;
        left -= part;
    }
    Ok(8 + header.len() + end)
}

/// The median of what `run` returns.
pub fn median(runs: usize, mut run: impl FnMut() -> Result<f64>) -> Result<f64> {
    let mut times = (0..runs).map(|_| run()).collect::<Result<Vec<_>>>()?;
    times.sort_by(f64::total_cmp);
    Ok(times[runs / 2])
}
