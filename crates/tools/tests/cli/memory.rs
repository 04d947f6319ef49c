//! What memory a model needs, and what fits: `inspect`, `plan --memory`, `convert --fit`.

use crate::conversion::bundled_path;
use crate::run;
use serde_json::Value;
use std::fs;
use tempfile::tempdir;

fn tiny() -> String {
    bundled_path("tiny-bf16").to_str().unwrap().to_owned()
}

#[track_caller]
fn json(args: &[&str]) -> Value {
    let output = run(&[args, &["--json"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// This exit code, and one line on stderr, which has all of `parts`.
#[track_caller]
fn refused(args: &[&str], code: i32, parts: &[&str]) {
    let output = run(args);
    let line = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), line.lines().count()), (Some(code), 1), "{line}");
    parts.iter().for_each(|part| assert!(line.contains(part), "{part} in {line}"));
}

/// The bundled model has 3 layers with 2 key heads of 64 elements.
#[test]
fn inspect_tells_what_a_text_takes() {
    for (args, tokens, bytes_of_number) in [
        (&[][..], 512, 4),
        (&["--context", "128"], 128, 4),
        (&["--context", "128", "--kv-cache", "f16"], 128, 2),
        (&["--context", "128", "--dtype", "bf16"], 128, 2),
    ] {
        let memory = &json(&[&["inspect", &tiny()], args].concat())["memory"];
        assert_eq!(memory["context"], tokens);
        let needs = &memory["ranks"][0];
        assert_eq!(needs["cache"], 3 * 2 * 2 * 64 * tokens * bytes_of_number, "{memory}");
        let parts = ["weights", "cache", "workspace"].map(|part| needs[part].as_u64().unwrap());
        assert_eq!(needs["total"], parts.iter().sum::<u64>());
        assert!(parts[0] > 0 && parts[2] > 0, "{memory}");
    }
    let text = run(&["inspect", &tiny(), "--context", "128", "--kv-cache", "8bit,4bit"]).stdout;
    let text = String::from_utf8(text).unwrap();
    assert!(text.contains("memory for 128 tokens, f32 activations, KV cache in 8bit,4bit: "), "{text}");
}

#[test]
fn what_a_plan_says_fits_is_what_convert_chooses() {
    let memory = "5500KB";
    let plan = json(&["plan", &tiny(), "--memory", memory, "--context", "256"]);
    let formats = plan["fits"]["formats"].as_array().unwrap();
    // The largest first, and none fits that is larger than one that does not.
    let totals: Vec<_> = formats.iter().map(|fit| fit["ranks"][0]["total"].as_u64().unwrap()).collect();
    assert!(totals.is_sorted_by(|a, b| a >= b), "{totals:?}");
    assert!(formats.iter().zip(&totals).all(|(fit, total)| fit["fits"] == (*total <= 5_500_000)), "{plan}");
    assert_eq!((&formats[0]["format"], &formats[0]["bits_per_weight"]), (&"as stored".into(), &16.0.into()));
    assert_eq!(plan["fits"]["widest"], "affine:6:g64");

    let folder = tempdir().unwrap();
    let out = folder.path().join("out").to_str().unwrap().to_owned();
    let done = run(&["convert", &tiny(), "-o", &out, "--fit", memory, "--context", "256", "-q"]);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    // What was made needs what was planned.
    let of = |format: &str| formats.iter().find(|fit| fit["format"] == format).unwrap();
    let made = json(&["inspect", &out, "--context", "256"]);
    assert_eq!(made["memory"]["ranks"][0], of("affine:6:g64")["ranks"][0]);
    let bits = |value: &Value| (value["bits_per_weight"].as_f64().unwrap() * 1e6).round();
    assert_eq!(bits(&made), bits(of("affine:6:g64")));

    // Others, if they are all that there is to choose from.
    let plan = json(&[
        "convert",
        &tiny(),
        "--dry-run",
        "--fit",
        memory,
        "--context",
        "256",
        "--candidates",
        "mxfp4,nvfp4",
    ]);
    let formats: Vec<_> = plan["tensors"].as_array().unwrap().iter().map(|tensor| &tensor["to"]).collect();
    assert!(
        formats.contains(&&"nvfp4".into()) && !formats.contains(&&"affine 6-bit g64".into()),
        "{formats:?}"
    );
}

#[test]
fn a_plan_for_ranks_is_for_the_rank_that_needs_most() {
    let plan = json(&["plan", &tiny(), "--ranks", "3", "--memory", "3MB", "--context", "256"]);
    let needs = plan["memory"]["ranks"].as_array().unwrap();
    let most = needs.iter().map(|rank| rank["total"].as_u64().unwrap()).max().unwrap();
    let stored = &plan["fits"]["formats"][0];
    assert_eq!(stored["ranks"], plan["memory"]["ranks"]);
    assert_eq!((needs.len(), stored["fits"].as_bool().unwrap()), (3, most <= 3_000_000));
    let text = String::from_utf8(run(&["plan", &tiny(), "--ranks", "2", "--memory", "3MB"]).stdout).unwrap();
    assert!(text.contains("formats for 3.000 MB of each rank:"), "{text}");
    assert!(text.contains("  rank 1: "), "{text}");
}

#[test]
fn what_does_not_fit_is_said() {
    let folder = tempdir().unwrap();
    let out = folder.path().join("out").to_str().unwrap().to_owned();
    let fit = |source: &str, memory: &str, more: &[&str], code: i32, parts: &[&str]| {
        refused(&[&["convert", source, "-o", &out, "--fit", memory], more].concat(), code, parts);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    };
    fit(&tiny(), "2MB", &[], 2, &["no format fits into 2.000 MB for 512 tokens", "affine:2:g64"]);
    let packed = bundled_path("tiny").to_str().unwrap().to_owned();
    fit(&packed, "2MB", &[], 2, &["packed already"]);
    let usage = |more: &[&str], part: &str| {
        let output = run(&[&["convert", &tiny(), "-o", &out], more].concat());
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains(part), "{part} in {text}");
    };
    usage(&["--fit", "2MB", "--bits", "4"], "cannot be used with");
    usage(&["--fit", "2MB", "--recipe", "safe"], "cannot be used with");
    usage(&["--bits", "4", "--context", "9"], "--context is for --fit");
    // Before anything is opened.
    let there = folder.path().to_str().unwrap();
    refused(&["convert", "no/such", "-o", there, "--fit", "2MB"], 1, &["it exists already"]);
    usage(&["--fit", "none"], "expected bytes, KB, MB or GB");

    let text = String::from_utf8(run(&["plan", &packed, "--memory", "2MB"]).stdout).unwrap();
    assert!(text.contains("none fits: a shorter --context"), "{text}");
    assert!(text.contains("note: its matrices are packed already"), "{text}");
    let text = String::from_utf8(run(&["plan", &packed, "--memory", "1GB"]).stdout).unwrap();
    assert!(text.contains("  fits\n") && !text.contains("none fits"), "{text}");
}
