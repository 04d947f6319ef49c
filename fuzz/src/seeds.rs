//! The inputs that fuzzing starts from: the test fixtures.

use crate::Bundle;
use std::fs;
use std::path::{Path, PathBuf};

/// The readers.
pub const TARGETS: [&str; 6] = ["mlx", "hf", "uqff", "ollama", "gguf", "slm1"];

/// Larger inputs would only be slow.
const MAX_SEED: usize = 600_000;

/// The seeds of one target, with names.
pub fn seeds(target: &str) -> Vec<(String, Bundle)> {
    let mut seeds = match target {
        "ollama" => directories("ollama").into_iter().flat_map(|store| models(&store)).collect(),
        kind => directories(kind).into_iter().map(|path| (name_of(&path), directory(&path))).collect(),
    };
    seeds.retain(|(_, bundle): &(String, Bundle)| bundle.encode().len() <= MAX_SEED);
    seeds.sort_by(|a, b| a.0.cmp(&b.0));
    seeds
}

/// The directories of `tests/fixtures/KIND`.
fn directories(kind: &str) -> Vec<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(kind);
    let entries = fs::read_dir(path).into_iter().flatten().filter_map(Result::ok);
    entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// A checkpoint's directory, without what the tests expect of it.
fn directory(path: &Path) -> Bundle {
    let belongs = |name: &str| !name.contains("expect") && !name.starts_with("refs");
    Bundle::read(path, "", belongs).expect("fixtures")
}

/// Every model of an Ollama store, with its blobs.
fn models(store: &Path) -> Vec<(String, Bundle)> {
    let manifests = Bundle::read(&store.join("manifests"), "", |_| true).expect("manifests");
    let model = |(name, manifest): (String, Vec<u8>)| {
        let text = String::from_utf8_lossy(&manifest).into_owned();
        let is_blob = |path: &str| {
            path.strip_prefix("blobs/sha256-").is_some_and(|digest| text.contains(digest))
        };
        let open = format!("manifests/{name}");
        let mut bundle = Bundle::read(store, &open, is_blob).expect("blobs");
        bundle.files.insert(0, (open.clone(), manifest));
        (format!("{}-{}", name_of(store), name.replace('/', "-")), bundle)
    };
    manifests.files.into_iter().map(model).collect()
}
