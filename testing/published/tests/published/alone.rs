//! Unit tests and examples are in the packages; what they read has to be there, too.

use crate::PACKAGES;
use cargo_metadata::camino::{Utf8Path, Utf8PathBuf};
use published::{Alone, repository};
use regex::Regex;
use std::collections::BTreeSet;

/// Files and folders of the repository that string literals of a source name, but a package does not have. `source` is its
/// path in the package, and `folder` that of the package, seen from `root`. Literals are paths from the package, or from the
/// folder of the source, as those of `include_str!` are.
fn lacking(
    text: &str,
    source: &Utf8Path,
    (root, folder): (&Utf8Path, &Utf8Path),
    files: &BTreeSet<Utf8PathBuf>,
) -> Vec<String> {
    let literal = Regex::new(r#""([^"\\\s{}]*/[^"\\\s{}]*)""#).unwrap();
    let own = root.join(folder);
    let starts = [own.clone(), own.join(source.parent().unwrap())];
    let mut lacking = Vec::new();
    for found in literal.captures_iter(text).map(|found| found[1].to_string()) {
        // What follows `env!("CARGO_MANIFEST_DIR")` begins with a slash.
        let path = Utf8Path::new(found.trim_start_matches('/'));
        let is_name = path.components().any(|part| !matches!(part.as_str(), "." | ".."));
        let is_there = |start: &&Utf8PathBuf| start.join(path).exists();
        let in_package = |start: &Utf8PathBuf| {
            let whole = normal(&start.join(path));
            whole.strip_prefix(&own).is_ok_and(|path| files.iter().any(|file| file.starts_with(path)))
        };
        let mut there = starts.iter().filter(is_there).peekable();
        if is_name && there.peek().is_some() && !there.any(in_package) {
            lacking.push(found);
        }
    }
    lacking
}

/// A path without `..`. Links are not followed.
fn normal(path: &Utf8Path) -> Utf8PathBuf {
    let mut normal = Utf8PathBuf::new();
    for part in path.components() {
        match part.as_str() {
            ".." => drop(normal.pop()),
            "." => {}
            part => normal.push(part),
        }
    }
    normal
}

#[test]
fn sources_name_no_file_that_is_not_in_the_package() {
    let root = normal(Utf8Path::from_path(repository()).unwrap());
    for (name, package) in &PACKAGES.packages {
        let files: BTreeSet<Utf8PathBuf> = package.files.keys().cloned().collect();
        let sources = files.iter().filter(|file| file.starts_with("src") && file.extension() == Some("rs"));
        for source in sources {
            let text = package.text(source.as_str()).unwrap();
            let lacking = lacking(text, source, (&root, &package.folder), &files);
            assert!(lacking.is_empty(), "{name}: {source} names what is not in the package: {lacking:?}");
            let of_repository = text.contains("CANDLE_QUANT_REPOSITORY");
            assert!(
                !of_repository,
                "{name}: {source}: CANDLE_QUANT_REPOSITORY is for tests outside of packages"
            );
        }
    }
}

#[test]
fn a_path_out_of_the_package_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let root = Utf8Path::from_path(folder.path()).unwrap();
    for file in
        ["assets/tiny/a", "tests/b", "crates/one/src/deep/c", "crates/one/tests/d", "crates/one/data/e"]
    {
        std::fs::create_dir_all(root.join(file).parent().unwrap()).unwrap();
        std::fs::write(root.join(file), "").unwrap();
    }
    let files = ["src/deep/c", "src/deep/d.rs", "data/e"].map(Utf8PathBuf::from).into();
    let lacking = |text: &str| {
        lacking(text, Utf8Path::new("src/deep/d.rs"), (root, Utf8Path::new("crates/one")), &files)
    };
    for outside in
        ["../../assets/tiny", "../../assets/tiny/a", "/../../tests/b", "tests/d", "/tests/d", "../../tests/d"]
    {
        let text = format!("let path = concat!(env!(\"CARGO_MANIFEST_DIR\"), \"{outside}\");");
        assert_eq!(lacking(&text), [outside]);
    }
    let no_files = ["../a", "..", "../", "a/b", "/", "tests", "assets/tiny", "the tests/d of it"];
    for inside in ["data/e", "/data/e", "data/", "../deep/c", "./c"].iter().chain(&no_files) {
        assert!(lacking(&format!("let path = \"{inside}\";")).is_empty(), "{inside}");
    }
}

#[test]
fn packages_compile_from_what_is_in_them() {
    let alone = Alone::new(&PACKAGES).unwrap();
    if let Err(error) = alone.check() {
        panic!("the packages do not compile without the repository around them: {error:?}");
    }
}

#[test]
#[ignore = "takes minutes; scripts/test.sh --full runs it"]
fn packages_pass_their_tests_alone() {
    let alone = Alone::new(&PACKAGES).unwrap();
    if let Err(error) = alone.test() {
        panic!("tests of the packages fail without the repository around them: {error:?}");
    }
}
