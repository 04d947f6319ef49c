//! Models by name, and what links in a store may lead to. A program of its own, as it changes the environment.

#[path = "common/checkpoint.rs"]
mod checkpoint;
#[path = "common/ollama.rs"]
mod ollama;

use candle_quant::checkpoint::{Checkpoint, CheckpointKind};
use candle_quant::Error;
use checkpoint::{folder, rejected, Tensor};
use ollama::{Model, MANIFEST};
use serde_json::{json, Value};
use std::path::Path;
use std::{env, fs};

const NORM: [Tensor; 1] = [("norm.weight", "F32", &[4])];

/// A model whose config names it.
fn model(name: &str) -> Model {
    let model = Model::of(&json!({"model_type": name}), &Value::Null, &NORM);
    model.open().unwrap();
    model
}

/// Copies the manifest of the model `m` to another place in the store.
fn rename(model: &Model, place: &str) {
    let path = model.root().join("manifests").join(place);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::copy(model.manifest_path(), path).unwrap();
}

fn model_type(name: &str) -> String {
    let checkpoint = Checkpoint::open(name).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert_eq!((checkpoint.kind(), checkpoint.path()), (CheckpointKind::Ollama, Path::new(name)));
    checkpoint.config()["model_type"].as_str().unwrap().to_owned()
}

/// One test, as all of it depends on the environment and the working directory.
#[test]
fn names_are_looked_up_in_the_stores() {
    let (home, other, above) = (tempfile::tempdir().unwrap(), model("other"), tempfile::tempdir().unwrap());
    let store = home.path().join(".ollama/models");
    fs::create_dir_all(store.parent().unwrap()).unwrap();
    let home_model = model("home");
    rename(&home_model, "host:5000/some-one/Mixed.Case/Q4");
    fs::rename(home_model.root(), &store).unwrap();
    // A folder deeper: what `../m` is, is not for others to say.
    let here = above.path().join("here");
    fs::create_dir(&here).unwrap();
    env::set_current_dir(&here).unwrap();
    env::set_var("HOME", home.path());
    env::remove_var("OLLAMA_MODELS");
    env::set_var("HF_HUB_CACHE", home.path().join("hub"));
    env::set_var("HF_HUB_OFFLINE", "1");

    for name in [
        "m",
        "m:latest",
        "library/m",
        "registry.ollama.ai/library/m:latest",
        "https://registry.ollama.ai/library/m",
        "M:Latest",
        "LIBRARY/m",
        "host:5000/some-one/Mixed.Case:Q4",
        "HOST:5000/Some-One/mixed.case:q4",
    ] {
        assert_eq!(model_type(name), "home", "{name}");
    }
    // What is no name was meant as a path.
    for path in
        ["../m", "./m", "/m", "a/../m", "manifests/../../m", "m:..", "m:", "a/b/c/d", "\u{e9}", "-m", ".m"]
    {
        let Err(error) = Checkpoint::open(path) else { panic!("{path}") };
        assert!(
            matches!(error, Error::Io { .. }) && !error.to_string().contains("Ollama"),
            "{path}: {error}"
        );
    }
    for name in ["m:other", "n", "host:5001/some-one/Mixed.Case:Q4", "missing.safetensors"] {
        let Err(Error::Io { path, error }) = Checkpoint::open(name) else { panic!("{name}") };
        assert_eq!((path.as_path(), error.kind()), (Path::new(name), std::io::ErrorKind::NotFound));
    }
    let parts = [
        "m:other: No such file or directory",
        "no model `m:other` in an Ollama store",
        store.to_str().unwrap(),
    ];
    rejected(Checkpoint::open("m:other"), &parts);
    // It may be a name of the Hugging Face hub, too.
    let Err(error @ Error::Hub { .. }) = Checkpoint::open("some-one/m") else { panic!() };
    let (text, hub) = (error.to_string(), home.path().join("hub"));
    for part in ["no model `some-one/m:latest` in an Ollama store", hub.to_str().unwrap()] {
        assert!(text.contains(part), "{text}");
    }

    env::set_var("OLLAMA_MODELS", other.root());
    assert_eq!(model_type("m"), "other");
    let Err(error) = Checkpoint::open("host:5000/some-one/Mixed.Case:Q4") else { panic!() };
    assert!(error.to_string().contains(other.root().to_str().unwrap()), "{error}");
    assert!(!error.to_string().contains(store.to_str().unwrap()), "{error}");
    // A store that is not there is one without the model.
    env::set_var("OLLAMA_MODELS", here.join("missing"));
    rejected(Checkpoint::open("m"), &["no model `m:latest`", "missing"]);
    env::set_var("OLLAMA_MODELS", "");
    assert_eq!(model_type("m"), "home");

    // What exists as a path is not looked up.
    let mlx = folder(&json!({"model_type": "path"}), &NORM);
    fs::rename(mlx.path(), here.join("m")).unwrap();
    let checkpoint = Checkpoint::open("m").unwrap();
    assert_eq!(
        (checkpoint.kind(), &checkpoint.config()["model_type"]),
        (CheckpointKind::Dense, &json!("path"))
    );
    assert_eq!(model_type("m:latest"), "home");

    // Relative paths of manifests and stores.
    env::set_current_dir(store.join(MANIFEST).parent().unwrap()).unwrap();
    for path in ["latest", "./latest", "../m/latest", "../../library/m/latest"] {
        assert_eq!(model_type(path), "home", "{path}");
    }
    env::set_current_dir(other.root()).unwrap();
    assert_eq!(model_type("."), "other");
}

#[test]
fn manifests_elsewhere_are_no_models() {
    let store = model("m");
    let text = fs::read(store.manifest_path()).unwrap();
    for place in [
        "latest",
        "manifests/latest",
        "manifests/a/latest",
        "manifests/a/b/latest",
        "manifests/a/b/c/d/latest",
        "manifests/a/b.c/d/latest",
        "manifests/a/b/c/.latest",
        "other/a/b/c/latest",
    ] {
        let path = store.root().join(place);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, &text).unwrap();
        rejected(Checkpoint::open(&path), &[path.to_str().unwrap(), "not a safetensors file"]);
        fs::remove_file(path).unwrap();
    }
    // A store has both directories.
    fs::remove_dir_all(store.root().join("blobs")).unwrap();
    rejected(Checkpoint::open(store.manifest_path()), &["not a safetensors file"]);
    rejected(Checkpoint::open(store.root()), &["no model.safetensors.index.json"]);
}

#[cfg(unix)]
mod links {
    use super::*;
    use std::os::unix::fs::symlink;

    /// Puts a link at `path` in the store, to what was there and is now outside of it.
    fn move_out(store: &Model, path: &str, outside: &Path) {
        let path = store.root().join(path);
        let target = outside.join("file");
        fs::rename(&path, &target).unwrap();
        symlink(target, path).unwrap();
    }

    #[test]
    fn links_out_of_the_store_are_refused() {
        for kind in ["tensor", "json", "license"] {
            let (mut store, outside) = (model("m"), tempfile::tempdir().unwrap());
            store.add(kind, Some("x"), b"{}");
            let digest = store.digest();
            move_out(&store, &format!("blobs/sha256-{digest}"), outside.path());
            let parts = [
                &digest,
                "leads out of the store",
                "layer `x` of model `m:latest`",
                outside.path().to_str().unwrap(),
            ];
            rejected(store.open(), &parts);
        }
        let (store, outside) = (model("m"), tempfile::tempdir().unwrap());
        move_out(&store, MANIFEST, outside.path());
        rejected(Checkpoint::open(store.manifest_path()), &["latest", "leads out of the store"]);
        rejected(Checkpoint::open(store.root()), &["latest", "leads out of the store"]);
        // A directory of it is no better than a file.
        for dir in ["blobs", "manifests"] {
            let (store, outside) = (model("m"), tempfile::tempdir().unwrap());
            move_out(&store, dir, outside.path());
            rejected(
                Checkpoint::open(store.root()),
                &["leads out of the store", outside.path().to_str().unwrap()],
            );
        }
    }

    #[test]
    fn links_within_the_store_and_to_it_are_followed() {
        let (mut store, elsewhere) = (model("m"), tempfile::tempdir().unwrap());
        let digest = store.digest();
        let blob = store.root().join(format!("blobs/sha256-{digest}"));
        fs::rename(&blob, store.root().join("blobs/moved")).unwrap();
        symlink("moved", &blob).unwrap();
        store.open().unwrap();
        let link = elsewhere.path().join("store");
        symlink(store.root(), &link).unwrap();
        Checkpoint::open(&link).unwrap();
        Checkpoint::open(link.join(MANIFEST)).unwrap();
        // Round in circles.
        fs::remove_file(&blob).unwrap();
        symlink(&blob, &blob).unwrap();
        rejected(store.open(), &["layer `norm.weight` of model `m:latest`", &digest]);
    }
}
