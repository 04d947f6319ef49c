//! All of candle-transformers is compiled, and nothing but the candle_nn line of its manifest is swapped.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use toml::{Table, Value};

/// The folder of candle-transformers.
const FOLDER: &str = env!("CANDLE_TRANSFORMERS");

/// Modules of `models` that are no models.
const HELPERS: [&str; 2] = ["llama2_c_weights", "with_tracing"];

/// The modules that lie in a folder, whether or not something declares them.
fn modules(folder: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let modules = entries
        .filter(|path| path.extension().is_some_and(|end| end == "rs") || path.join("mod.rs").exists());
    let names = modules.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned());
    names.filter(|name| name != "mod" && name != "lib").collect()
}

/// Those that the crate has: build.rs wrote a `use` line for each, which the compiler resolved.
fn compiled(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

#[test]
fn a_hundred_models_of_a_hundred() {
    let models = compiled(unmodified::MODELS);
    assert_eq!(models, modules(&Path::new(FOLDER).join("src/models")));
    // Those for candle's own quantized tensors have no candle_nn builder. They are compiled, too.
    let is_model = |name: &&String| !name.starts_with("quantized_") && !HELPERS.contains(&name.as_str());
    assert_eq!(models.iter().filter(is_model).count(), 100);
}

#[test]
fn every_other_module_too() {
    assert_eq!(compiled(unmodified::MODULES), modules(&Path::new(FOLDER).join("src")));
}

/// The dependencies of a manifest that are not optional, each as a table.
fn dependencies(folder: &str) -> BTreeMap<String, Table> {
    let manifest = fs::read_to_string(Path::new(folder).join("Cargo.toml")).unwrap();
    let manifest: Table = manifest.parse().unwrap();
    let table = |value: &Value| match value {
        Value::Table(table) => table.clone(),
        version => Table::from_iter([("version".to_owned(), version.clone())]),
    };
    let all =
        manifest["dependencies"].as_table().unwrap().iter().map(|(name, value)| (name.clone(), table(value)));
    all.filter(|(_, table)| !table.contains_key("optional")).collect()
}

#[test]
fn one_line_of_the_manifest_is_swapped() {
    let (mut original, mut ours) = (dependencies(FOLDER), dependencies(env!("CARGO_MANIFEST_DIR")));
    assert_ne!(original.remove("candle-nn").unwrap(), ours.remove("candle-nn").unwrap());
    assert_eq!(original, ours);
}
