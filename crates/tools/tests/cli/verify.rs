//! `candle-quant verify`: what it finds in damaged copies of the fixtures, and its exit codes.

use crate::common::{fixture, FIXTURES};
use crate::damage::{file_of, run, run_json, Copy, Stored};
use candle_core::{DType, Device};
use candle_quant::Checkpoint;
use candle_quant_models::Model;
use serde_json::{json, Value};
use std::fs;
use std::path::Path;

const NAN_BF16: [u8; 2] = [0xC0, 0x7F];
const UP: &str = "model.layers.0.mlp.up_proj";

/// Asserts exit code 2 and one error of this tensor; returns its message.
#[track_caller]
fn one_error(copy: &Copy, tensor: &str) -> String {
    let (code, report) = run_json(&["verify", "--json", copy.path()]);
    let errors: Vec<_> =
        report["findings"].as_array().unwrap().iter().filter(|f| f["severity"] == "error").collect();
    assert_eq!((code, &report["passed"], errors.len()), (2, &json!(false), 1), "{report:#}");
    assert_eq!(errors[0]["tensor"], tensor, "{report:#}");
    errors[0]["message"].as_str().unwrap().to_string()
}

#[test]
fn fixtures_are_fine() {
    for name in FIXTURES {
        let path = fixture(name);
        let (code, report) = run_json(&["verify", "--json", path.to_str().unwrap()]);
        assert_eq!((code, &report["passed"]), (0, &json!(true)), "{name}: {report:#}");
        assert_eq!(report["shapes_unchecked"], Value::Null, "{name}");
        // All bytes behind the headers are read.
        let mut bytes = 0;
        for entry in fs::read_dir(&path).unwrap() {
            let file = entry.unwrap().path();
            let file_name = file.file_name().unwrap().to_str().unwrap();
            if file_name.starts_with("model") && file_name.ends_with(".safetensors") {
                let content = fs::read(&file).unwrap();
                let header = u64::from_le_bytes(content[..8].try_into().unwrap());
                bytes += content.len() as u64 - 8 - header;
            }
        }
        assert_eq!(report["bytes"], bytes, "{name}");
    }
    let (code, stdout, stderr) = run(&["verify", "--strict", fixture("qwen3-mxfp8").to_str().unwrap()]);
    assert_eq!((code, stderr.as_str(), stdout.lines().count()), (0, "", 1), "{stdout}");
    assert!(stdout.starts_with("MLX: 24 tensors") && stdout.contains("nothing wrong"), "{stdout}");
}

#[test]
fn scales_and_biases_that_are_not_finite_are_counted() {
    let copy = Copy::of(&fixture("qwen3-affine-b4-g64"));
    copy.patch(&format!("{UP}.scales"), 6, &NAN_BF16);
    copy.patch(&format!("{UP}.scales"), 100, &[0x80, 0x7F]); // infinity
    let message = one_error(&copy, &format!("{UP}.weight"));
    // 256 rows of 128 / 64 groups.
    assert_eq!(message, "scales: 1 of 512 numbers are NaN and 1 infinite");

    let copy = Copy::of(&fixture("qwen3-affine-b4-g64"));
    copy.patch(&format!("{UP}.biases"), 0, &[0x80, 0xFF]); // negative infinity
    assert_eq!(one_error(&copy, &format!("{UP}.weight")), "biases: 1 of 512 numbers are infinite");
    let (code, stdout, stderr) = run(&["verify", copy.path()]);
    assert_eq!((code, stderr.as_str()), (2, ""));
    assert!(stdout.starts_with(&format!("error: `{UP}.weight`: biases: 1 of 512")), "{stdout}");
    assert!(stdout.lines().last().unwrap().contains("1 errors, 0 warnings"), "{stdout}");
}

#[test]
fn codes_that_mean_nan_are_counted() {
    for (name, part, byte, expected) in [
        ("llama-untied-mxfp4", "scales", 0xFF, "scales: 1 of 1024 are NaN (E8M0 255)"),
        ("qwen3-mxfp8", "scales", 0xFF, "scales: 1 of 1024 are NaN (E8M0 255)"),
        ("qwen3-nvfp4", "scales", 0x7F, "scales: 1 of 2048 are NaN (E4M3 0x7F or 0xFF)"),
        ("qwen3-nvfp4", "scales", 0xFF, "scales: 1 of 2048 are NaN (E4M3 0x7F or 0xFF)"),
        ("qwen3-mxfp8", "weight", 0x7F, "codes: 1 of 32768 are NaN (E4M3 0x7F or 0xFF)"),
        ("qwen3-mxfp8", "weight", 0xFF, "codes: 1 of 32768 are NaN (E4M3 0x7F or 0xFF)"),
    ] {
        let copy = Copy::of(&fixture(name));
        copy.patch(&format!("{UP}.{part}"), 77, &[byte]);
        assert_eq!(one_error(&copy, &format!("{UP}.weight")), expected, "{name}");
    }
    // 0x7F is 2^0 as a scale of MXFP4, a number like any other.
    let copy = Copy::of(&fixture("llama-untied-mxfp4"));
    copy.patch(&format!("{UP}.scales"), 77, &[0x7F]);
    assert_eq!(run(&["verify", "--strict", copy.path()]).0, 0);
}

#[test]
fn scales_too_large_for_f32_are_found() {
    let copy = Copy::of(&fixture("qwen3-mxfp8"));
    copy.patch(&format!("{UP}.scales"), 5, &[254]); // 2^127 for codes 160 to 191
    let codes = &copy.bytes_of(&format!("{UP}.weight"))[160..192];
    // 2^127 times 2 is too large; E4M3 has 2 and above from 0x40 on.
    let infinite = codes.iter().filter(|code| **code & 0x7F >= 0x40).count();
    assert!(infinite > 0);
    let message = one_error(&copy, &format!("{UP}.weight"));
    let expected =
        format!("dequantized, {infinite} of 32768 numbers are infinite: its scales are too large for f32");
    assert_eq!(message, expected);
}

#[test]
fn dense_tensors_that_are_not_finite_are_counted() {
    let copy = Copy::of(&fixture("qwen3-affine-b4-g64"));
    copy.patch("model.norm.weight", 8, &[NAN_BF16, NAN_BF16].concat());
    assert_eq!(one_error(&copy, "model.norm.weight"), "2 of 128 numbers are NaN");
    // Integers always are.
    let (_folder, file) = file_of(&[Stored::new("x", "I32", &[2], vec![0xFF; 8])]);
    let (code, stdout, _) = run(&["verify", &file]);
    assert!(code == 0 && stdout.contains("compared with no model: no config names one"), "{stdout}");
}

#[test]
fn shapes_are_compared_with_the_config() {
    let copy = Copy::of(&fixture("qwen3-mxfp8"));
    copy.change_config("vocab_size", 300);
    assert_eq!(
        one_error(&copy, "model.embed_tokens.weight"),
        "shape [256, 128]; the model of config.json has [300, 128]"
    );
    // K that fits no format is the reader's error.
    let copy = Copy::of(&fixture("qwen3-mxfp8"));
    copy.change_config("intermediate_size", 512);
    let (code, stdout, _) = run(&["verify", copy.path()]);
    let down = stdout.lines().find(|line| line.contains("layers.1.mlp.down_proj")).expect(&stdout);
    assert!(code == 2 && down.starts_with("error: ") && down.contains("K = 512"), "{down}");
}

#[test]
fn tensors_that_are_missing_or_too_many_are_named() {
    let copy = Copy::of(&fixture("qwen3-mxfp8"));
    copy.rewrite(|tensors| tensors.retain(|tensor| tensor.name != "model.layers.1.input_layernorm.weight"));
    let message = one_error(&copy, "model.layers.1.input_layernorm.weight");
    assert_eq!(message, "missing; the model of config.json needs it");

    let copy = Copy::of(&fixture("qwen3-mxfp8"));
    copy.change_config("num_hidden_layers", 5);
    let (code, stdout, _) = run(&["verify", copy.path()]);
    assert_eq!(code, 2);
    assert!(stdout.contains("error: 3 of 5 layers have no tensors at all, layer 2 the first"), "{stdout}");

    let copy = Copy::of(&fixture("qwen3-mxfp8"));
    copy.rewrite(|tensors| tensors.push(Stored::f32(&format!("{UP}.bias"), &[256], &[0.5; 256])));
    assert_eq!(one_error(&copy, &format!("{UP}.bias")), "a bias, which config.json says there is not");

    // AutoGPTQ has written zeros beside every layer.
    let copy = Copy::of(&fixture("qwen3-mxfp8"));
    copy.rewrite(|tensors| tensors.push(Stored::f32(&format!("{UP}.bias"), &[256], &[0.; 256])));
    assert_eq!(run(&["verify", "--strict", copy.path()]).0, 0);
    let checkpoint = Checkpoint::open(copy.path()).unwrap();
    assert!(Model::load(&checkpoint, DType::F32, &Device::Cpu).is_ok());

    // What the model does not use is odd only.
    let copy = Copy::of(&fixture("qwen3-mxfp8"));
    copy.rewrite(|tensors| tensors.push(Stored::f32("visual.weight", &[1, 2], &[0.5; 2])));
    let (code, stdout, _) = run(&["verify", copy.path()]);
    assert_eq!(code, 0, "{stdout}");
    let expected =
        "warning: 1 tensors that the model of config.json does not use, `visual.weight` among them\n";
    assert!(stdout.starts_with(expected), "{stdout}");
    let (code, report) = run_json(&["verify", "--strict", "--json", copy.path()]);
    assert_eq!((code, &report["passed"]), (2, &json!(false)));
    // Whoever runs the model is told, too, once.
    let out = tempfile::TempDir::new().unwrap();
    let out = out.path().join("logits.safetensors");
    let (code, _, stderr) = run(&["logits", copy.path(), "--tokens", "1,2", "--out", out.to_str().unwrap()]);
    let told = "1 tensors that the model does not use, `visual.weight` among them\n";
    assert!(code == 0 && stderr.starts_with("warning: ") && stderr.ends_with(told), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");

    // A head, where the embedding is the head.
    let copy = Copy::of(&fixture("qwen3-mxfp8"));
    copy.change_config("tie_word_embeddings", true);
    copy.rewrite(|tensors| tensors.push(Stored::f32("lm_head.weight", &[256, 128], &[0.5; 256 * 128])));
    let (code, stdout, _) = run(&["verify", copy.path()]);
    let expected = "does not use, `lm_head.weight` among them\n";
    assert!(code == 0 && stdout.starts_with("warning: 1 tensors") && stdout.contains(expected), "{stdout}");
}

#[test]
fn warnings_of_the_reader_are_listed() {
    let copy = Copy::of(&fixture("qwen3-mxfp8"));
    copy.change_config("quantization", json!({"group_size": 32, "bits": 8, "mode": "mxfp8", "taste": 1}));
    let (code, stdout, _) = run(&["verify", copy.path()]);
    assert!(code == 0 && stdout.contains("warning: ") && stdout.contains("quantization.taste"), "{stdout}");
    assert_eq!(run(&["verify", "--strict", copy.path()]).0, 2);
}

#[test]
fn what_cannot_be_opened_is_wrong_too() {
    let truncated = Copy::of(&fixture("qwen3-affine-b4-g64-sharded"));
    let shard = truncated.file("model-00002-of-00003.safetensors");
    let bytes = fs::read(&shard).unwrap();
    fs::write(&shard, &bytes[..bytes.len() - 1]).unwrap();
    let missing = Copy::of(&fixture("qwen3-affine-b4-g64-sharded"));
    missing.remove("model-00003-of-00003.safetensors");
    // The index names a tensor that its file has not.
    let contradiction = Copy::of(&fixture("qwen3-mxfp8"));
    let index = fs::read(contradiction.file("model.safetensors.index.json")).unwrap();
    contradiction.rewrite(|tensors| tensors.retain(|tensor| tensor.name != "model.norm.weight"));
    fs::write(contradiction.file("model.safetensors.index.json"), index).unwrap();
    // The first byte of the header is no longer an opening brace.
    let flipped = Copy::of(&fixture("qwen3-mxfp8"));
    let mut bytes = fs::read(flipped.file("model.safetensors")).unwrap();
    bytes[8] ^= 1;
    fs::write(flipped.file("model.safetensors"), bytes).unwrap();
    for (path, part) in [
        (truncated.path(), "model-00002-of-00003.safetensors"),
        (missing.path(), "this shard is missing"),
        (contradiction.path(), "`model.norm.weight`"),
        (flipped.path(), "malformed safetensors header"),
        ("nothing-here", "nothing-here"),
    ] {
        let (code, stdout, stderr) = run(&["verify", path]);
        assert_eq!((code, stderr.as_str()), (2, ""), "{stdout}");
        assert!(stdout.starts_with("error: ") && stdout.contains(part), "{part} in {stdout}");
        assert!(stdout.ends_with("not a checkpoint that can be opened\n"), "{stdout}");
        let (code, report) = run_json(&["verify", "--json", path]);
        assert_eq!((code, &report["kind"], &report["passed"]), (2, &Value::Null, &json!(false)));
    }
}

#[test]
fn the_worst_comes_first_and_layers_in_their_order() {
    let layers = [10, 2, 1];
    let mut tensors: Vec<_> =
        layers.iter().map(|i| Stored::f32(&format!("model.layers.{i}.x"), &[1], &[f32::NAN])).collect();
    tensors.push(Stored::f32("a", &[1], &[0.]));
    let (folder, file) = file_of(&tensors);
    fs::write(folder.path().join("config.json"), r#"{"quantization": {"odd": 1}}"#).unwrap();
    let (code, report) = run_json(&["verify", "--json", &file]);
    let findings = report["findings"].as_array().unwrap();
    let order: Vec<_> = findings.iter().map(|f| f["tensor"].as_str().unwrap_or("none")).collect();
    assert_eq!((code, order), (2, vec!["model.layers.1.x", "model.layers.2.x", "model.layers.10.x", "none"]));
    assert_eq!(findings[3]["severity"], "warning");

    let many: Vec<_> = (0..25).map(|i| Stored::f32(&format!("x{i}"), &[1], &[f32::INFINITY])).collect();
    let (_folder, file) = file_of(&many);
    let (_, stdout, _) = run(&["verify", &file]);
    assert_eq!(stdout.lines().count(), 20 + 2);
    assert!(stdout.contains("\nand 5 more; --all prints them\n"), "{stdout}");
    assert_eq!(run(&["verify", "--all", &file]).1.lines().count(), 25 + 1);
}

#[test]
fn an_empty_file_is_not_fine() {
    let (_folder, file) = file_of(&[]);
    let (code, stdout, _) = run(&["verify", &file]);
    assert!(code == 2 && stdout.starts_with("error: no tensors\n"), "{stdout}");
}

#[test]
fn exit_codes_of_usage_are_documented() {
    for args in [&["verify"][..], &["verify", ".", "--explode"], &["diff", "."]] {
        assert_eq!(run(args).0, 2, "{args:?}");
    }
    assert_eq!(run(&["inspect"]).0, 1);
    let (code, stdout, _) = run(&["--version"]);
    assert!(code == 0 && stdout.starts_with("candle-quant 0."), "{stdout}");
    for args in [&["--help"][..], &["verify", "--help"], &["diff", "--help"]] {
        let (code, stdout, _) = run(args);
        assert!(code == 0 && stdout.contains("Exit codes: "), "{args:?}: {stdout}");
    }
}

/// The tokenizers crate panics at it, at loading or at the first text.
#[test]
fn a_tokenizer_that_panics_is_wrong() {
    let copy = tempfile::TempDir::new().unwrap();
    let assets = std::path::Path::new(concat!(env!("CANDLE_QUANT_REPOSITORY"), "/assets/tiny"));
    for file in ["config.json", "model.safetensors"] {
        fs::copy(assets.join(file), copy.path().join(file)).unwrap();
    }
    let whole: Value = serde_json::from_slice(&fs::read(assets.join("tokenizer.json")).unwrap()).unwrap();
    let path = copy.path().to_str().unwrap();
    let charsmap = |text: &str| json!({"type": "Precompiled", "precompiled_charsmap": text});
    for (section, value) in [
        (
            "post_processor",
            json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}],
                "pair": [], "special_tokens": {}}),
        ),
        ("normalizer", charsmap("")),
        ("normalizer", charsmap("/////w==")),
        ("normalizer", charsmap("BAAAAP////8A")),
        ("decoder", json!({"type": "Strip", "content": ".", "start": 0, "stop": 99})),
    ] {
        let mut tokenizer = whole.clone();
        tokenizer[section] = value;
        fs::write(copy.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        let (code, stdout, stderr) = run(&["verify", path]);
        let errors =
            stdout.lines().filter(|line| line.starts_with("error: ") && line.contains("tokenizer.json"));
        assert_eq!((code, stderr.as_str(), errors.count()), (2, "", 1), "{stdout}");
        let (code, _, stderr) = run(&["generate", path, "--cpu"]);
        assert!(code == 1 && stderr.lines().count() == 1 && stderr.contains("tokenizer.json"), "{stderr}");
    }
    let mut tokenizer = whole;
    tokenizer["padding"] = json!({"strategy": "BatchLongest", "direction": "Left", "pad_to_multiple_of": 1u64 << 50,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "x"});
    fs::write(copy.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    assert_eq!(run(&["verify", path]).0, 0);
    assert_eq!(run(&["generate", path, "--cpu", "-n", "3"]).0, 0);
}

/// What `logits` refuses, `verify` does not pass.
#[test]
fn a_config_that_no_model_is_made_of_is_an_error() {
    for (field, value) in [("model_type", json!("unheard_of")), ("attn_logit_softcapping", json!(30.))] {
        let copy = Copy::of(&fixture("qwen3-affine-b4-g64"));
        let path = Path::new(copy.path()).join("config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        config[field] = value;
        fs::write(&path, config.to_string()).unwrap();
        let (code, stdout, _) = run(&["verify", copy.path()]);
        assert!(code == 2 && stdout.contains("error: ") && stdout.contains("1 errors"), "{field}: {stdout}");
        // The reason is told once.
        assert_eq!(
            stdout.matches("supported").count(),
            stdout.lines().next().unwrap().matches("supported").count()
        );
        assert!(stdout.ends_with("compared with no model: none is made of this config\n"), "{stdout}");
    }
}
