use published::{cargo, output, repository};
use std::collections::BTreeSet;
use std::fs;
use toml::Table;

/// How many crates more than candle_nn a user of layers may have to compile.
const MOST: usize = 15;

/// The crates that are compiled for a package with this dependency and no other.
fn compiled_for(dependency: &str) -> BTreeSet<String> {
    let folder = tempfile::tempdir().unwrap();
    let manifest = format!(
        "[package]\nname = \"user\"\nedition = \"2021\"\n[dependencies]\n{dependency}\n[workspace]\n[patch.crates-io]\n\
        candle-quant = {{ path = {root:?} }}\ncandle-quant-packed = {{ path = {packed:?} }}\n",
        root = repository().canonicalize().unwrap(),
        packed = repository().join("crates/packed").canonicalize().unwrap(),
    );
    fs::write(folder.path().join("Cargo.toml"), manifest).unwrap();
    fs::create_dir(folder.path().join("src")).unwrap();
    fs::write(folder.path().join("src/lib.rs"), "").unwrap();
    fs::copy(repository().join("Cargo.lock"), folder.path().join("Cargo.lock")).unwrap();
    let mut tree = cargo(folder.path());
    tree.args(["tree", "--edges", "normal,build", "--prefix", "none", "--format", "{p}", "--no-dedupe"]);
    let lines = output(&mut tree).unwrap();
    let name_and_version = |line: &str| line.split(' ').take(2).collect::<Vec<_>>().join(" ");
    lines.lines().map(name_and_version).filter(|package| !package.starts_with("user ")).collect()
}

#[test]
fn layers_need_little_more_than_candle_nn() {
    let manifest: Table = fs::read_to_string(repository().join("Cargo.toml")).unwrap().parse().unwrap();
    let version = &manifest["workspace"]["dependencies"]["candle-nn"];
    let candle_nn = compiled_for(&format!("candle-nn = {version}"));
    assert!(candle_nn.iter().any(|package| package.starts_with("candle-core ")), "{candle_nn:?}");
    for (name, path) in [("candle-quant", ""), ("candle-quant-nn", "crates/nn")] {
        let path = repository().join(path).canonicalize().unwrap();
        let ours = compiled_for(&format!("{name} = {{ path = {path:?} }}"));
        let more: Vec<_> =
            ours.difference(&candle_nn).filter(|package| !package.starts_with(&format!("{name} "))).collect();
        println!("{name}: {} crates, of which candle_nn has {}: {more:?}", ours.len(), candle_nn.len());
        assert!(
            more.len() <= MOST,
            "{name} has {} dependencies that candle_nn has not, at most {MOST}: {more:?}; make what needs them a feature",
            more.len()
        );
    }
}
