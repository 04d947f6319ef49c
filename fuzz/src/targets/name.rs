//! Names of models, which may lead to a store or a cache and nowhere else.

use super::{content, smallest, Seeds};
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
        "org/model",
        "org/model@main",
        "hf.co/org/model@0123456789012345678901234567890123456789",
        "hf.co/org/model:Q4_K_M",
        "org/model@../../x",
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

/// The store and the cache that names lead to, made once. Beside them are others, to which no name may lead.
fn places() -> &'static [PathBuf; 2] {
    static PLACES: OnceLock<(TempDir, [PathBuf; 2])> = OnceLock::new();
    let (_, places) = PLACES.get_or_init(|| {
        let folder = super::folder();
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/ollama/current");
        let files = Bundle::read(&fixture, "", |_| true).expect("a fixture");
        for place in ["inside/store", "inside/other"] {
            files.write(&folder.path().join(place)).expect("a store");
        }
        let commit = "0123456789".repeat(4);
        let files = vec![
            ("refs/main".to_owned(), commit.clone().into_bytes()),
            (format!("snapshots/{commit}/config.json"), b"{}".to_vec()),
            (format!("snapshots/{commit}/{}", smallest().0), smallest().1),
        ];
        let files = Bundle { files, ..Bundle::default() };
        for place in ["inside/cache/models--org--model", "inside/models--org--model", "models--org--model"] {
            files.write(&folder.path().join(place)).expect("a model");
        }
        let place = |name: &str| folder.path().join("inside").join(name).canonicalize().expect("a folder");
        let places = [place("store"), place("cache")];
        env::set_var("OLLAMA_MODELS", &places[0]);
        env::set_var("HF_HUB_CACHE", &places[1]);
        env::set_var("HF_HUB_OFFLINE", "1");
        (folder, places)
    });
    places
}

pub(super) fn run(bundle: &Bundle) -> bool {
    let places = places();
    let name = String::from_utf8_lossy(content(bundle, NAME)).into_owned();
    // What is there is a path, and no name.
    if Path::new(&name).exists() {
        return false;
    }
    let Ok(checkpoint) = Checkpoint::open(&name) else { return false };
    let files = checkpoint.weight_files();
    let is_inside = |file: &PathBuf| {
        let file = file.canonicalize().expect("a file");
        places.iter().any(|place| file.starts_with(place))
    };
    assert!(files.iter().all(is_inside), "{name:?} leads to {files:?}");
    true
}
