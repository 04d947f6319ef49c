//! A conversion holds a few rows for each thread, not tensors.
#![cfg(target_os = "linux")]

use candle_quant::checkpoint::Checkpoint;
use candle_quant::convert::{self, Options, Plan, Recipe, RunOptions};
use serde_json::json;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::{env, fs};

/// Set for the child process that converts and is measured.
const CHILD: &str = "CANDLE_QUANT_TEST_CONVERT_DIRECTORY";

/// N and K of two BF16 weights of 256 MiB.
const SHAPE: [usize; 2] = [32_768, 4096];

#[test]
fn a_conversion_needs_little_memory() {
    if let Some(dir) = env::var_os(CHILD) {
        let dir = Path::new(&dir);
        let source = Checkpoint::open(dir).unwrap();
        let plan = Plan::new(&source, &Options::mlx(Recipe::safe("4".parse().unwrap()))).unwrap();
        convert::run(&plan, dir.join("out"), &RunOptions::default(), &|_| ()).unwrap();
        let status = fs::read_to_string("/proc/self/status").unwrap();
        println!("{}", status.lines().find(|line| line.starts_with("VmHWM:")).unwrap());
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let size = SHAPE[0] * SHAPE[1] * 2;
    let info = |begin: usize| json!({"dtype": "BF16", "shape": SHAPE, "data_offsets": [begin, begin + size]});
    let header = json!({"a.weight": info(0), "b.weight": info(size)}).to_string();
    let mut file = fs::File::create(dir.path().join("model.safetensors")).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    // A hole: zeros that need no disk.
    file.set_len((8 + header.len() + 2 * size) as u64).unwrap();

    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", "memory::a_conversion_needs_little_memory", "--nocapture"])
        .env(CHILD, dir.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let stdout = String::from_utf8_lossy(&output.stdout);
    let line = stdout.lines().find(|line| line.contains("VmHWM:")).expect(&stdout);
    let kib: usize = line.split_whitespace().rev().nth(1).unwrap().parse().unwrap();
    let written = fs::metadata(dir.path().join("out/model.safetensors")).unwrap().len();
    assert!(written as usize > 2 * size * 9 / 32, "{written}");
    // A thread needs less than 8 MiB, the rest is the program.
    let threads = std::thread::available_parallelism().unwrap().get();
    let limit = (64 + 8 * threads) << 10;
    assert!(kib <= limit, "peak resident set {kib} KiB, limit {limit}");
    println!("peak {} MiB", kib >> 10);
}
