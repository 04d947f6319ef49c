//! Where Cargo has a dependency's source.

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
    let output = Command::new(variable("CARGO"))
        .args(["metadata", "--format-version=1", "--offline", "--filter-platform", &variable("TARGET")])
        .arg("--manifest-path")
        .arg(probe.join("Cargo.toml"))
        .output()
        .expect("Cargo runs");
    assert!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).expect("Cargo writes JSON");
    let packages = metadata["packages"].as_array().expect("a list of packages");
    let found: Vec<_> = packages.iter().filter(|package| package["name"] == name).collect();
    let [package] = found[..] else { panic!("{} packages {name}", found.len()) };
    let manifest = Path::new(package["manifest_path"].as_str().expect("a path"));
    manifest.parent().expect("a file is in a folder").to_path_buf()
}
