//! What a checkpoint says of where it comes from: `inspect`.

use crate::common::fixture;
use crate::conversion::bundled_path;
use crate::{run, writer};
use serde_json::Value;
use std::fs;
use std::path::Path;
use tempfile::tempdir;

/// Of each statement: what it is about, its text, where it is said.
#[track_caller]
fn statements(path: &Path) -> Vec<[String; 3]> {
    let output = run(&["inspect", path.to_str().unwrap(), "--json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let text = |statement: &Value, key: &str| statement[key].as_str().unwrap().to_owned();
    let all = report["provenance"].as_array().unwrap().iter();
    all.map(|statement| ["about", "text", "from"].map(|key| text(statement, key))).collect()
}

#[track_caller]
fn says(path: &Path, expected: &[[&str; 3]]) {
    let found = statements(path);
    for statement in expected {
        assert!(found.iter().any(|found| found == statement), "{statement:?} in {found:?}");
    }
}

#[test]
fn what_tools_write_is_told() {
    says(&fixture("qwen3-nvfp4"), &[["format", "mlx", "weights"]]);
    says(
        &fixture("../hf/modelopt-nvfp4"),
        &[
            ["producer", "modelopt", "hf_quant_config.json"],
            ["producer version", "0.47.0", "hf_quant_config.json"],
            ["recipe", "NVFP4", "hf_quant_config.json"],
        ],
    );
    says(&fixture("../uqff/q4k"), &[["uqff.producer", "mistral.rs", "weights"]]);
    says(&fixture("../hf/ct-nvfp4"), &[["method", "compressed-tensors", "config.json"]]);
    assert_eq!(statements(&bundled_path("tiny-bf16")), [["format", "pt", "weights"].map(str::to_owned)]);
}

#[test]
fn a_conversion_of_a_model_of_the_hub_says_what_it_was() {
    let commit = "0123456789abcdef0123456789abcdef01234567";
    let cache = tempdir().unwrap();
    let snapshot = cache.path().join("models--org--model/snapshots").join(commit);
    fs::create_dir_all(&snapshot).unwrap();
    for file in fs::read_dir(bundled_path("tiny-bf16")).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), snapshot.join(file.file_name())).unwrap();
    }
    says(&snapshot, &[["repository", "org/model", "path"], ["revision", commit, "path"]]);
    let out = cache.path().join("out");
    let done =
        run(&["convert", snapshot.to_str().unwrap(), "-o", out.to_str().unwrap(), "--bits", "4", "-q"]);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    says(
        &out,
        &[
            ["producer", concat!("candle-quant ", env!("CARGO_PKG_VERSION")), "candle-quant.json"],
            ["source", &format!("org/model@{commit}"), "candle-quant.json"],
            [
                "recipe",
                "21 x affine 4-bit g64, 1 x affine 5-bit g64: 4.585 bits per weight",
                "candle-quant.json",
            ],
        ],
    );
}

/// Of a GGUF file what is of interest, with nothing that a terminal would obey.
#[test]
fn what_a_gguf_file_says_is_told() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let file = writer::File::of("other")
        .text("general.quantized_by", "somebody \u{1b}[31m")
        .u32("general.file_type", 15)
        .text("general.description", "of no interest here")
        .tensor(writer::f32_tensor("weight", &[1, 1], &[1.]));
    fs::write(&path, file.bytes()).unwrap();
    let found = statements(&path);
    assert_eq!(found.len(), 2, "{found:?}");
    assert_eq!(found[1], ["file type", "15", "weights"].map(str::to_owned));
    let text = String::from_utf8(run(&["inspect", path.to_str().unwrap()]).stdout).unwrap();
    assert!(text.contains("quantized by: somebody \\u001b[31m (weights)"), "{text}");
}

/// What can't be read is a note: the rest is told.
#[test]
fn a_damaged_manifest_is_noted() {
    let folder = tempdir().unwrap();
    for file in fs::read_dir(bundled_path("tiny")).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), folder.path().join(file.file_name())).unwrap();
    }
    fs::write(folder.path().join("candle-quant.json"), "{").unwrap();
    let output = run(&["inspect", folder.path().to_str().unwrap()]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.contains("bits per weight: 4.500"), "{text}");
    assert!(
        text.contains("note: where it comes from is not known: ") && text.contains("candle-quant.json"),
        "{text}"
    );
}
