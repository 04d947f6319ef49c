//! `--ggml own|candle`.

use crate::run;

const DENSE: &str = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/assets/tiny-bf16");

/// Candle's kernels round activations, those of this crate do not: likely tokens stay, draws among unlikely ones do not.
#[test]
fn kernels_of_blocks_are_chosen() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("q8_0");
    let gguf = out.to_str().unwrap();
    let converted = run(&["convert", DENSE, "-o", gguf, "--to", "gguf", "--format", "q8_0"]);
    assert!(converted.status.success(), "{}", String::from_utf8_lossy(&converted.stderr));
    let texts = |choice: &[&str]| {
        [("0", "1"), ("2", "1"), ("2", "2"), ("2", "3")].map(|(temperature, seed)| {
            let draws = ["generate", gguf, "--cpu", "--temperature", temperature, "--seed", seed];
            let output = run(&[&draws, choice].concat());
            assert!(output.status.success(), "{choice:?}: {}", String::from_utf8_lossy(&output.stderr));
            output.stdout
        })
    };
    let (own, candle) = (texts(&["--ggml", "own"]), texts(&["--ggml", "candle"]));
    assert_eq!(own, texts(&[]));
    assert_eq!(own[0], candle[0]);
    assert_ne!(own[1..], candle[1..]);

    let other = run(&["generate", gguf, "--ggml", "other"]);
    let told = String::from_utf8_lossy(&other.stderr);
    assert!(!other.status.success() && told.contains("[possible values: own, candle]"), "{told}");
}
