//! A conversion holds a few rows for each thread, not tensors; of what is repacked one weight at a time.
#![cfg(target_os = "linux")]

use candle_quant::checkpoint::Checkpoint;
use candle_quant_tools::convert::{self, ConvertOptions, ConvertPlan, Recipe, RunOptions};
use serde_json::{json, Value};
use std::fs;

#[path = "../../../../tests/common/process.rs"]
mod process;
use process::{measured, write_hole};

/// In the process that is measured: converts to `format`.
fn convert_here(format: &str) -> bool {
    measured(|dir| {
        let source = Checkpoint::open(dir).unwrap();
        let plan =
            ConvertPlan::new(&source, &ConvertOptions::mlx(Recipe::safe(format.parse().unwrap()))).unwrap();
        convert::convert(&plan, dir.join("out"), &RunOptions::default(), &|_| ()).unwrap();
    })
}

/// The peak resident set in KiB of a process that runs the test `name`, and the size of what it writes. The source
/// has zeros only.
fn peak(name: &str, tensors: &Value, size: usize, config: &str) -> (usize, usize) {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), config).unwrap();
    let header = tensors.to_string();
    let head = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    write_hole(&dir.path().join("model.safetensors"), &head, size);
    let kib = process::peak(name, dir.path()) >> 10;
    let written = fs::metadata(dir.path().join("out/model.safetensors")).unwrap().len();
    (kib, written as usize)
}

/// A thread needs less than 8 MiB, the rest is the program. In KiB.
fn allowance() -> usize {
    let threads = std::thread::available_parallelism().unwrap().get();
    (64 + 8 * threads) << 10
}

#[test]
fn a_conversion_needs_little_memory() {
    if convert_here("4") {
        return;
    }
    // Two BF16 weights of 256 MiB.
    let shape = [32_768, 4096];
    let size = shape[0] * shape[1] * 2;
    let info = |begin: usize| json!({"dtype": "BF16", "shape": shape, "data_offsets": [begin, begin + size]});
    let tensors = json!({"a.weight": info(0), "b.weight": info(size)});
    let (kib, written) = peak("memory::a_conversion_needs_little_memory", &tensors, 2 * size, "{}");
    assert!(written > 2 * size * 9 / 32, "{written}");
    assert!(kib <= allowance(), "peak resident set {kib} KiB, limit {}", allowance());
}

#[test]
fn a_stack_that_is_repacked_is_held_once() {
    if convert_here("5:g32") {
        return;
    }
    // A stack of 128 MiB of codes.
    let (experts, n, k) = (128, 1024, 2048);
    let (codes, scales) = (experts * n * k / 2, experts * n * k / 32);
    let tensors = json!({
        "m.switch_mlp.up_proj.weight":
            {"dtype": "U32", "shape": [experts, n, k / 8], "data_offsets": [0, codes]},
        "m.switch_mlp.up_proj.scales":
            {"dtype": "U8", "shape": [experts, n, k / 32], "data_offsets": [codes, codes + scales]},
    });
    let config = r#"{"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}}"#;
    let size = codes + scales;
    let (kib, written) = peak("memory::a_stack_that_is_repacked_is_held_once", &tensors, size, config);
    assert!(written > experts * n * k * 6 / 8, "{written}");
    // Read and then loaded.
    let limit = allowance() + 2 * (size >> 10);
    assert!(kib <= limit, "peak resident set {kib} KiB, limit {limit}");
}
