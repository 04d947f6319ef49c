//! The cache on disk: as Python's huggingface_hub writes it, and what is no such thing.

use crate::server::COMMIT;
use crate::{bundled, bundled_server, cache, open, repo};
use candle_quant::checkpoint::{HubCache, HubOptions};
use std::fs;
use std::path::Path;

/// A snapshot as huggingface_hub writes it; without links as it does on Windows.
fn write(root: &Path, revision: Option<&str>, commit: &str, files: &[(&str, &[u8])], links: bool) {
    let repo = root.join("models--org--model");
    if let Some(revision) = revision {
        let path = repo.join("refs").join(revision);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, commit).unwrap();
    }
    fs::create_dir_all(repo.join("blobs")).unwrap();
    for (number, (name, bytes)) in files.iter().enumerate() {
        let path = repo.join("snapshots").join(commit).join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        #[cfg(unix)]
        if links {
            let blob = format!("{commit}{number}");
            fs::write(repo.join("blobs").join(&blob), bytes).unwrap();
            let up = "../".repeat(2 + name.matches('/').count());
            std::os::unix::fs::symlink(format!("{up}blobs/{blob}"), path).unwrap();
            continue;
        }
        let _ = (number, links);
        fs::write(path, bytes).unwrap();
    }
}

fn offline(root: &Path) -> HubOptions {
    let mut options = HubOptions::new(root);
    options.offline = true;
    options
}

#[test]
fn what_python_wrote_is_found() {
    let bundled = bundled();
    let files: Vec<(&str, &[u8])> = bundled.iter().map(|(name, bytes)| (*name, &bytes[..])).collect();
    for links in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let options = offline(dir.path());
        write(dir.path(), Some("main"), COMMIT, &files, links);
        let other = "a".repeat(40);
        write(dir.path(), Some("refs/pr/2"), &other, &files, links);
        let unnamed = "b".repeat(40);
        write(dir.path(), None, &unnamed, &files, links);
        for name in [
            "org/model",
            "org/model@refs/pr/2",
            &format!("org/model@{other}"),
            &format!("org/model@{unnamed}"),
        ] {
            assert!(open(name, &options).unwrap().tokenizer_file().is_some(), "{name}");
        }
        assert!(open("org/model@v1", &options).is_err());
        let names: Vec<_> = HubCache::at(dir.path()).models().unwrap();
        let names: Vec<_> = names.iter().map(|model| model.name.to_string()).collect();
        assert_eq!(names, ["org/model".into(), format!("org/model@{unnamed}"), "org/model@refs/pr/2".into()]);
    }
}

#[test]
fn what_is_not_complete_is_not_opened() {
    let index = br#"{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}"#;
    let cases: [&[(&str, &[u8])]; 6] = [
        &[("config.json", b"{}")],
        &[("model.safetensors", b"x")],
        &[
            ("config.json", b"{}"),
            ("model.safetensors.index.json", index),
            ("model-00001-of-00002.safetensors", b"x"),
        ],
        &[("config.json", b"{}"), ("model-00002-of-00002.safetensors", b"x")],
        &[("x-Q4_0-00001-of-00002.gguf", b"x")],
        &[("x-1.uqff", b"x")],
    ];
    for files in cases {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), Some("main"), COMMIT, files, true);
        let error = open("org/model", &offline(dir.path())).unwrap_err().to_string();
        assert!(error.contains("not in the cache of the hub"), "{files:?}: {error}");
        assert!(HubCache::at(dir.path()).models().unwrap().is_empty() || files.len() == 1, "{files:?}");
    }
    // Links to blobs that are gone are none, and are made again.
    let server = bundled_server();
    let (_dir, options) = cache(&server);
    open("org/model", &options).unwrap();
    fs::remove_dir_all(repo(&options).join("blobs")).unwrap();
    assert!(open("org/model", &offline(&options.cache)).is_err());
    open("org/model", &options).unwrap();
}

#[test]
fn a_branch_leads_to_a_commit_and_nowhere_else() {
    for text in ["../../../etc", "", "main", "\u{1b}[2J", &"A".repeat(40), &"0".repeat(1000)] {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), Some("main"), COMMIT, &[("config.json", b"{}"), ("model.safetensors", b"x")], true);
        fs::write(dir.path().join("models--org--model/refs/main"), text).unwrap();
        let error = open("org/model", &offline(dir.path())).unwrap_err().to_string();
        assert!(error.contains("refs/main: no commit is written there"), "{error}");
        // Others are listed nevertheless.
        let models = HubCache::at(dir.path()).models().unwrap();
        assert_eq!(models[0].name.to_string(), format!("org/model@{COMMIT}"));
    }
}

#[test]
fn one_of_several_in_the_cache_is_chosen() {
    let dir = tempfile::tempdir().unwrap();
    let options = offline(dir.path());
    let root = dir.path();
    write(root, Some("main"), COMMIT, &[("m-Q4_0.gguf", b"x")], true);
    let cache = HubCache::at(root);
    let found = |name: &str| cache.find(&name.parse().unwrap());
    // The only one needs no choice.
    assert_eq!(found("org/model").unwrap(), found("org/model:q4_0").unwrap());
    assert_eq!(found("org/model:Q8_0").unwrap(), None);
    write(root, Some("main"), COMMIT, &[("sub/m-Q8_0.gguf", b"x")], false);
    assert!(found("org/model:Q8_0").unwrap().unwrap().ends_with("sub/m-Q8_0.gguf"));
    let error = open("org/model", &options).unwrap_err().to_string();
    assert!(error.contains("2 models; it has :Q4_0, :Q8_0; write one of these behind the name"), "{error}");
    let names: Vec<_> = cache.models().unwrap().iter().map(|model| model.name.to_string()).collect();
    assert_eq!(names, ["org/model:Q4_0", "org/model:Q8_0"]);
}
