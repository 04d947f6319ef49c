//! The listed functions against the declarations of cudarc, as candle depends on it: one that is not listed could not be
//! linked.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

/// The files of the folder `symbols`, and where cudarc declares those functions.
const LIBRARIES: [(&str, &str); 7] = [
    ("cublas", "cublas"),
    ("cublasLt", "cublaslt"),
    ("cuda", "driver"),
    ("cudart", "runtime"),
    ("curand", "curand"),
    ("nccl", "nccl"),
    ("nvrtc", "nvrtc"),
];

#[test]
fn every_function_that_cudarc_declares_is_listed() {
    let output = Command::new(env!("CARGO"))
        .args([
            "metadata",
            "--format-version=1",
            "--locked",
            "--features=candle-quant/cuda",
            "--manifest-path",
        ])
        .arg(concat!(env!("CANDLE_QUANT_REPOSITORY"), "/Cargo.toml"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    let cudarc = packages.iter().find(|package| package["name"] == "cudarc").unwrap();
    let sources = Path::new(cudarc["manifest_path"].as_str().unwrap()).with_file_name("src");
    let symbols = Path::new(env!("CARGO_MANIFEST_DIR")).join("symbols");
    for (library, folder) in LIBRARIES {
        let source = fs::read_to_string(sources.join(folder).join("sys/mod.rs")).unwrap();
        let declared = source.split("pub unsafe fn ").skip(1);
        let declared = declared.map(|rest| rest.split(['(', '<']).next().unwrap().trim());
        let declared: BTreeSet<&str> =
            declared.filter(|name| !name.ends_with("culib") && !name.ends_with("present")).collect();
        let listed = fs::read_to_string(symbols.join(library)).unwrap();
        let listed: BTreeSet<&str> = listed.split_whitespace().collect();
        let missing: Vec<_> = declared.difference(&listed).collect();
        assert!(missing.is_empty(), "symbols/{library}: {missing:?}");
        // What only machine code calls: scripts/gpu/check.sh compares it with what the runtime has.
        let is_called =
            |name: &str| name.starts_with("__cuda") || name.ends_with("_ptsz") || name.ends_with("_ptds");
        let unknown = listed.difference(&declared).filter(|name| !is_called(name)).count();
        assert!(unknown == 0 && !declared.is_empty(), "symbols/{library}");
    }
    let files = fs::read_dir(symbols).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
    let mut files: Vec<String> = files.collect();
    files.sort();
    assert_eq!(files, LIBRARIES.map(|(library, _)| library));
}
