//! Loading needs little more memory than the packed weights themselves.
#![cfg(target_os = "linux")]

use candle_core::Device;
use candle_quant::checkpoint::{Checkpoint, Weight};
use serde_json::json;
use std::{env, fs, io::Write, path::Path, process::Command};

/// Set for the child process that loads and is measured.
const CHILD: &str = "CANDLE_QUANT_TEST_LOAD_DIRECTORY";

/// 4-bit, group size 64: name, N, K. One is much larger than the others, as embeddings are.
const WEIGHTS: [(&str, usize, usize); 4] =
    [("embedding", 65_536, 4096), ("a", 16_384, 4096), ("b", 4096, 16_384), ("c", 16_384, 4096)];

#[test]
fn loading_needs_little_more_than_the_packed_size() {
    if let Some(dir) = env::var_os(CHILD) {
        return load_everything(dir.as_ref());
    }
    let dir = tempfile::tempdir().unwrap();
    let packed_size = write_checkpoint(dir.path());
    assert!(packed_size > 250 << 20);

    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", "loading_needs_little_more_than_the_packed_size", "--nocapture"])
        .env(CHILD, dir.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let stdout = String::from_utf8_lossy(&output.stdout);
    let line = stdout.lines().find(|line| line.contains("VmHWM:")).expect(&stdout);
    let kib: usize = line.split_whitespace().rev().nth(1).unwrap().parse().unwrap();
    let peak = kib << 10;
    assert!(peak > packed_size, "the child loaded nothing: {line}");
    let limit = packed_size + packed_size / 10 + (64 << 20);
    assert!(peak <= limit, "peak resident set {peak} bytes for {packed_size} packed bytes, limit {limit}");
    println!("peak {} MiB, packed {} MiB", peak >> 20, packed_size >> 20);
}

/// Loads all weights, keeps them, and prints the peak of the resident set.
fn load_everything(dir: &Path) {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let load = |module: &String| match checkpoint.weight(module, None).unwrap() {
        Weight::Packed(packed) => packed.load(&Device::Cpu).unwrap(),
        other => panic!("{other:?}"),
    };
    let modules = checkpoint.modules();
    let tensors: Vec<_> = modules.iter().map(load).collect();
    assert_eq!(tensors.len(), WEIGHTS.len());
    let status = fs::read_to_string("/proc/self/status").unwrap();
    println!("{}", status.lines().find(|line| line.starts_with("VmHWM:")).unwrap());
}

/// Writes a checkpoint whose weights are a hole in the file, which reads as zeros and needs no disk.
/// Returns the bytes of its tensors.
fn write_checkpoint(dir: &Path) -> usize {
    let mut header = json!({});
    let mut end = 0;
    for (module, n, k) in WEIGHTS {
        for (suffix, dtype, width, size) in
            [("weight", "U32", k / 8, 4), ("scales", "F16", k / 64, 2), ("biases", "F16", k / 64, 2)]
        {
            let begin = end;
            end += n * width * size;
            header[format!("{module}.{suffix}")] =
                json!({"dtype": dtype, "shape": [n, width], "data_offsets": [begin, end]});
        }
    }
    let header = header.to_string();
    let mut file = fs::File::create(dir.join("model.safetensors")).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len((8 + header.len() + end) as u64).unwrap();
    fs::write(dir.join("config.json"), r#"{"quantization":{"bits":4,"group_size":64}}"#).unwrap();
    end
}
