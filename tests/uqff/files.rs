//! Which files make a UQFF model: shards, stems, reports, the residual, and directories that could mean two things.

use crate::checkpoint::{folder_of, rejected, warned};
use crate::uqff::{entry, file, layer, version, versioned, Entry};
use candle_quant::checkpoint::{Checkpoint, CheckpointKind, Weight};
use candle_quant::{Error, Result};
use serde_json::{json, Value};
use std::fs;
use tempfile::TempDir;

const REPORT: &str = "uqff_report.json";

/// An Unquant layer of this key.
fn unquant(key: &str) -> Vec<Entry> {
    let named = |(name, dtype, shape, bytes): Entry| (name.replacen('m', key, 1), dtype, shape, bytes);
    layer("Unquant").into_iter().map(named).collect()
}

/// A directory with empty-handed shards of these names: each has the version and one layer, called as the file.
fn folder(names: &[&str]) -> TempDir {
    let files: Vec<_> = names.iter().map(|name| (*name, versioned(&unquant(&key(name))))).collect();
    let files: Vec<_> = files.iter().map(|(name, bytes)| (*name, bytes.as_slice())).collect();
    folder_of(&files)
}

/// The key of the layer in the file `name`.
fn key(name: &str) -> String {
    name.replace('.', "_")
}

/// The files whose layers a checkpoint has.
fn opened(checkpoint: Result<Checkpoint>) -> Vec<String> {
    let checkpoint = checkpoint.unwrap();
    assert_eq!(checkpoint.kind(), CheckpointKind::Uqff);
    checkpoint.modules()
}

fn keys(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| key(name)).collect()
}

fn write_report(dir: &TempDir, outputs: &Value) {
    fs::write(dir.path().join(REPORT), json!({"schema": 1, "outputs": outputs}).to_string()).unwrap();
}

#[test]
fn a_model_is_named_by_directory_shard_or_stem() {
    let names: Vec<_> = (0..12).map(|index| format!("a-b-{index}.uqff")).collect();
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    let dir = folder(&names);
    for path in ["", "a-b-0.uqff", "a-b-11.uqff", "a-b", "a-b.uqff"] {
        let mut found = opened(Checkpoint::open(dir.path().join(path)));
        found.sort();
        let mut expected = keys(&names);
        expected.sort();
        assert_eq!(found, expected, "{path:?}");
    }
    let missing = dir.path().join("a");
    assert!(matches!(Checkpoint::open(&missing), Err(Error::Io { path, .. }) if path == missing));
    let no_dir = dir.path().join("none/a-b");
    assert!(matches!(Checkpoint::open(&no_dir), Err(Error::Io { path, .. }) if path == no_dir));
}

#[test]
fn a_name_without_number_is_one_file() {
    // Numbers are written without leading zeros.
    for name in ["model.uqff", "my-model-00.uqff", "my-model-.uqff", "my-model-x1.uqff"] {
        let dir = folder(&[name]);
        for path in ["", name, name.strip_suffix(".uqff").unwrap()] {
            assert_eq!(opened(Checkpoint::open(dir.path().join(path))), keys(&[name]), "{path:?}");
        }
    }
    // What is beside it is not asked.
    let dir = folder(&["model.uqff", "afq4-0.uqff", "afq4-2.uqff"]);
    assert_eq!(opened(Checkpoint::open(dir.path().join("model.uqff"))), keys(&["model.uqff"]));
}

#[test]
fn a_uqff_file_of_another_name_is_recognised_by_its_version() {
    let dir = folder_of(&[("weights.safetensors", &versioned(&layer("MXFP4")))]);
    let checkpoint = Checkpoint::open(dir.path().join("weights.safetensors")).unwrap();
    assert_eq!(checkpoint.kind(), CheckpointKind::Uqff);
    assert_eq!(checkpoint.weight("m", None).unwrap().format_name(), "mxfp4");
}

#[test]
fn r21_gaps_between_shards_are_refused() {
    for (names, missing, there) in [
        (&["x-0.uqff", "x-2.uqff"][..], "x-1.uqff", "[0, 2]"),
        (&["x-1.uqff"], "x-0.uqff", "[1]"),
        (&["x-7.uqff"], "x-0.uqff", "[7]"),
        (&["x-0.uqff", "x-1.uqff", "x-4294967295.uqff"], "x-2.uqff", "[0, 1, 4294967295]"),
    ] {
        let dir = folder(names);
        for path in ["", names[0], "x"] {
            let parts = [missing, "this shard is missing", there, "fetch the missing file", "rename"];
            rejected(Checkpoint::open(dir.path().join(path)), &parts);
        }
    }
}

#[test]
fn several_models_in_a_directory_have_to_be_told_apart() {
    let dir = folder(&["afq4-0.uqff", "afq4-1.uqff", "q4k-0.uqff", "own.uqff"]);
    let parts = ["3 UQFF models: afq4-0.uqff, own.uqff, q4k-0.uqff", "name one of these files"];
    rejected(Checkpoint::open(dir.path()), &parts);
    assert_eq!(opened(Checkpoint::open(dir.path().join("q4k"))), keys(&["q4k-0.uqff"]));
    assert_eq!(opened(Checkpoint::open(dir.path().join("own"))), keys(&["own.uqff"]));

    let dir = folder(&["x.uqff", "x-0.uqff"]);
    rejected(Checkpoint::open(dir.path()), &["2 UQFF models: x.uqff, x-0.uqff"]);
    rejected(Checkpoint::open(dir.path().join("x")), &["two UQFF models: x.uqff and shards x-<i>.uqff"]);
    assert_eq!(opened(Checkpoint::open(dir.path().join("x.uqff"))), keys(&["x.uqff"]));
    assert_eq!(opened(Checkpoint::open(dir.path().join("x-0.uqff"))), keys(&["x-0.uqff"]));
}

#[test]
fn uqff_beside_another_model_is_refused() {
    let dense = file(&[entry("norm.weight", "F16", &[1], [0; 2])]);
    let shard = versioned(&unquant("m"));
    let dir =
        folder_of(&[("x-0.uqff", &shard), ("model.safetensors", &dense), ("other.safetensors", &dense)]);
    let parts = ["two models: UQFF (x-0.uqff) and safetensors (model.safetensors)", "name the .uqff file"];
    rejected(Checkpoint::open(dir.path()), &parts);
    assert_eq!(opened(Checkpoint::open(dir.path().join("x-0.uqff"))), ["m"]);
    let checkpoint = Checkpoint::open(dir.path().join("model.safetensors")).unwrap();
    assert_eq!(checkpoint.kind(), CheckpointKind::Dense);
    // A report without any of its files does not make a dense model ambiguous.
    fs::remove_file(dir.path().join("x-0.uqff")).unwrap();
    write_report(&dir, &json!([{"quant": "x", "shards": ["x-0.uqff"]}]));
    assert_eq!(Checkpoint::open(dir.path()).unwrap().kind(), CheckpointKind::Dense);
}

#[test]
fn a_report_says_which_shards_belong_to_the_model() {
    let dir = folder(&["new-0.uqff", "new-1.uqff", "old-0.uqff"]);
    write_report(&dir, &json!([{"quant": "afq4", "shards": ["new-0.uqff", "new-1.uqff"], "layers": 2}]));
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    warned(&checkpoint, &[REPORT, "1 files that it does not list", "old-0.uqff"]);
    assert_eq!(opened(Ok(checkpoint)), keys(&["new-0.uqff", "new-1.uqff"]));
    // A file itself is opened without the report.
    assert_eq!(opened(Checkpoint::open(dir.path().join("old-0.uqff"))), keys(&["old-0.uqff"]));
    assert_eq!(opened(Checkpoint::open(dir.path().join("old"))), keys(&["old-0.uqff"]));

    let two = [
        json!({"quant": "a", "shards": ["new-0.uqff", "new-1.uqff"]}),
        json!({"quant": "b", "shards": ["old-0.uqff"]}),
    ];
    write_report(&dir, &json!(two));
    let parts = [REPORT, "2 UQFF models: new-0.uqff, new-1.uqff; old-0.uqff", "name a file of one of them"];
    rejected(Checkpoint::open(dir.path()), &parts);
}

#[test]
fn r20_reports_that_are_wrong_are_refused() {
    let dir = folder(&["x-0.uqff", "y-0.uqff"]);
    let output = |quant: &str, shards: &[&str]| json!({"quant": quant, "shards": shards});
    let refused = |part: &str| {
        rejected(
            Checkpoint::open(dir.path()),
            &[REPORT, part, "to ignore the report, open one of the .uqff files"],
        );
        assert_eq!(opened(Checkpoint::open(dir.path().join("x-0.uqff"))), keys(&["x-0.uqff"]));
    };
    for (outputs, part) in [
        (json!([]), "lists no outputs"),
        (json!([output("x", &[])]), "\"x\" lists no shards"),
        (json!([output("", &["x-0.uqff"])]), "without a name of its own: \"\""),
        (json!([output("x", &["x-0.uqff"]), output("x", &["y-0.uqff"])]), "without a name of its own: \"x\""),
        (json!([output("x", &["x-0.uqff", "x-1.uqff"])]), "\"x-1.uqff\", which is missing"),
        (json!([output("x", &["x-0.uqff", "x-0.uqff"])]), "\"x-0.uqff\" twice"),
        (json!([output("x", &["x-0.uqff"]), output("y", &["x-0.uqff"])]), "\"x-0.uqff\" twice"),
        (json!([output("x", &["../x-0.uqff"])]), "not a plain file name"),
        (json!([output("x", &["/etc/passwd"])]), "not a plain file name"),
        (json!([output("x", &[""])]), "not a plain file name"),
        (json!([{"quant": "x"}]), "malformed JSON"),
        (json!({}), "malformed JSON"),
    ] {
        write_report(&dir, &outputs);
        refused(part);
    }
    for (text, part) in [
        (r#"{"schema":2,"outputs":[{"quant":"x","shards":["x-0.uqff"]}]}"#, "schema 2"),
        (r#"{"outputs":[{"quant":"x","shards":["x-0.uqff"]}]}"#, "schema"),
        ("", "malformed JSON"),
        ("[]", "malformed JSON"),
    ] {
        fs::write(dir.path().join(REPORT), text).unwrap();
        refused(part);
    }
}

#[test]
fn a_report_without_any_shard_is_refused_as_such() {
    let dir = folder_of(&[]);
    write_report(&dir, &json!([{"quant": "x", "shards": ["x-0.uqff"]}]));
    rejected(Checkpoint::open(dir.path()), &[REPORT, "\"x-0.uqff\", which is missing"]);
}

/// A shard and a residual.
fn with_residual(shard: &[Entry], residual: &[Entry]) -> TempDir {
    folder_of(&[("x-0.uqff", &versioned(shard)), ("residual.safetensors", &file(residual))])
}

#[test]
fn the_residual_holds_what_is_not_quantized() {
    let residual = [
        entry("norm.weight", "BF16", &[2], [0x80, 0x3f, 0, 0x40]),
        entry("m.inv_freq", "F32", &[1], 2f32.to_le_bytes()),
        entry("count.weight", "U32", &[1], [7, 0, 0, 0]),
    ];
    let dir = with_residual(&layer("AFQ"), &residual);
    for path in ["", "x-0.uqff", "x"] {
        let checkpoint = Checkpoint::open(dir.path().join(path)).unwrap();
        assert!(checkpoint.tensor_names().eq(["count.weight", "m.inv_freq", "m.weight", "norm.weight"]));
        assert_eq!(crate::uqff::values(&checkpoint, "norm.weight"), [1., 2.]);
        assert!(matches!(checkpoint.weight("norm", None).unwrap(), Weight::Dense(_)));
        assert_eq!(crate::uqff::values(&checkpoint, "m.inv_freq"), [2.]);
        let parts = ["residual.safetensors", "`count.weight`", "a float weight", "U32"];
        rejected(checkpoint.weight("count", None).map(drop), &parts);
        assert!(checkpoint.warnings().is_empty());
    }
}

#[test]
fn the_residual_repeats_no_layer() {
    for name in ["m.weight", "m.bias"] {
        let layer = crate::uqff::with(&layer("AFQ"), &[entry("m.bias", "F16", &[2], [0; 4])]);
        let dir = with_residual(&layer, &[entry(name, "F16", &[2], [0; 4])]);
        let parts = ["residual.safetensors", &format!("`{name}`"), "each entry in one file", "x-0.uqff"];
        rejected(Checkpoint::open(dir.path()), &parts);
    }
}

#[test]
fn config_and_tokenizer_are_not_needed() {
    let dir = folder(&["x-0.uqff"]);
    let checkpoint = Checkpoint::open(dir.path().join("x")).unwrap();
    assert!(checkpoint.config().is_null() && checkpoint.tokenizer_file().is_none());
    fs::write(dir.path().join("config.json"), r#"{"quantization":{"bits":77,"mode":"none"}}"#).unwrap();
    fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
    let checkpoint = Checkpoint::open(dir.path().join("x")).unwrap();
    assert_eq!(checkpoint.config()["quantization"]["bits"], 77);
    assert_eq!(checkpoint.tokenizer_file(), Some(dir.path().join("tokenizer.json")));
    assert!(checkpoint.warnings().is_empty());
}

#[test]
fn missing_files_and_tensors_are_named() {
    let dir = folder(&["x-0.uqff"]);
    fs::create_dir(dir.path().join("x-1.uqff")).unwrap();
    rejected(Checkpoint::open(dir.path()), &["x-1.uqff", "not a regular file"]);
    let dir = folder_of(&[("x-0.uqff", &file(&[version([1, 2, 0]), unquant("model.a")].concat()))]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    rejected(
        checkpoint.weight("a", None).map(drop),
        &["`a.weight`", "found none", "there is `model.a.weight`"],
    );
}
