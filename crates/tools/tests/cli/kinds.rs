//! `verify`, `diff` and `inspect` on checkpoints of every kind.

use crate::damage::{file_of, run, run_json, Copy, Stored};
use half::f16;
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures").join(name)
}

/// A copy of an Ollama store, with every file in its place.
fn store(name: &str) -> TempDir {
    let (from, to) = (fixture("ollama").join(name), TempDir::new().unwrap());
    let mut directories = vec![from.clone()];
    while let Some(directory) = directories.pop() {
        let target = to.path().join(directory.strip_prefix(&from).unwrap());
        fs::create_dir_all(&target).unwrap();
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => directories.push(path),
                false => drop(fs::copy(&path, target.join(path.file_name().unwrap())).unwrap()),
            }
        }
    }
    to
}

const MANIFEST: &str = "manifests/registry.ollama.ai/library/tiny-moe/int4";

/// Kind, path, and how many warnings the reader has.
const KINDS: [(&str, &str, usize); 19] = [
    ("SLM1", "slm1/q4_0.slm", 2),
    ("SLM1", "slm1/q4_0_gqa_b32.slm", 1),
    ("UQFF", "uqff/afq4", 0),
    ("UQFF", "uqff/q4k", 0),
    ("UQFF", "uqff/moe_afq4", 0),
    ("UQFF", "uqff/hqq4", 0),
    ("Hugging Face awq", "hf/awq-g64", 0),
    ("Hugging Face bitsandbytes", "hf/bnb-int8", 0),
    ("Hugging Face bitsandbytes", "hf/bnb-nf4-nested", 0),
    ("Hugging Face compressed-tensors", "hf/ct-nvfp4", 0),
    ("Hugging Face fp8", "hf/fp8-128x128", 0),
    ("Hugging Face gptq", "hf/gptq-act-order-b4-g32", 0),
    ("Hugging Face gptq", "hf/gptq-b3-g32", 0),
    ("Hugging Face hqq", "hf/hqq-b4-g64", 0),
    ("Hugging Face modelopt", "hf/modelopt-nvfp4", 0),
    ("Hugging Face mxfp4", "mlx/gptoss-mxfp4-hf", 0),
    ("MLX", "mlx/gptoss-mxfp4-mlxlm", 0),
    ("MLX", "mlx/qwen3moe-nvfp4-global_scale", 0),
    ("Ollama", "ollama/current/manifests/registry.ollama.ai/library/tiny-moe/nvfp4", 1),
];

#[test]
fn fixtures_of_every_kind_are_fine_and_equal_to_themselves() {
    for (kind, name, warnings) in KINDS {
        let path = fixture(name);
        let path = path.to_str().unwrap();
        let (code, report) = run_json(&["verify", "--json", path]);
        assert_eq!((code, &report["kind"]), (0, &json!(kind)), "{report:#}");
        assert_eq!(report["findings"].as_array().unwrap().len(), warnings, "{report:#}");
        let (code, _) = run_json(&["verify", "--json", "--strict", path]);
        assert_eq!(code, if warnings == 0 { 0 } else { 2 }, "{name}");

        let (code, diff) = run_json(&["diff", "--json", path, path]);
        assert_eq!((code, &diff["equal"]), (0, &json!(true)), "{name}");
        assert_eq!(diff["tensors"].as_array().unwrap().len() as u64, report["tensors"], "{name}");

        let (code, text, _) = run(&["inspect", path]);
        assert!(code == 0 && text.starts_with(&format!("kind: {kind}\n")), "{name}: {text}");
        // Why something is dense is told.
        let told =
            text.lines().filter(|line| line.starts_with("note: ") && line.contains("dequantized")).count();
        let dequantized = name == "slm1/q4_0.slm";
        assert_eq!(told, usize::from(dequantized), "{text}");
    }
}

/// Where a config wants activations rounded, `inspect` and `verify` say in a line that they stay as they are; nothing is wrong
/// with such a checkpoint.
#[test]
fn activations_that_stay_unrounded_are_told() {
    for (name, wanted) in [
        ("ct-w8a8", Some("8-bit int")),
        ("ct-llmc-w4a8", Some("8-bit int")),
        ("ct-fp8-channel", Some("8-bit float")),
        ("fp8-128x128", Some("8-bit float")),
        ("modelopt-fp8-rows", Some("8-bit float")),
        ("modelopt-nvfp4", Some("4-bit float")),
        ("bnb-int8", Some("8-bit int")),
        ("bnb-nf4", None),
        ("ct-int8-channel", None),
        ("ct-mxfp4", None),
        ("gptq-b4-g128", None),
    ] {
        let path = fixture("hf").join(name);
        let path = path.to_str().unwrap();
        let (code, verified, _) = run(&["verify", "--strict", path]);
        let (_, inspected, _) = run(&["inspect", path]);
        for text in [&verified, &inspected] {
            let told: Vec<_> =
                text.lines().filter(|line| line.starts_with("note: activations stay")).collect();
            assert_eq!(told.len(), usize::from(wanted.is_some()), "{name}: {text}");
            assert!(
                told.iter().all(|line| line.contains(wanted.unwrap()) && line.contains("config")),
                "{told:?}"
            );
        }
        assert_eq!(code, 0, "{name}: {verified}");
        let (_, report) = run_json(&["verify", "--json", path]);
        assert_eq!(report["notes"].as_array().unwrap().len(), usize::from(wanted.is_some()), "{name}");
    }
}

#[test]
fn blobs_that_are_not_what_their_digest_says_are_found() {
    let whole = store("current");
    let path = whole.path().join(MANIFEST);
    let (code, report) = run_json(&["verify", "--json", path.to_str().unwrap()]);
    let manifest: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    // The config object of the manifest is a blob too.
    let blobs = manifest["layers"].as_array().unwrap().len() + 1;
    assert_eq!((code, &report["digests"]), (0, &json!(blobs)), "{report:#}");

    // The last byte of the blob of a norm: an element that is a little other.
    let layers = manifest["layers"].as_array().unwrap();
    let norm = layers.iter().find(|layer| layer["name"] == "model.norm.weight").unwrap();
    let digest = norm["digest"].as_str().unwrap();
    let blob = whole.path().join("blobs").join(digest.replace(':', "-"));
    let mut bytes = fs::read(&blob).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&blob, bytes).unwrap();
    let (code, stdout, _) = run(&["verify", path.to_str().unwrap()]);
    assert_eq!(code, 2);
    let line = stdout.lines().next().unwrap();
    let stated = digest.strip_prefix("sha256:").unwrap();
    for part in ["error: ", "model.norm.weight", "has the SHA-256", &format!("expected {stated}")] {
        assert!(line.contains(part), "{part} in {line}");
    }
    assert!(stdout.contains(&format!("{blobs} SHA-256 digests compared")), "{stdout}");

    let (code, diff) = run_json(&[
        "diff",
        "--json",
        fixture("ollama/current").join(MANIFEST).to_str().unwrap(),
        path.to_str().unwrap(),
    ]);
    let different = diff["tensors"].as_array().unwrap().iter().filter(|t| t["equal"] == json!(false));
    assert_eq!((code, different.count()), (1, 1));
    assert_eq!(diff["tensors"][0]["name"], "model.norm.weight");
}

#[test]
fn codes_that_mean_nan_are_found_in_other_layouts() {
    let copy = Copy::of(&fixture("uqff/mxfp4"));
    copy.patch_in("mxfp4-0.uqff", "model.layers.0.mlp.up_proj.weight.scales", 7, &[0xFF]);
    let (code, stdout, _) = run(&["verify", copy.path()]);
    let expected = "error: `model.layers.0.mlp.up_proj.weight`: scales: 1 of 2048 are NaN (E8M0 255)\n";
    assert!(code == 2 && stdout.starts_with(expected), "{stdout}");

    // The scale of the third block of 32: two bytes and 32 codes each.
    let copy = Copy::of(&fixture("uqff/q8_0"));
    let nan = f16::NAN.to_le_bytes();
    copy.patch_in("q8_0-0.uqff", "model.layers.0.mlp.up_proj.weight", 2 * 34, &nan);
    let (code, stdout, _) = run(&["verify", copy.path()]);
    let expected = "error: `model.layers.0.mlp.up_proj.weight`: 32 of 65536 numbers are NaN\n";
    assert!(code == 2 && stdout.starts_with(expected), "{stdout}");
}

/// Blocks of Q8_0 `[n, k]`: half the scale 2^-4, then signed bytes; and their numbers.
fn q8_0(n: usize, k: usize) -> (Vec<u8>, Vec<f32>) {
    let (mut bytes, mut numbers) = (Vec::new(), Vec::new());
    let mut state = 1u32;
    for _ in 0..n * k / 32 {
        bytes.extend(f16::from_f32(0.0625).to_le_bytes());
        for _ in 0..32 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let code = (state >> 24) as u8 as i8;
            bytes.push(code as u8);
            numbers.push(f32::from(code) * 0.0625);
        }
    }
    (bytes, numbers)
}

/// Weights of GGML types are compared in pieces of 2^18 numbers, too.
#[test]
fn a_gguf_file_beside_dense_tensors() {
    let shape = [700, 512];
    let (bytes, numbers) = q8_0(shape[0], shape[1]);
    let dims = shape.map(|dim| dim as u64);
    let embedding = crate::writer::tensor("token_embd.weight", &dims, 8, bytes);
    // Of an architecture that the reader does not know: names stay as they are.
    let file = crate::writer::write(&crate::writer::File::of("other").tensor(embedding).bytes());
    let gguf = file.path().join("model.gguf");
    let gguf = gguf.to_str().unwrap();
    let dense = |numbers: &[f32]| file_of(&[Stored::f32("token_embd.weight", &shape, numbers)]);
    let (_folder, equal) = dense(&numbers);
    let (code, stdout, stderr) = run(&["diff", gguf, &equal]);
    assert_eq!(
        (code, stdout.as_str()),
        (0, "0 of 1 tensors differ; 100.00 % of all weights were compared\n"),
        "{stderr}"
    );
    for position in [0, 512 * 512, 700 * 512 - 1] {
        let mut changed = numbers.clone();
        changed[position] += 0.25;
        let (_folder, other) = dense(&changed);
        let (code, diff) = run_json(&["diff", "--json", gguf, &other]);
        let worst = &diff["tensors"][0];
        assert_eq!((code, &worst["max_abs"], &worst["a"]), (1, &json!(0.25), &json!("ggml Q8_0")));
        let reference: f64 = numbers.iter().map(|number| f64::from(*number).powi(2)).sum();
        let expected = (0.25f64.powi(2) / reference).sqrt();
        let found = worst["relative_rms"].as_f64().unwrap();
        assert!((found - expected).abs() <= 1e-12 * expected, "{found}, expected {expected}");
    }
}
