//! `convert --calibrate`, `--statistics`, `--imatrix` and `--feedback`.

use super::convert::{run, tiny};
use crate::conversion::{bundled_path, tensors};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A text of a few stories in a folder of its own.
fn text() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text");
    let stories = fs::read_to_string(bundled_path("heldout.txt")).unwrap();
    fs::write(&text, stories.split("\n\n").take(4).collect::<Vec<_>>().join("\n\n")).unwrap();
    (folder, text)
}

fn str(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn statistics_are_kept_and_taken_again() {
    let (folder, text) = text();
    let [kept, first, again, without] =
        ["kept", "first", "again", "without"].map(|name| folder.path().join(name));
    let convert = |args: &[&str], out: &Path| {
        let args = [&["--bits", "3", "--search", "--json", "-q", "-o", str(out)], args].concat();
        let (code, stdout, stderr) = run(&tiny(), &args);
        assert_eq!((code, stderr.as_str()), (0, ""));
        serde_json::from_str::<Value>(&stdout).unwrap()
    };
    let report = convert(&["--calibrate", str(&text), "--statistics", str(&kept)], &first);
    assert_eq!(report["tensors"][0]["to"], "affine 3-bit g64, searched by statistics");
    assert!(report["tensors"][0]["weighted_rms"].as_f64().unwrap() > 0.);
    let bytes = fs::read(&kept).unwrap();
    convert(&["--statistics", str(&kept)], &again);
    assert!(tensors(&again) == tensors(&first));
    assert!(convert(&[], &without)["tensors"][0].get("weighted_rms").is_none());
    assert!(tensors(&without) != tensors(&first));
    // With the text, too: what is there is not done again.
    fs::remove_dir_all(&again).unwrap();
    convert(&["--calibrate", str(&text), "--statistics", str(&kept)], &again);
    assert!(tensors(&again) == tensors(&first) && fs::read(&kept).unwrap() == bytes);
    // Alone it has to be of the same source.
    let args = ["--requantize", "--bits", "3", "--search", "--dry-run", "--statistics", str(&kept)];
    let (code, _, stderr) = run(&bundled_path("tiny"), &args);
    assert!(code == 2 && stderr.contains("kept: statistics of another source"), "{stderr}");
    // What is there of another text is not replaced.
    fs::write(&text, "Another one.").unwrap();
    let args =
        ["--bits", "3", "--search", "--dry-run", "--calibrate", str(&text), "--statistics", str(&kept)];
    let (code, _, stderr) = run(&tiny(), &args);
    assert!(code == 2 && stderr.contains("kept: statistics of another text"), "{stderr}");
    assert!(fs::read(&kept).unwrap() == bytes);
}

#[test]
fn columns_are_scaled() {
    let (folder, text) = text();
    let out = folder.path().join("out");
    let args =
        ["--bits", "2", "--recipe", "uniform", "--awq", "--calibrate", str(&text), "--search", "--feedback"];
    let (code, stdout, stderr) = run(&tiny(), &[&args[..], &["--json", "-q", "-o", str(&out)]].concat());
    assert_eq!((code, stderr.as_str()), (0, ""));
    let report: Value = serde_json::from_str(&stdout).unwrap();
    let to = |tensor: &Value| tensor["to"].as_str().unwrap().to_owned();
    let scaled =
        report["tensors"].as_array().unwrap().iter().filter(|tensor| to(tensor).ends_with(", scaled"));
    assert!(scaled.count() > 4, "{report:#}");
    let file = fs::read(out.join("model.safetensors")).unwrap();
    let key = b"candle_quant.scales";
    assert!(file[..4000].windows(key.len()).any(|part| part == key));
    // Without --quiet, and without an output: how far it is, and what is not scaled.
    let (code, stdout, _) = run(&tiny(), &[&args[..], &["--dry-run"]].concat());
    assert!(code == 0 && stdout.contains(", scaled"), "{stdout}");
}

#[test]
fn options_without_an_effect_are_refused() {
    let (folder, text) = text();
    let (out, text) = (folder.path().join("out"), str(&text).to_owned());
    for (code, args, part) in [
        (1, &["--calibrate", &text][..], "--calibrate is for --search, --target-bpw, --feedback and --awq"),
        (1, &["--statistics", &text], "--statistics is for --search"),
        (1, &["--imatrix", &text], "--imatrix is for --search"),
        (1, &["--feedback"], "--calibrate"),
        (1, &["--awq"], "--calibrate"),
        (1, &["--search", "--imatrix", &text, "--calibrate", &text], "leave one of them out"),
        (1, &["--search", "--imatrix", &text, "--statistics", &text], "cannot be used with"),
        (2, &["--search", "--imatrix", &text], "no importance matrix of llama.cpp"),
        (2, &["--search", "--statistics", &text], "no statistics"),
        (4, &["--search", "--calibrate", "nothing-here"], "nothing-here"),
        (4, &["--search", "--imatrix", "nothing-here"], "nothing-here"),
        (4, &["--search", "--statistics", "nothing-here"], "nothing-here"),
    ] {
        let (found, stdout, stderr) = run(&tiny(), &[&["--bits", "4", "-o", str(&out)], args].concat());
        assert_eq!((found, stdout.as_str()), (code, ""), "{args:?}: {stderr}");
        assert!(stderr.contains(part), "{part} in {stderr}");
        assert!(!out.exists());
    }
}
