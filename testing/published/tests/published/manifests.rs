use crate::PACKAGES;
use toml::{Table, Value};

fn manifests() -> impl Iterator<Item = (&'static str, Table)> {
    PACKAGES
        .packages
        .iter()
        .map(|(name, package)| (name.as_str(), package.text("Cargo.toml").unwrap().parse().unwrap()))
}

/// Tests, examples and benches read fixtures and models of the repository.
#[test]
fn packages_have_no_targets_that_need_the_repository() {
    for (name, manifest) in manifests() {
        for kind in ["bench", "example", "test"] {
            assert_eq!(manifest.get(kind), None, "{name}: the package has targets of the kind {kind}");
        }
    }
}

#[test]
fn dependencies_are_those_of_registries() {
    for (name, manifest) in manifests() {
        let mut tables = vec![&manifest];
        let targets = manifest.get("target").and_then(Value::as_table);
        tables.extend(targets.into_iter().flat_map(|targets| targets.values().filter_map(Value::as_table)));
        let mut seen = 0;
        for kind in ["dependencies", "build-dependencies"] {
            for dependencies in tables.iter().filter_map(|table| table.get(kind)?.as_table()) {
                for (dependency, how) in dependencies {
                    assert!(how.get("version").is_some(), "{name}: {dependency} has no version");
                    assert!(
                        how.get("git").or(how.get("path")).is_none(),
                        "{name}: {dependency} is no crate of a registry"
                    );
                    seen += 1;
                }
            }
        }
        assert!(seen > 0, "{name} depends on something");
    }
}

/// What a registry's page shows, by crates.io's rules.
#[test]
fn registries_are_told_what_they_show() {
    for (name, manifest) in manifests() {
        let package = manifest["package"].as_table().unwrap();
        let text = |key: &str| {
            package
                .get(key)
                .and_then(Value::as_str)
                .unwrap_or_else(|| panic!("{name}: its Cargo.toml has no {key}"))
        };
        assert_eq!(text("license"), "MIT OR Apache-2.0", "{name}");
        assert_eq!(text("readme"), "README.md", "{name}");
        assert_eq!(text("documentation"), format!("https://docs.rs/{name}"), "{name}");
        assert!(!text("rust-version").is_empty() && !text("description").is_empty(), "{name}");
        for key in ["keywords", "categories"] {
            let words = package.get(key).and_then(Value::as_array).map_or(0, Vec::len);
            assert!((1..=5).contains(&words), "{name}: {words} {key}; from one to five");
        }
        let keywords = package["keywords"].as_array().unwrap().iter().filter_map(Value::as_str);
        for word in keywords {
            let allowed = |c: char| c.is_ascii_alphanumeric() || "_-+".contains(c);
            assert!(word.len() <= 20 && word.chars().all(allowed), "{name}: {word} is no keyword");
        }
    }
}

/// docs.rs has no CUDA.
#[test]
fn docs_rs_shows_all_features_that_build_without_cuda() {
    // What is for tests, needs CUDA, or is candle_nn's own.
    let others =
        ["accelerate", "cuda", "cudnn", "cutile", "metal", "metal-debug-labels", "mkl", "nccl", "testing"];
    for (name, manifest) in manifests() {
        let docs_rs = &manifest["package"]["metadata"]["docs"]["rs"];
        let list = |value: Option<&Value>| -> Vec<String> {
            let values = value.and_then(Value::as_array).into_iter().flatten();
            values.filter_map(Value::as_str).map(String::from).collect()
        };
        assert_eq!(list(docs_rs.get("targets")), ["x86_64-unknown-linux-gnu"], "{name}");
        let features = manifest.get("features").and_then(Value::as_table).cloned().unwrap_or_default();
        let defaults = list(features.get("default"));
        let shown = list(docs_rs.get("features"));
        for feature in features.keys().filter(|feature| *feature != "default") {
            let is_shown = shown.contains(feature) || defaults.contains(feature);
            assert_eq!(
                is_shown,
                !others.contains(&feature.as_str()),
                "{name}: {feature}, in package.metadata.docs.rs"
            );
        }
    }
}
