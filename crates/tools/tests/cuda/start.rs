//! One program for machines with and without CUDA.

use std::path::Path;
use std::process::Command;

/// Without `libraries`, CUDA's are where the loader finds nothing.
fn generate(libraries: bool, args: &[&str]) -> (String, String) {
    let model = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/assets/tiny");
    let mut command = Command::new(env!("CARGO_BIN_EXE_candle-quant"));
    command
        .args(["generate", model, "--raw", "-n", "8", "--temperature", "0", "--prompt", "Once"])
        .args(args);
    if !libraries {
        command.env_remove("LD_LIBRARY_PATH");
    }
    let output = command.output().unwrap();
    let [stdout, stderr] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    assert!(output.status.success(), "{stderr}");
    (stdout, stderr)
}

#[test]
fn the_program_starts_without_cuda_and_says_where_it_computes() {
    if Path::new("/proc/driver/nvidia").exists() {
        eprintln!("not tested: this machine has a driver wherever one looks for it");
        return;
    }
    for (ranks, of) in [("1", "there is no GPU to use"), ("2", "there are no 2 GPUs to use")] {
        let (text, said) = generate(false, &["--ranks", ranks]);
        let lines: Vec<_> = said.lines().filter(|line| line.contains("on the CPU")).collect();
        assert!(lines.len() == 1 && lines[0].contains(of), "{said}");
        assert!(lines[0].ends_with(": libcuda.so.1 is not on this machine"), "{said}");
        // The same as if the CPU had been asked for, which needs no explanation.
        let (expected, said) = generate(false, &["--ranks", ranks, "--cpu"]);
        assert!(!said.contains("libcuda"), "{said}");
        assert_eq!(text, expected);
    }
}

#[test]
fn the_program_finds_cuda_where_it_is() {
    if super::device().is_none() {
        return;
    }
    let (_, said) = generate(true, &[]);
    assert!(!said.contains("on the CPU"), "{said}");
}
