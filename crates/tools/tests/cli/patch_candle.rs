//! `patch-candle` on the package that cargo has downloaded for the tests, and on others.

use crate::{command, run};
use candle_quant_tools::patch_candle::{CHECKSUM, VERSION};
use flate2::{write::GzEncoder, Compression};
use std::path::Path;
use std::{fs, io};
use tempfile::TempDir;

#[test]
fn the_checksum_is_that_of_the_lock_file() {
    let lock = Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("Cargo.lock");
    let lock: toml::Table = fs::read_to_string(lock).unwrap().parse().unwrap();
    let packages = lock["package"].as_array().unwrap();
    let locked = packages.iter().find(|package| package["name"].as_str() == Some("candle-nn")).unwrap();
    assert_eq!(locked["version"].as_str(), Some(VERSION));
    assert_eq!(locked["checksum"].as_str(), Some(CHECKSUM));
}

#[test]
fn linear_and_embedding_are_changed() {
    let dir = TempDir::new().unwrap();
    let made = dir.path().join("new/candle-nn");
    let output = run(&["patch-candle", made.to_str().unwrap()]);
    assert!(output.status.success(), "{output:?}");
    let told = String::from_utf8(output.stdout).unwrap();
    let patch = told.lines().skip_while(|line| !line.starts_with('[')).collect::<Vec<_>>().join("\n");
    let patch: toml::Table = patch.parse().unwrap();
    assert_eq!(patch["patch"]["crates-io"]["candle-nn"]["path"].as_str(), made.to_str());

    let manifest: toml::Table = fs::read_to_string(made.join("Cargo.toml")).unwrap().parse().unwrap();
    assert_eq!(manifest["package"]["version"].as_str(), Some(VERSION));
    assert!(manifest["dependencies"].get("candle-quant-packed").is_some());
    let names = |dir: &Path| {
        let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let changed: Vec<_> = names(&made.join("src"))
        .into_iter()
        .filter(|name| {
            fs::read_to_string(made.join("src").join(name)).is_ok_and(|text| text.contains("candle_quant"))
        })
        .collect();
    assert_eq!(changed, ["embedding.rs", "linear.rs"]);
    // No unfinished folder is left.
    assert_eq!(names(&dir.path().join("new")), ["candle-nn"]);

    let again = |more: &[&str]| {
        let output = run(&[&["patch-candle", made.to_str().unwrap()], more].concat());
        assert_eq!(names(&dir.path().join("new")), ["candle-nn"]);
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    let (done, error) = again(&[]);
    assert!(!done && error.contains("it exists already") && error.contains("--overwrite"), "{error}");
    // What was written is replaced, and nothing else.
    let listed = fs::read_to_string(made.join("candle-quant.json")).unwrap();
    assert!(listed.contains("\"src/linear.rs\"") && listed.contains("candle-nn 0.11.1"), "{listed}");
    fs::write(made.join("src/mine.rs"), "mine").unwrap();
    let (done, error) = again(&["--overwrite"]);
    assert!(!done && error.contains("a file (src/mine.rs)"), "{error}");
    assert_eq!(fs::read(made.join("src/mine.rs")).unwrap(), b"mine");
    fs::remove_file(made.join("src/mine.rs")).unwrap();
    let linear = fs::read(made.join("src/linear.rs")).unwrap();
    fs::write(made.join("src/linear.rs"), "changed").unwrap();
    let (done, error) = again(&["--overwrite"]);
    assert!(!done && error.contains("src/linear.rs was changed"), "{error}");
    fs::write(made.join("src/linear.rs"), &linear).unwrap();
    assert_eq!(again(&["--overwrite"]), (true, String::new()));
    assert!(fs::read(made.join("src/linear.rs")).unwrap() == linear);
}

/// A package with one empty file.
fn package(file: &str) -> Vec<u8> {
    let mut archive = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::fast()));
    let mut header = tar::Header::new_gnu();
    header.set_size(0);
    archive.append_data(&mut header, file, io::empty()).unwrap();
    archive.into_inner().unwrap().finish().unwrap()
}

#[test]
fn other_packages_are_refused() {
    let dir = TempDir::new().unwrap();
    let other = dir.path().join("candle-nn-0.11.1.crate");
    let made = dir.path().join("candle-nn");
    let refused = |expected: &[&str]| {
        let output = run(&["patch-candle", "--package", other.to_str().unwrap(), made.to_str().unwrap()]);
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && !made.exists(), "{error}");
        for part in expected {
            assert!(error.contains(part), "{part}: {error}");
        }
    };
    fs::write(&other, "not a package").unwrap();
    refused(&["candle-nn-0.11.1.crate", "invalid gzip header"]);
    // Another version under this one's name, and a changed file in this one.
    fs::write(&other, package("candle-nn-0.10.2/Cargo.toml")).unwrap();
    refused(&[
        "candle-nn-0.11.1.crate",
        "it holds candle-nn-0.10.2, expected candle-nn-0.11.1",
        "only this version",
    ]);
    fs::write(&other, package("candle-nn-0.11.1/Cargo.toml")).unwrap();
    refused(&["candle-nn-0.11.1.crate", "its SHA-256 is", CHECKSUM, "run `cargo fetch`"]);

    // Nothing has been downloaded.
    let output =
        command(&["patch-candle", made.to_str().unwrap()]).env("CARGO_HOME", dir.path()).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && !made.exists(), "{error}");
    for part in ["registry", "no registry in it has candle-nn-0.11.1.crate", "run `cargo fetch`"] {
        assert!(error.contains(part), "{part}: {error}");
    }
}
