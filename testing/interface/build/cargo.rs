//! Where Cargo has a dependency's source.

use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The folder in which Cargo has the version of `name` that the workspace's lock file names.
pub fn source_of(name: &str) -> PathBuf {
    let variable = |name| std::env::var(name).expect("Cargo sets it");
    // A package that depends on nothing else: of the workspace Cargo would download what nobody has built.
    let probe = PathBuf::from(variable("OUT_DIR")).join("probe");
    let package = "[package]\nname = \"probe\"\nversion = \"0.0.0\"\nedition = \"2021\"\n[workspace]\n";
    let manifest = format!("{package}[dependencies]\n{name} = \"*\"\n");
    let written = std::fs::create_dir_all(probe.join("src"))
        .and_then(|()| std::fs::write(probe.join("src/lib.rs"), ""))
        .and_then(|()| std::fs::write(probe.join("Cargo.toml"), manifest))
        .and_then(|()| std::fs::copy("../../Cargo.lock", probe.join("Cargo.lock")));
    written.unwrap_or_else(|error| panic!("{}: {error}", probe.display()));
    let metadata = metadata(&probe.join("Cargo.toml"), &["--filter-platform", &variable("TARGET")]);
    let packages = metadata["packages"].as_array().expect("a list of packages");
    let found: Vec<_> = packages.iter().filter(|package| package["name"] == name).collect();
    let [package] = found[..] else { panic!("{} packages {name}", found.len()) };
    let manifest = Path::new(package["manifest_path"].as_str().expect("a path"));
    manifest.parent().expect("a file is in a folder").to_path_buf()
}

/// The names of the features of the package in `folder`, those of optional dependencies left out.
pub fn features_of(folder: &Path) -> BTreeSet<String> {
    let metadata = metadata(&folder.join("Cargo.toml"), &["--no-deps"]);
    let packages = metadata["packages"].as_array().expect("a list of packages");
    let manifest = std::fs::canonicalize(folder.join("Cargo.toml")).expect("the package has a manifest");
    let is_it =
        |package: &&Value| Path::new(package["manifest_path"].as_str().unwrap_or_default()) == manifest;
    let package = packages.iter().find(is_it).expect("Cargo lists the package that it is asked about");
    package["features"].as_object().expect("a table of features").keys().cloned().collect()
}

/// What Cargo says of the package with this manifest.
fn metadata(manifest: &Path, options: &[&str]) -> Value {
    let output = Command::new(std::env::var("CARGO").expect("Cargo sets it"))
        .args(["metadata", "--format-version=1", "--offline", "--manifest-path"])
        .arg(manifest)
        .args(options)
        .output()
        .expect("Cargo runs");
    assert!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("Cargo writes JSON")
}
