//! Strings of files on a terminal: what would drive it is escaped, and long ones are cut.

use crate::checkpoint::{folder_of, raw_file};
use crate::{command, run, writer};
use serde_json::{json, Value};
use std::process::Output;
use tempfile::TempDir;

/// Clears the screen, turns the direction, hides, and begins a line of its own.
const BAD: &str = "bad\u{1b}[2J\u{9b}1m\u{202e}\u{200b}\u{7f}\nerror";
const SHOWN: &str = r"bad\u001b[2J\u009b1m\u202e\u200b\u007f\nerror";

/// What went to stdout and to stderr, in which nothing but line breaks is left.
#[track_caller]
fn shown(output: &Output) -> String {
    let all = [&output.stdout[..], &output.stderr].concat();
    let text = String::from_utf8(all).unwrap();
    let bad = ['\u{1b}', '\u{9b}', '\u{202e}', '\u{200b}', '\u{7f}'];
    let is_forged = |line: &str| line.starts_with("error") && !line.starts_with("error: ");
    assert!(!text.contains(bad) && !text.lines().any(is_forged), "{text}");
    text
}

/// A checkpoint of two tensors of bad names, one of which can't be read.
fn hostile(model_type: &str) -> TempDir {
    let header = json!({
        format!("{BAD}.weight"): {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        format!("x{BAD}.weight"): {"dtype": "I8", "shape": [2, 2], "data_offsets": [16, 20]},
    });
    let config = json!({"model_type": model_type, "architectures": [model_type],
        "quantization": {"bits": 4, "group_size": 64, BAD: {"bits": 4}}});
    let file = raw_file(&header.to_string(), &[0; 20]);
    folder_of(&[("model.safetensors", &file), ("config.json", config.to_string().as_bytes())])
}

#[test]
fn names_in_safetensors_do_not_drive_the_terminal() {
    let folder = hostile(BAD);
    let path = folder.path().to_str().unwrap();
    for args in [
        &["inspect", path][..],
        &["inspect", path, "--tensors"],
        &["inspect", path, "--tensors", "--json"],
        &["verify", path, "--all"],
        &["verify", path, "--json"],
        &["diff", path, path, "--all"],
        &["diff", path, path, "--json"],
        &["plan", path, "--ranks", "2"],
        &["convert", path, "--bits", "4", "--dry-run"],
    ] {
        let text = shown(&run(args));
        assert!(text.contains(SHOWN), "{args:?}: {text}");
    }
    // For a program it is the name that is stored.
    let output = run(&["inspect", path, "--tensors", "--json"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["tensors"][0]["name"], format!("{BAD}.weight"));
    assert_eq!(report["architecture"], format!("{BAD} ({BAD})"));
}

#[test]
fn names_of_shards_and_strings_of_gguf_do_not_drive_the_terminal() {
    let index = json!({"weight_map": {"a": BAD}}).to_string();
    let sharded = folder_of(&[("model.safetensors.index.json", index.as_bytes())]);
    let gguf = |file: writer::File| folder_of(&[("model.gguf", &file.bytes())]);
    let architecture = gguf(writer::File::of(BAD));
    let key = gguf(writer::File::llama().u32(BAD, 1).u32(BAD, 1));
    let value = gguf(writer::File::of("llama").text("llama.attention.head_count", BAD));
    let name = gguf(writer::File::llama().tensor(writer::tensor(BAD, &[2, 2], 99, vec![0; 16])));
    let tokenizer = gguf(writer::File::llama().text("tokenizer.ggml.model", BAD));
    for folder in [&sharded, &architecture, &key, &value, &name, &tokenizer] {
        let path = folder.path().to_str().unwrap();
        let shown_once =
            [&["inspect", path][..], &["verify", path], &["generate", path]].map(|args| shown(&run(args)));
        assert!(shown_once.iter().any(|text| text.contains(r"bad\u")), "{shown_once:?}");
    }
}

#[test]
fn long_strings_are_cut() {
    let folder = hostile(&"long ".repeat(200_000));
    let path = folder.path().to_str().unwrap();
    for args in [&["inspect", path][..], &["plan", path, "--ranks", "2"]] {
        let text = shown(&run(args));
        assert!(text.len() < 20_000 && text.contains(" characters left out]"), "{args:?}: {}", text.len());
        // What is said behind it is still there.
        assert!(text.contains("config.json) is not supported; supported are cohere"), "{text}");
    }
}

/// With a stack of calls an error would be many lines.
#[test]
fn a_backtrace_is_no_part_of_an_error() {
    let tiny = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/assets/tiny");
    let folder = TempDir::new().unwrap();
    let out = folder.path().join("out.safetensors");
    let args = ["logits", tiny, "--tokens", "99999", "--out", out.to_str().unwrap()];
    let plain = run(&args);
    for variable in ["RUST_BACKTRACE", "RUST_LIB_BACKTRACE"] {
        let output = command(&args).env(variable, "1").output().unwrap();
        assert_eq!((output.status.code(), &output.stderr), (Some(1), &plain.stderr));
        assert_eq!(String::from_utf8_lossy(&output.stderr).lines().count(), 1);
    }
}
