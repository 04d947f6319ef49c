use crate::PACKAGES;
use cargo_metadata::camino::{Utf8Path, Utf8PathBuf};
use published::repository;
use std::collections::BTreeSet;
use std::fs;

/// Folders and files that each package has beside its sources, README and licences, and the kilobytes that it may have,
/// compressed, which everyone downloads. The model that examples of the documentation open has 1020.
const MORE: [(&str, &[&str], u64); 6] = [
    ("candle-quant", &["CHANGELOG.md", "assets/tiny", "build.rs", "cuda"], 2000),
    ("candle-quant-delay-load", &["symbols"], 30),
    ("candle-quant-models", &["assets/tiny"], 1200),
    ("candle-quant-nn", &["assets/tiny"], 1100),
    ("candle-quant-packed", &[], 30),
    ("candle-quant-tools", &["assets/tiny", "build.rs"], 1300),
];
const ALL: [&str; 4] = ["LICENSE-APACHE", "LICENSE-MIT", "README.md", "src"];
const CARGOS: [&str; 4] = [".cargo_vcs_info.json", "Cargo.lock", "Cargo.toml", "Cargo.toml.orig"];

/// Adds the files at and below `path`, seen from `folder`.
fn collect(folder: &Utf8Path, path: &Utf8Path, files: &mut BTreeSet<Utf8PathBuf>) {
    let whole = folder.join(path);
    if whole.is_dir() {
        for entry in whole.read_dir_utf8().unwrap() {
            collect(folder, &path.join(entry.unwrap().file_name()), files);
        }
    } else {
        assert!(whole.is_file(), "{whole} is missing");
        files.insert(path.to_owned());
    }
}

#[test]
fn every_package_has_its_files_and_no_others() {
    let names: Vec<&str> = PACKAGES.packages.keys().map(String::as_str).collect();
    assert_eq!(
        names,
        MORE.map(|(name, ..)| name),
        "what is published; whoever adds a crate says here what is in it"
    );
    for (name, more, most) in MORE {
        let package = &PACKAGES.packages[name];
        let root = Utf8Path::from_path(repository()).unwrap();
        let mut expected = BTreeSet::new();
        for path in ALL.iter().chain(more) {
            collect(&root.join(&package.folder), Utf8Path::new(path), &mut expected);
        }
        // The first is there if the repository is one of git.
        let found = package.files.keys().filter(|file| !CARGOS.contains(&file.as_str())).cloned();
        let found: BTreeSet<Utf8PathBuf> = found.collect();
        let missing: Vec<_> = expected.difference(&found).collect();
        let needless: Vec<_> = found.difference(&expected).collect();
        assert!(
            missing.is_empty() && needless.is_empty(),
            "{name}: missing in the package {missing:?}, needless {needless:?}: see `include` in its Cargo.toml"
        );
        let kilobytes = package.compressed / 1000;
        assert!(kilobytes <= most, "{name} has {kilobytes} kB, which everyone downloads; at most {most}");
    }
}

#[test]
fn licences_are_those_of_the_repository() {
    for file in ["LICENSE-APACHE", "LICENSE-MIT"] {
        let own = fs::read_to_string(repository().join(file)).unwrap();
        for (name, package) in &PACKAGES.packages {
            assert_eq!(package.text(file).unwrap(), own, "{name}: {file}");
        }
    }
}
