//! A conversion holds a few rows for each thread, not tensors; of what is repacked one weight at a time.
#![cfg(target_os = "linux")]

use candle_quant::checkpoint::Checkpoint;
use candle_quant::convert::{self, Options, Plan, Recipe, RunOptions};
use serde_json::{json, Value};
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::{env, fs};

/// Set for the child process that converts and is measured.
const CHILD: &str = "CANDLE_QUANT_TEST_CONVERT_DIRECTORY";

/// In the child process: converts, and prints the peak.
fn convert_here(format: &str) -> bool {
    let Some(dir) = env::var_os(CHILD) else { return false };
    let dir = Path::new(&dir);
    let source = Checkpoint::open(dir).unwrap();
    let plan = Plan::new(&source, &Options::mlx(Recipe::safe(format.parse().unwrap()))).unwrap();
    convert::run(&plan, dir.join("out"), &RunOptions::default(), &|_| ()).unwrap();
    let status = fs::read_to_string("/proc/self/status").unwrap();
    println!("{}", status.lines().find(|line| line.starts_with("VmHWM:")).unwrap());
    true
}

/// The peak resident set in KiB of a process that runs the test `name`, and the size of what it writes. The source
/// has zeros only.
fn peak(name: &str, tensors: &Value, size: usize, config: &str) -> (usize, usize) {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), config).unwrap();
    let header = tensors.to_string();
    let mut file = fs::File::create(dir.path().join("model.safetensors")).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    // A hole: zeros that need no disk.
    file.set_len((8 + header.len() + size) as u64).unwrap();

    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(CHILD, dir.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let stdout = String::from_utf8_lossy(&output.stdout);
    let line = stdout.lines().find(|line| line.contains("VmHWM:")).expect(&stdout);
    let written = fs::metadata(dir.path().join("out/model.safetensors")).unwrap().len();
    (line.split_whitespace().rev().nth(1).unwrap().parse().unwrap(), written as usize)
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
