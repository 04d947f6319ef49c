//! The `candle-quant` binary: what it prints, writes, and says when it can't.

use crate::common::{distance, fixture, reference};
use crate::{command, run};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Output, Stdio};
use tempfile::TempDir;

fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

/// Asserts success and returns stdout.
fn succeed(args: &[&str]) -> String {
    let output = run(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    stdout(&output).to_string()
}

/// Asserts exit code 1, one line on stderr and none on stdout; returns the line.
fn fail(args: &[&str]) -> String {
    let output = run(args);
    assert_eq!(output.status.code(), Some(1), "{args:?}");
    assert_eq!(stdout(&output), "", "{args:?}");
    let line = String::from_utf8(output.stderr).unwrap();
    assert_eq!(line.trim_end().lines().count(), 1, "{args:?}: {line}");
    assert!(line.starts_with("candle-quant: "), "{line}");
    line
}

fn path(name: &str) -> String {
    fixture(name).to_str().unwrap().to_string()
}

/// A copy of a fixture with a tokenizer of one token a byte, which its 256 ids are just enough for.
fn with_tokenizer(name: &str) -> TempDir {
    let folder = TempDir::new().unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(fixture(name).join(file), folder.path().join(file)).unwrap();
    }
    crate::common::byte_tokenizer().save(folder.path().join("tokenizer.json"), false).unwrap();
    folder
}

/// What is no regular file stays what it is.
#[cfg(unix)]
#[test]
fn logits_replace_regular_files_alone() {
    let folder = TempDir::new().unwrap();
    let (target, link) = (folder.path().join("target"), folder.path().join("link"));
    fs::write(&target, "mine").unwrap();
    std::os::unix::fs::symlink(&target, &link).unwrap();
    let logits = |out: &Path| {
        let checkpoint = path("qwen3-nvfp4");
        run(&["logits", &checkpoint, "--tokens", "1", "--out", out.to_str().unwrap()])
    };
    for out in [&link, Path::new("/dev/null"), folder.path()] {
        let output = logits(out);
        let line = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{line}");
        assert!(line.contains("no regular file; give another output"), "{line}");
    }
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(fs::read(&target).unwrap(), b"mine");
    assert!(logits(&target).status.success());
    assert_ne!(fs::read(&target).unwrap(), b"mine");
}

#[test]
fn inspect_of_nothing_says_so() {
    let folder = TempDir::new().unwrap();
    let empty = safetensors::serialize(std::iter::empty::<(String, candle_core::Tensor)>(), None).unwrap();
    fs::write(folder.path().join("model.safetensors"), empty).unwrap();
    let output = run(&["inspect", folder.path().to_str().unwrap()]);
    let line = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{line}");
    assert!(line.contains("no tensors in it"), "{line}");
}

#[test]
fn inspect_tells_what_is_inside() {
    let text = succeed(&["inspect", &path("qwen3-affine-b4-g64")]);
    for line in ["kind: MLX", "architecture: Qwen3ForCausalLM (qwen3)", "bits per weight: 4.500"] {
        assert!(text.lines().any(|found| found == line), "{line} in {text}");
    }
    assert!(text.contains("15 x affine 4-bit g64") && !text.contains("up_proj"), "{text}");
    let text = succeed(&["inspect", "--tensors", &path("llama-mixed-custom")]);
    for part in ["2 x BF16", "1 x mxfp4", "model.layers.1.mlp.up_proj.weight  nvfp4  [256, 128]"] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn inspect_as_json_adds_up_to_the_file() {
    let name = "llama-mixed-custom";
    let report: Value =
        serde_json::from_str(&succeed(&["inspect", "--json", "--tensors", &path(name)])).unwrap();
    assert_eq!(report["kind"], "MLX");
    let sum = |key: &str| -> u64 {
        let formats = report["formats"].as_object().unwrap();
        formats.values().map(|share| share[key].as_u64().unwrap()).sum()
    };
    assert_eq!(sum("count"), 16);
    // 2 layers of 4 projections of 128 x 128 or half, 3 of 128 x 256; embedding and head 256 x 128.
    let layer = 2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 256;
    assert_eq!(sum("elements"), 2 * layer + 2 * 256 * 128);
    // Everything behind the header is told of.
    let file = fs::read(fixture(name).join("model.safetensors")).unwrap();
    let header = u64::from_le_bytes(file[..8].try_into().unwrap());
    let told = report["weight_bytes"].as_u64().unwrap() + report["other_bytes"].as_u64().unwrap();
    assert_eq!(told, file.len() as u64 - 8 - header);
    assert_eq!(report["tensors"].as_array().unwrap().len(), 16 + 5); // and five norms
}

#[test]
fn inspect_knows_every_format_of_the_fixtures() {
    for name in crate::common::FIXTURES {
        let report: Value =
            serde_json::from_str(&succeed(&["inspect", "--json", "--tensors", &path(name)])).unwrap();
        let expect: Value =
            serde_json::from_slice(&fs::read(fixture(name).join("expect.json")).unwrap()).unwrap();
        for (module, expected) in expect["modules"].as_object().unwrap() {
            let format = match expected["mode"].as_str().unwrap() {
                "affine" => format!("affine {}-bit g{}", expected["bits"], expected["group_size"]),
                mode => mode.to_string(),
            };
            let tensors = report["tensors"].as_array().unwrap();
            let found = tensors.iter().find(|tensor| tensor["name"] == format!("{module}.weight"));
            assert_eq!(found.unwrap()["format"], format.as_str(), "{name}: {module}");
        }
    }
}

#[test]
fn inspect_of_a_lone_file_and_of_a_stranger() {
    let file = fixture("qwen3-mxfp8").join("model.safetensors");
    assert!(succeed(&["inspect", file.to_str().unwrap()]).contains("15 x mxfp8"));
    let folder = with_tokenizer("qwen3-mxfp8");
    let config = fs::read_to_string(folder.path().join("config.json")).unwrap();
    fs::write(folder.path().join("config.json"), config.replace("\"qwen3\"", "\"mamba\"")).unwrap();
    let text = succeed(&["inspect", folder.path().to_str().unwrap()]);
    let config = folder.path().join("config.json");
    let told = format!("`mamba` ({}) is not supported", config.display());
    assert!(text.contains("note: ") && text.contains(&told), "{text}");
}

#[test]
fn inspect_lists_layers_in_counting_order_and_needs_no_config() {
    let weights = [("layers.10.weight", "F16", &[2usize, 4][..]), ("layers.2.weight", "F16", &[2, 4])];
    let vectors = [("layers.10.bias", "F32", &[2usize][..]), ("layers.9.bias", "F32", &[2])];
    let folder = crate::checkpoint::folder(&Value::Null, &[weights, vectors].concat());
    let model = folder.path().to_str().unwrap();
    let text = succeed(&["inspect", "--tensors", model]);
    let listed: Vec<_> = text.lines().filter(|line| line.starts_with("layers.")).collect();
    assert_eq!(
        listed,
        [
            "layers.2.weight  F16  [2, 4]  16 bytes",
            "layers.10.weight  F16  [2, 4]  16 bytes",
            "layers.9.bias  F32  [2]  8 bytes",
            "layers.10.bias  F32  [2]  8 bytes"
        ]
    );
    for line in ["kind: dense safetensors", "architecture: unknown", "bits per weight: 16.000"] {
        assert!(text.lines().any(|found| found == line), "{line} in {text}");
    }
}

#[test]
fn logits_are_written_as_the_model_gives_them() {
    let name = "qwen3-nvfp4";
    let folder = TempDir::new().unwrap();
    let out = folder.path().join("logits.safetensors");
    let (tokens, expected) = reference(name);
    let tokens = tokens.flatten_all().unwrap().to_vec1::<u32>().unwrap();
    let list = tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    for (dtype, bound) in [("f32", 3e-4), ("bf16", 0.3)] {
        let args =
            ["logits", &path(name), "--tokens", &list, "--out", out.to_str().unwrap(), "--dtype", dtype];
        assert_eq!(succeed(&args), "");
        let written = candle_core::safetensors::load(&out, &candle_core::Device::Cpu).unwrap();
        assert_eq!(written["tokens"].to_vec1::<u32>().unwrap(), tokens);
        assert_eq!(written["logits"].dims(), [40, 256]);
        assert!(distance(&written["logits"], &expected).max <= bound);
    }
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
}

#[test]
fn nothing_is_written_on_failure() {
    let folder = TempDir::new().unwrap();
    let out = folder.path().join("logits.safetensors");
    let out = out.to_str().unwrap();
    let line = fail(&["logits", &path("qwen3-nvfp4"), "--tokens", "1,256", "--out", out]);
    assert!(line.contains("256"), "{line}");
    fail(&["logits", &path("nothing-here"), "--tokens", "1", "--out", out]);
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
    let nowhere = folder.path().join("no/such/folder/logits");
    let line = fail(&["logits", &path("qwen3-nvfp4"), "--tokens", "1", "--out", nowhere.to_str().unwrap()]);
    assert!(line.contains("no/such/folder"), "{line}");
    assert_eq!(line.matches("os error").count(), 1, "the cause, once: {line}");
}

#[test]
fn generate_repeats_with_a_seed() {
    let folder = with_tokenizer("qwen3-affine-b4-g64");
    let model = folder.path().to_str().unwrap();
    let text = |seed: &str| {
        succeed(&[
            "generate", model, "--prompt", "Hello", "-n", "20", "--seed", seed, "--top-k", "50", "--cpu",
        ])
    };
    let first = text("1");
    assert!(first.starts_with("Hello") && first.len() > "Hello".len() + 1, "{first}");
    assert_eq!(text("1"), first);
    assert_ne!(text("2"), first);
    let output = run(&["generate", model, "--temperature", "0", "-n", "5"]);
    let report = String::from_utf8(output.stderr).unwrap();
    for part in ["prompt: 16 tokens", "decode: 4 tokens", "15 x affine 4-bit g64; 4.50 bits per weight"] {
        assert!(report.contains(part), "{part} in {report}");
    }
}

#[test]
fn generate_takes_a_kv_cache() {
    let folder = with_tokenizer("qwen3-affine-b4-g64");
    let model = folder.path().to_str().unwrap();
    let common = ["generate", model, "--prompt", "Hello", "-n", "9", "--cpu", "--seed", "3"];
    let text = |more: &[&str]| succeed(&[&common[..], more].concat());
    for formats in ["f16", "8bit", "bf16,4bit", "F32,8bit"] {
        assert!(text(&["--kv-cache", formats]).starts_with("Hello"), "{formats}");
    }
    assert_eq!(text(&["--kv-cache", "f32", "--max-tokens", "100"]), text(&[]));
    let bad = |more: &[&str]| {
        let output = run(&[&common[..], more].concat());
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    for formats in ["int8", "f16,", "f16,f16,f16"] {
        let message = bad(&["--kv-cache", formats]);
        assert!(message.contains("f32, f16, bf16, 8bit or 4bit"), "{message}");
    }
    let message = bad(&["--max-tokens", "3"]);
    assert!(message.contains("the KV cache holds at most 3"), "{message}");
}

#[test]
fn bad_input_is_one_clear_line() {
    let line = fail(&["inspect", &path("nothing-here")]);
    assert!(line.contains("nothing-here"), "{line}");
    assert_eq!(line.matches("os error").count(), 1, "the cause, once: {line}");
    let empty = TempDir::new().unwrap();
    let line = fail(&["inspect", empty.path().to_str().unwrap()]);
    assert!(line.contains(empty.path().to_str().unwrap()), "{line}");
    let line = fail(&["generate", &path("qwen3-mxfp8")]);
    assert!(line.contains("tokenizer.json"), "{line}");

    let folder = with_tokenizer("qwen3-mxfp8");
    let model = folder.path().to_str().unwrap();
    let line = fail(&["generate", model, "--temperature=-1"]);
    assert!(line.contains("temperature"), "{line}");
    let weights = folder.path().join("model.safetensors");
    let bytes = fs::read(&weights).unwrap();
    fs::write(&weights, &bytes[..bytes.len() / 2]).unwrap();
    for args in [vec!["inspect", model], vec!["generate", model]] {
        let line = fail(&args);
        assert!(line.contains("model.safetensors"), "{line}");
    }
}

#[test]
fn a_config_that_contradicts_the_weights_names_the_tensor() {
    let folder = with_tokenizer("qwen3-mxfp8");
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["vocab_size"] = 300.into();
    fs::write(&path, config.to_string()).unwrap();
    let line = fail(&["generate", folder.path().to_str().unwrap()]);
    for part in ["model.embed_tokens.weight", "[300, 128]", "[256, 128]"] {
        assert!(line.contains(part), "{part} in {line}");
    }
}

#[test]
fn usage_errors_and_help_have_their_exit_codes() {
    for args in [vec![], vec!["explode"], vec!["logits", ".", "--tokens", "x", "--out", "y"]] {
        assert_eq!(run(&args).status.code(), Some(1), "{args:?}");
    }
    assert!(succeed(&["--help"]).contains("inspect"));
    assert!(!Path::new("y").exists());
}

#[test]
#[cfg(unix)]
fn a_reader_that_leaves_is_no_failure() {
    let folder = with_tokenizer("qwen3-affine-b4-g64");
    let model = folder.path().to_str().unwrap();
    for args in [vec!["inspect", "--tensors", model], vec!["generate", model]] {
        let mut child = command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).to_string();
        assert!(output.status.success() && stderr.is_empty(), "{args:?}: {stderr}");
    }
}

#[test]
fn many_unreadable_tensors_are_summed_up() {
    let folder = with_tokenizer("qwen3-affine-b4-g64");
    fs::remove_file(folder.path().join("config.json")).unwrap();
    let model = folder.path().to_str().unwrap();
    let notes = |args: &[&str]| {
        let output = run(args);
        assert_eq!(output.status.code(), Some(1));
        stdout(&output).lines().filter(|line| line.starts_with("note: ")).map(str::to_string).collect()
    };
    // 15 packed weights whose K nothing tells.
    let few: Vec<String> = notes(&["inspect", model]);
    assert!(few[0].contains("config.json") && few[0].contains("no such file"), "{few:#?}");
    assert!(few.last().unwrap().contains("and 10 more"), "{few:#?}");
    let all: Vec<String> = notes(&["inspect", model, "--tensors"]);
    assert_eq!(all.len(), 1 + 15, "{all:#?}");
}

#[test]
fn inspect_without_weights_says_so() {
    let folder = TempDir::new().unwrap();
    let norm = candle_core::Tensor::new(&[1f32, 2.], &candle_core::Device::Cpu).unwrap();
    let bytes = safetensors::serialize([("norm.weight", norm)], None).unwrap();
    fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    let path = folder.path().to_str().unwrap();
    let text = succeed(&["inspect", path]);
    assert!(text.contains("weights: none, of two or more dimensions") && !text.contains("NaN"), "{text}");
    assert!(text.contains("0.000 MB of 1 other tensors"), "{text}");
    let json: Value = serde_json::from_str(&succeed(&["inspect", path, "--json"])).unwrap();
    assert_eq!((&json["bits_per_weight"], &json["formats"]), (&Value::Null, &serde_json::json!({})));
}

/// `assets/tiny` is made for 512 tokens.
#[test]
fn texts_are_no_longer_than_the_model_is_made_for() {
    let tiny = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/assets/tiny");
    let folder = TempDir::new().unwrap();
    let out = folder.path().join("out.safetensors");
    let tokens = |count: usize| vec!["7"; count].join(",");
    let logits = |count, more: &[&str]| {
        let tokens = tokens(count);
        let args = ["logits", tiny, "--tokens", &tokens, "--out", out.to_str().unwrap()];
        run(&[&args[..], more].concat())
    };
    let refused = |output: Output, needed: usize, context: usize| {
        let line = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{line}");
        let expected = format!("{needed} tokens, but the model is made for texts of at most {context}");
        assert!(line.contains(&expected) && line.contains("--context"), "{line}");
    };
    refused(logits(513, &[]), 513, 512);
    refused(logits(9, &["--context", "8"]), 9, 8);
    assert!(!out.exists());
    assert!(logits(512, &[]).status.success());
    assert!(logits(513, &["--context", "513"]).status.success());

    let generate = |more: &[&str]| {
        let args = ["generate", tiny, "--cpu", "--temperature", "0", "--prompt", "Once upon a time"];
        run(&[&args[..], more].concat())
    };
    // The text so far has been written, with the end of its line.
    let output = generate(&["--context", "20", "-n", "60"]);
    assert!(stdout(&output).starts_with("Once upon a time") && stdout(&output).ends_with('\n'), "{output:?}");
    refused(output, 21, 20);
    assert!(generate(&["--context", "600", "-n", "9"]).status.success());
    let long = "word ".repeat(600);
    let output = run(&["generate", tiny, "--cpu", "--prompt", &long]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("made for texts of at most 512"), "{output:?}");
}

/// What is computed in chunks is what is computed at once.
#[test]
fn logits_of_many_tokens_are_those_of_one_text() {
    use candle_core::{DType, Device, Tensor};
    let tiny = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/assets/tiny");
    let folder = TempDir::new().unwrap();
    let out = folder.path().join("out.safetensors");
    let tokens: Vec<u32> = (0..300).map(|index| index * 7 % 600).collect();
    let listed = tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    succeed(&["logits", tiny, "--tokens", &listed, "--out", out.to_str().unwrap()]);
    let found = candle_core::safetensors::load(&out, &Device::Cpu).unwrap()["logits"].clone();
    let checkpoint = candle_quant::Checkpoint::open(tiny).unwrap();
    let mut model = candle_quant_models::Model::load(&checkpoint, DType::F32, &Device::Cpu).unwrap();
    let ids = Tensor::new(tokens.as_slice(), &Device::Cpu).unwrap().unsqueeze(0).unwrap();
    let expected = model.forward(&ids, 0).unwrap().squeeze(0).unwrap();
    assert!(distance(&found, &expected).max <= 1e-4);
}
