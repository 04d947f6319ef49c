//! Changes of candle_nn's source, to see that they are noticed. `scripts/interface-changes.sh` has them compiled.

use std::path::{Path, PathBuf};
use std::{env, fs};

/// Which changes of [`CHANGES`] are made.
const VARIABLE: &str = "INTERFACE_PLANTED";

/// What becomes of candle_nn, a text in one of its files, what stands there then, and what the compiler's errors have to
/// name. An item that is not found hides what would be wrong with types.
const CHANGES: &[(&str, &str, &str, &str, &str)] = &[
    ("gains", "ops.rs", "pub fn sigmoid(", "pub fn planted_fn() {}\npub fn sigmoid(", "planted_fn"),
    ("gains", "linear.rs", "pub struct Linear {", "pub struct Planted;\npub struct Linear {", "Planted"),
    ("gains", "rnn.rs", "pub trait RNN {", "pub trait PlantedTrait {}\npub trait RNN {", "PlantedTrait"),
    (
        "changes",
        "ops.rs",
        "pub fn sigmoid(xs: &Tensor) -> Result<Tensor> {",
        "pub fn sigmoid(xs: &Tensor) -> Result<Vec<Tensor>> {",
        "sigmoid",
    ),
    (
        "changes",
        "linear.rs",
        "pub fn linear_no_bias(in_dim: usize,",
        "pub fn linear_no_bias(",
        "linear_no_bias",
    ),
    ("changes", "activation.rs", "    NewGelu,", "    NewGelu,\n    PlantedVariant,", "PlantedVariant"),
    (
        "changes",
        "layer_norm.rs",
        "    pub eps: f64,",
        "    pub eps: f64,\n    pub planted_field: f64,",
        "planted_field",
    ),
    (
        "changes",
        "var_builder.rs",
        "    pub fn prefix(",
        "    pub fn planted_method(&self) {}\n    pub fn prefix(",
        "planted_method",
    ),
];

/// The folder of candle_nn, or of a copy with changes, if these are asked for.
pub fn planted(original: PathBuf) -> PathBuf {
    println!("cargo:rerun-if-env-changed={VARIABLE}");
    let Ok(asked) = env::var(VARIABLE) else { return original };
    let copy = PathBuf::from(env::var("OUT_DIR").expect("Cargo sets it")).join("planted");
    copy_sources(&original.join("src"), &copy.join("src"));
    fs::copy(original.join("Cargo.toml"), copy.join("Cargo.toml")).expect("a manifest");
    let changes: Vec<_> = CHANGES.iter().filter(|(kind, ..)| *kind == asked).collect();
    assert!(!changes.is_empty(), "{VARIABLE}={asked}: there are no such changes");
    for (_, file, from, to, named) in changes {
        let file = copy.join("src").join(file);
        let text = fs::read_to_string(&file).expect("a file of candle_nn");
        assert_eq!(text.matches(from).count(), 1, "{}: {from:?}", file.display());
        fs::write(file, text.replace(from, to)).expect("the folder is Cargo's");
        println!("cargo:warning=planted {named}");
    }
    copy
}

fn copy_sources(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("the folder is Cargo's");
    for entry in fs::read_dir(from).expect("a folder of candle_nn") {
        let entry = entry.expect("a file of candle_nn");
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_sources(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).expect("a file of candle_nn");
        }
    }
}
