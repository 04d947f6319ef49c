//! Finds the sources of candle-transformers, of the version in Cargo.lock, and writes a lib.rs that is made of them.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

const CRATE: &str = "candle-transformers";

fn main() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("set by cargo"));
    let lock = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Cargo.lock");
    println!("cargo::rerun-if-changed={}", lock.display());
    println!("cargo::rerun-if-changed=build.rs");

    let version = locked_version(&fs::read_to_string(&lock).expect("Cargo.lock"));
    let manifest = locate(&version, &lock, &out.join("locate"));
    let folder = manifest.parent().expect("a folder");
    println!("cargo::rerun-if-changed={}", folder.join("src").display());
    println!("cargo::rustc-env=CANDLE_TRANSFORMERS={}", folder.display());

    let source = folder.join("src");
    let (roots, models) = (modules(&source.join("lib.rs")), modules(&source.join("models/mod.rs")));
    let lines = roots.iter().map(|root| format!("#[path = {:?}]\npub mod {root};\n", file_of(&source, root)));
    // The compiler refuses one of these if the module is not there.
    let uses = models.iter().map(|model| format!("use models::{model} as _;\n"));
    let names =
        format!("pub const MODULES: &[&str] = &{roots:?};\npub const MODELS: &[&str] = &{models:?};\n");
    let lib: String = lines.chain(uses).chain([names]).collect();
    fs::write(out.join("lib.rs"), lib).expect("writable");
}

/// The version in Cargo.lock.
fn locked_version(lock: &str) -> String {
    let package = format!("name = \"{CRATE}\"\nversion = \"");
    let lock = lock.replace('\r', "");
    let found: Vec<_> = lock.split(&package).skip(1).filter_map(|rest| rest.split('"').next()).collect();
    assert_eq!(found.len(), 1, "{CRATE} has to be in Cargo.lock, once: {found:?}");
    found[0].to_owned()
}

/// The manifest of the crate, wherever cargo keeps it.
///
/// Cargo is asked about a package that depends on nothing else: an answer about the workspace needs all that any
/// member depends on, on this machine or from the network.
fn locate(version: &str, lock: &Path, probe: &Path) -> PathBuf {
    fs::create_dir_all(probe.join("src")).expect("writable");
    fs::write(probe.join("src/lib.rs"), "").expect("writable");
    let manifest = format!(
        "[package]\nname = \"locate\"\nedition = \"2021\"\n[workspace]\n[dependencies]\n{CRATE} = \"={version}\"\n"
    );
    fs::write(probe.join("Cargo.toml"), manifest).expect("writable");
    fs::copy(lock, probe.join("Cargo.lock")).expect("writable");
    let target = env::var("TARGET").expect("set by cargo");
    // In the folder of this package, so that a source replacement in .cargo/config.toml counts.
    let output = Command::new(env::var_os("CARGO").expect("set by cargo"))
        .args(["metadata", "--offline", "--format-version=1", "--filter-platform", &target])
        .arg("--manifest-path")
        .arg(probe.join("Cargo.toml"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo");
    assert!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    let package = packages.iter().find(|package| package["name"] == CRATE).expect(CRATE);
    assert_eq!(package["version"], version, "cargo found another version of {CRATE} than that of Cargo.lock");
    package["manifest_path"].as_str().expect("a path").into()
}

/// The modules that a file declares, `pub mod name;`, in their order.
fn modules(file: &Path) -> Vec<String> {
    let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let name = |line: &str| Some(line.strip_prefix("pub mod ")?.strip_suffix(';')?.to_owned());
    text.lines().filter_map(name).collect()
}

/// The file of a module in a folder.
fn file_of(folder: &Path, module: &str) -> PathBuf {
    let file = folder.join(format!("{module}.rs"));
    if file.exists() {
        return file;
    }
    folder.join(module).join("mod.rs")
}
