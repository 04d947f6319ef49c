//! Names of models, which may lead to a store or a cache and nowhere else.

use super::{content, Seeds};
use crate::Bundle;
use candle_quant::Checkpoint;
use std::env;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use tempfile::TempDir;

const NAME: &str = "name";

pub(super) fn seeds(_: &str) -> Seeds {
    let names = [
        "tiny-moe:int4",
        "library/tiny-moe:nvfp4",
        "registry.ollama.ai/library/tiny-dense:mxfp8",
        "https://registry.ollama.ai/library/tiny-dense:int8",
        "tiny",
        "hf.co/org/model:Q4_K_M",
        "org/model@main",
        "a.b:80/c/d:e",
        "tiny@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
        "../manifests/registry.ollama.ai/library/tiny-moe:int4",
        "library/../../blobs/x:y",
        "C:\\models\\tiny",
    ];
    let seed =
        |(number, name): (usize, &&str)| (format!("{number:02}"), super::bundle([(NAME, name.as_bytes())]));
    names.iter().enumerate().map(seed).collect()
}

/// The store that names lead to, made once. Beside it is another one, to which no name may lead.
fn store() -> &'static Path {
    static STORE: OnceLock<(TempDir, PathBuf)> = OnceLock::new();
    let (_, store) = STORE.get_or_init(|| {
        let folder = super::folder();
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/ollama/current");
        let files = Bundle::read(&fixture, "", |_| true).expect("a fixture");
        for place in ["inside/store", "inside/other"] {
            files.write(&folder.path().join(place)).expect("a store");
        }
        let store = folder.path().join("inside/store").canonicalize().expect("a store");
        env::set_var("OLLAMA_MODELS", &store);
        env::set_var("HF_HUB_CACHE", folder.path().join("inside/cache"));
        env::set_var("HF_HUB_OFFLINE", "1");
        (folder, store)
    });
    store
}

pub(super) fn run(bundle: &Bundle) -> bool {
    let store = store();
    let name = String::from_utf8_lossy(content(bundle, NAME)).into_owned();
    // What is there is a path, and no name.
    if Path::new(&name).exists() {
        return false;
    }
    let Ok(checkpoint) = Checkpoint::open(&name) else { return false };
    let files = checkpoint.weight_files();
    assert!(files.iter().all(|file| file.starts_with(store)), "{name:?} leads to {files:?}");
    true
}
