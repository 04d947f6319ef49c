//! Loading needs little more memory than the packed weights themselves.
#![cfg(target_os = "linux")]

use crate::process::{measured, peak};
use crate::writer::{Kind, Model};
use candle_core::Device;
use candle_quant::checkpoint::Weight;
use candle_quant::Checkpoint;
use std::fs;
use std::path::Path;

#[test]
fn weights_need_little_more_than_their_size() {
    if measured(load_everything) {
        return;
    }
    let model =
        Model { hidden: 1024, layers: 1, heads: 8, kv_heads: 8, head_dim: 128, ffn: 40960, tied: true };
    let dir = tempfile::tempdir().unwrap();
    let bytes = model.write(Kind::Q8, &[]).bytes;
    assert!(bytes.len() > 110 << 20);
    fs::write(dir.path().join("model.slm"), &bytes).unwrap();
    let peak = peak("memory::weights_need_little_more_than_their_size", dir.path());
    assert!(peak > bytes.len() / 2, "the child loaded nothing: {peak} bytes");
    let limit = bytes.len() + bytes.len() / 10 + (64 << 20);
    assert!(peak <= limit, "peak resident set {peak} bytes, {} in the file, limit {limit}", bytes.len());
}

/// Loads all weights and keeps them.
fn load_everything(dir: &Path) {
    let checkpoint = Checkpoint::open(dir.join("model.slm")).unwrap();
    let load = |module: &String| match checkpoint.weight(module, None).unwrap() {
        Weight::Packed(packed) => packed.load(&Device::Cpu).unwrap(),
        other => panic!("{other:?}"),
    };
    let modules = checkpoint.modules();
    let weights: Vec<_> = modules.iter().filter(|module| module.contains("_proj")).map(load).collect();
    assert_eq!(weights.len(), 7);
}
