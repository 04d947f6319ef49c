//! The peak memory of what a test does, in a process of its own.
#![allow(dead_code)] // Each test binary uses its part.

use std::env;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::Command;

/// Set for the process that is measured.
const CHILD: &str = "CANDLE_QUANT_TEST_CHILD_DIRECTORY";

/// In the process that is measured: does `work` on its folder, and prints the peak. False in any other.
pub fn measured(work: impl FnOnce(&Path)) -> bool {
    let Some(dir) = env::var_os(CHILD) else { return false };
    work(dir.as_ref());
    let status = fs::read_to_string("/proc/self/status").unwrap();
    println!("{}", status.lines().find(|line| line.starts_with("VmHWM:")).unwrap());
    true
}

/// Runs the test `name`, which calls [`measured`], in a process of its own; its peak resident set in bytes.
pub fn peak(name: &str, dir: &Path) -> usize {
    peak_with(name, dir, &[])
}

/// As [`peak`], with variables in the environment of the process.
pub fn peak_with(name: &str, dir: &Path, variables: &[(&str, String)]) -> usize {
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(CHILD, dir)
        .envs(variables.iter().map(|(name, value)| (name, value)))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let stdout = String::from_utf8_lossy(&output.stdout);
    let line = stdout.lines().find(|line| line.contains("VmHWM:")).expect(&stdout);
    let kib: usize = line.split_whitespace().rev().nth(1).unwrap().parse().unwrap();
    kib << 10
}

/// Writes `head` and behind it a hole of `size` bytes, which reads as zeros and needs no disk.
pub fn write_hole(path: &Path, head: &[u8], size: usize) {
    let mut file = File::create(path).unwrap();
    file.write_all(head).unwrap();
    file.set_len((head.len() + size) as u64).unwrap();
}
