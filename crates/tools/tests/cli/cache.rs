//! `--quantize FORMAT --cache`.

use crate::command;
use std::path::Path;
use std::process::{Output, Stdio};
use std::thread;
use std::time::Duration;

const DENSE: &str = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/assets/tiny-bf16");

/// The program with this cache.
fn run(cache: &Path, args: &[&str]) -> Output {
    command(args).env("CANDLE_QUANT_CACHE", cache).output().unwrap()
}

/// The text, and what is said.
fn generate(cache: &Path, args: &[&str]) -> (String, String) {
    let args = [&["generate", DENSE, "--cpu", "-n", "30", "--temperature", "0"], args].concat();
    let output = run(cache, &args);
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (text(&output.stdout), text(&output.stderr))
}

#[test]
fn what_was_quantized_is_opened_the_next_time() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache");
    let (expected, _) = generate(&cache, &["--quantize", "3"]);
    assert!(!expected.is_empty() && !cache.exists());
    let (made, said) = generate(&cache, &["--quantize", "3", "--cache"]);
    assert!(made == expected && said.contains("quantizes into"), "{said}");
    let (found, said) = generate(&cache, &["--quantize", "3", "--cache", "--ranks", "2"]);
    assert!(found == expected, "{said}");
    let lines: Vec<_> = said.lines().filter(|line| line.contains("was quantized before")).collect();
    let [line] = lines[..] else { panic!("{said}") };
    let model = line.strip_prefix("opens ").unwrap().split(',').next().unwrap();
    assert!(
        Path::new(model).starts_with(cache.join("quantized")) && model.contains("/tiny-bf16-"),
        "{model}"
    );

    let listed = run(&cache, &["list", "--json"]);
    let listed: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
    let ours: Vec<_> =
        listed.as_array().unwrap().iter().filter(|entry| entry["source"] == "quantized").collect();
    assert_eq!(ours.len(), 1);
    assert_eq!((&ours[0]["name"], &ours[0]["kind"]), (&model.into(), &"MLX".into()));

    // Only what would be quantized is kept.
    let (_, said) = generate(&cache, &["--quantize", "keep", "--cache"]);
    assert!(said.contains("--quantize changes nothing"), "{said}");
    let (_, said) = generate(&cache, &["--cache"]);
    assert!(said.contains("--quantize"), "{said}");
    assert_eq!(cache.join("quantized").read_dir().unwrap().count(), 2); // one is the lock
}

#[test]
fn a_topology_is_a_recipe() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let topology = file("topology.yml", "0-2:\n  isq: AFQ3\n/embed_tokens/:\n  isq: afq8\n");
    let toml = "format = \"keep\"\ndefaults = false\n[[rule]]\nlayers = \"0-1\"\nformat = \"3\"\n[[rule]]\ntensors = \"*embed_tokens\"\nformat = \"8\"\n";
    let (found, said) = generate(folder.path(), &["--quantize", &topology]);
    let (expected, _) = generate(folder.path(), &["--quantize", &file("same.toml", toml)]);
    assert!(!found.is_empty() && found == expected && found != generate(folder.path(), &[]).0, "{said}");

    let out = folder.path().join("out");
    let out = out.to_str().unwrap();
    let output = run(folder.path(), &["convert", DENSE, "--recipe", &topology, "-o", out, "--cpu"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let output = run(folder.path(), &["generate", out, "--cpu", "-n", "30", "--temperature", "0"]);
    assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);

    // A type that is read alone, and one that other files have.
    for (isq, named) in [("Q8K", ["key `0-2`", "`Q8K`"]), ("Q4K", ["(`0-2` of ", "q4_k"])] {
        let wrong = file("wrong.yaml", &format!("0-2:\n  isq: {isq}\n"));
        for args in [
            &["generate", DENSE, "--cpu", "--quantize", &wrong][..],
            &["convert", DENSE, "--recipe", &wrong, "-o", "none"],
        ] {
            let output = run(folder.path(), args);
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            let is_named = said.contains("wrong.yaml") && named.iter().all(|part| said.contains(part));
            assert!(!output.status.success() && is_named, "{said}");
        }
    }
}

/// Killed at any moment, the next run opens nothing that is not complete.
#[test]
fn a_run_that_is_killed_leaves_nothing_half_written() {
    let folder = tempfile::tempdir().unwrap();
    let args = ["--quantize", "mxfp4", "--cache"];
    let (expected, _) = generate(folder.path(), &args[..2]);
    let mut interrupted = 0;
    for step in 0..12 {
        let cache = folder.path().join(step.to_string());
        let mut process = command(&[&["generate", DENSE, "--cpu", "-n", "30"], &args[..]].concat())
            .env("CANDLE_QUANT_CACHE", &cache)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let has_begun = || {
            let entries = cache.join("quantized").read_dir();
            entries.is_ok_and(|mut entries| {
                entries.any(|entry| entry.unwrap().path().extension().is_some_and(|name| name == "partial"))
            })
        };
        while !has_begun() && process.try_wait().unwrap().is_none() {
            thread::sleep(Duration::from_micros(100));
        }
        thread::sleep(Duration::from_millis(step));
        process.kill().unwrap();
        process.wait().unwrap();
        interrupted += usize::from(has_begun());
        let (found, said) = generate(&cache, &args);
        assert!(found == expected, "{said}");
        assert_eq!(cache.join("quantized").read_dir().unwrap().count(), 2, "{said}");
    }
    assert!(interrupted > 0);
}
