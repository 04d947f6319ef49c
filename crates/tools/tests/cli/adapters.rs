//! `--adapter`: low-rank adapters of PEFT and mlx-lm with `logits`, `generate` and over ranks.

use crate::common::{bundled, distance};
use crate::run;
use candle_core::{Device, Tensor};
use std::collections::HashMap;
use std::path::Path;
use std::process::Output;

const TINY: &str = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/assets/tiny");
const FOLDER: &str = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/tests/fixtures/adapters");

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn adapter(name: &str) -> String {
    format!("{FOLDER}/{name}")
}

fn tensors(path: &Path) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(path, &Device::Cpu).unwrap()
}

#[test]
fn logits_are_those_of_the_tools() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("logits.safetensors");
    let expected = tensors(&Path::new(FOLDER).join("expected.safetensors"));
    let tokens: Vec<String> =
        expected["tokens"].to_vec1::<i32>().unwrap().iter().map(ToString::to_string).collect();
    let tokens = tokens.join(",");
    for case in ["peft-dora", "mlx-lora", "peft-lora+peft-dora"] {
        let adapters: Vec<String> = case.split('+').map(adapter).collect();
        let mut args = vec!["logits", TINY, "--tokens", &tokens, "--out", out.to_str().unwrap()];
        adapters.iter().for_each(|path| args.extend(["--adapter", path]));
        let output = run(&args);
        assert!(output.status.success(), "{}", stderr(&output));
        assert_eq!(stderr(&output).matches("adapter ").count(), adapters.len(), "{}", stderr(&output));
        let logits = &tensors(&out)["logits"];
        let last = logits.narrow(0, logits.dim(0).unwrap() - 1, 1).unwrap();
        let found = distance(&last, &expected[case]);
        assert!(found.max <= 3e-4, "{case}: {found:?}");
        std::fs::remove_file(&out).unwrap();
    }
    assert!(bundled("tiny").contains("model.norm.weight"));
}

#[test]
fn a_text_with_adapters_is_the_same_over_ranks() {
    let (first, second) = (adapter("peft-lora"), format!("mine={}", adapter("mlx-dora")));
    let text = |more: &[&str]| {
        let args = ["generate", TINY, "-n", "20", "--cpu", "--temperature", "0"];
        let output = run(&[&args, more].concat());
        assert!(output.status.success(), "{}", stderr(&output));
        (String::from_utf8(output.stdout.clone()).unwrap(), stderr(&output))
    };
    let (alone, told) = text(&[]);
    assert!(!told.contains("adapter"), "{told}");
    let adapters = ["--adapter", &first, "--adapter", &second];
    let (changed, told) = text(&adapters);
    assert_ne!(changed, alone);
    assert!(told.contains("adapter peft-lora: LoRA of rank 2 in 2 modules, by peft"), "{told}");
    assert!(told.contains("adapter mine: DoRA of rank 2 in 1 modules, by mlx-lm"), "{told}");
    let (of_ranks, told) = text(&[&adapters[..], &["--ranks", "2"]].concat());
    assert_eq!(of_ranks, changed);
    assert_eq!(told.matches("adapter ").count(), 2, "{told}");
}

#[test]
fn adapters_that_do_not_fit_are_refused() {
    let refused = |args: &[&str]| {
        let output = run(&[&["generate", TINY, "--cpu", "-n", "1"], args].concat());
        assert!(!output.status.success());
        stderr(&output)
    };
    let told = refused(&["--adapter", FOLDER]);
    assert!(told.contains("adapter_config.json: there is no such file; name the directory"), "{told}");
    let told = refused(&["--adapter", &adapter("mlx-experts")]);
    assert!(told.contains("it has adapters of `model.layers.1.mlp.gate`"), "{told}");
    let path = adapter("peft-lora");
    let told = refused(&["--adapter", &path, "--adapter", &path]);
    assert!(told.contains("two are called peft-lora; give one a name of its own, NAME=DIR"), "{told}");
}
