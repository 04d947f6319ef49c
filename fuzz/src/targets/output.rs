//! What a conversion finds where it writes: a folder with a manifest, and what an earlier one has left.
//!
//! Whatever these say, it removes what they list, and nothing else; and it either leaves the whole output, or the old one.

use super::{folder, folder_of, Seeds};
use crate::checkpoint::raw_file;
use crate::Bundle;
use candle_quant::Checkpoint;
use candle_quant_tools::convert::{convert, ConvertOptions, ConvertPlan, Recipe, RunOptions};
use serde_json::{json, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::OnceLock;
use tempfile::TempDir;

const OUT: &str = "out";
const PARTIAL: &str = "out.partial";
const MANIFEST: &str = "candle-quant.json";
/// A file that is nobody's business.
const BYSTANDER: &str = "thesis.txt";

const REPLACE: RunOptions =
    RunOptions { resume: false, overwrite: true, allow_nonfinite: false, max_relative_rms: None };

/// What is converted.
fn source() -> &'static Checkpoint {
    static SOURCE: OnceLock<(TempDir, Checkpoint)> = OnceLock::new();
    let (_, checkpoint) = SOURCE.get_or_init(|| {
        let folder = folder();
        let header = r#"{"a.weight":{"dtype":"F32","shape":[32,64],"data_offsets":[0,8192]}}"#;
        let numbers: Vec<u8> = (0..2048).flat_map(|number| (number as f32).sin().to_le_bytes()).collect();
        let weights = ("model.safetensors".to_owned(), raw_file(header, &numbers));
        let files = vec![weights, ("config.json".to_owned(), b"{}".to_vec())];
        Bundle { files, ..Bundle::default() }.write(folder.path()).expect("a checkpoint");
        let checkpoint = Checkpoint::open(folder.path()).expect("a checkpoint");
        (folder, checkpoint)
    });
    checkpoint
}

fn run_in(folder: &Path, options: &RunOptions) -> bool {
    let recipe = Recipe::safe("4".parse().expect("a format"));
    let plan = ConvertPlan::new(source(), &ConvertOptions::mlx(recipe)).expect("a plan");
    convert(&plan, folder.join(OUT), options, &|_| ()).is_ok()
}

fn files_of(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    Bundle::read(folder, "", |_| true).expect("a folder").files.into_iter().collect()
}

/// The output, with its manifest, and what lies beside it.
fn whole() -> Bundle {
    let folder = folder();
    assert!(run_in(folder.path(), &RunOptions::default()), "the output of nothing");
    let mut bundle = Bundle::read(folder.path(), "", |_| true).expect("an output");
    bundle.files.push((BYSTANDER.to_owned(), b"years of work".to_vec()));
    bundle
}

/// Outputs, also with manifests that list what is not theirs.
pub(super) fn manifests(_: &str) -> Seeds {
    let with = |files: &[(&str, &str)], listed: &[&str]| {
        let mut bundle = whole();
        let added = files.iter().map(|(name, content)| ((*name).to_owned(), content.as_bytes().to_vec()));
        bundle.files.extend(added);
        for (_, content) in bundle.files.iter_mut().filter(|file| file.0.ends_with(MANIFEST)) {
            let mut manifest: Value = serde_json::from_slice(content).expect("a manifest");
            listed.iter().for_each(|name| manifest["files"][*name] = json!({"bytes": 13, "sha256": ""}));
            *content = manifest.to_string().into_bytes();
        }
        bundle
    };
    let seeds = [
        ("whole", with(&[], &[])),
        ("added", with(&[("out/notes.txt", "mine")], &[])),
        ("below", with(&[("out/sub/a", "years of work")], &["sub/a"])),
        ("leads-out", with(&[], &["../thesis.txt", "/thesis.txt", "sub/../../thesis.txt"])),
    ];
    seeds.map(|(name, bundle)| (name.to_owned(), bundle)).into()
}

/// What conversions leave that fail at their end.
pub(super) fn journals(_: &str) -> Seeds {
    let folder = folder();
    let failing = RunOptions { max_relative_rms: Some(-1.), ..REPLACE };
    assert!(!run_in(folder.path(), &failing), "it fails");
    let left = Bundle::read(folder.path(), "", |_| true).expect("what it leaves");
    let replacing = Bundle { files: [left.files.clone(), whole().files].concat(), ..Bundle::default() };
    let mut leads_out = replacing.clone();
    leads_out.files.push(("out.partial/model/notes.txt".to_owned(), b"mine".to_vec()));
    for (_, content) in leads_out.files.iter_mut().filter(|file| file.0.ends_with("journal.json")) {
        let mut journal: Value = serde_json::from_slice(content).expect("a journal");
        journal["files"] = json!(["../../thesis.txt", "/thesis.txt", "model.safetensors"]);
        *content = journal.to_string().into_bytes();
    }
    let seeds = [("left", left), ("replacing", replacing), ("leads-out", leads_out)];
    seeds.map(|(name, bundle)| (name.to_owned(), bundle)).into()
}

pub(super) fn run(bundle: &Bundle) -> bool {
    static EXPECTED: OnceLock<BTreeMap<String, Vec<u8>>> = OnceLock::new();
    let expected = EXPECTED
        .get_or_init(|| whole().files.into_iter().filter(|(name, _)| name.starts_with("out/")).collect());
    let folder = folder_of(bundle);
    let before = files_of(folder.path());
    let done = run_in(folder.path(), &REPLACE);
    let after = files_of(folder.path());
    let below = |files: &BTreeMap<String, Vec<u8>>, place: &str| -> BTreeMap<String, Vec<u8>> {
        let place = format!("{place}/");
        files
            .iter()
            .filter(|(name, _)| name.starts_with(&place))
            .map(|(a, b)| (a.clone(), b.clone()))
            .collect()
    };
    let out = below(&before, OUT);
    if done {
        assert_eq!(&below(&after, OUT), expected, "the output");
        assert_eq!(below(&after, PARTIAL), BTreeMap::new(), "what is left");
        let listed = listed(&out, &format!("{OUT}/{MANIFEST}"));
        let foreign = out.keys().find(|name| !listed.contains(name.split_at(OUT.len() + 1).1));
        assert_eq!(foreign, None, "was not in the manifest, and is gone");
    } else if !out.is_empty() {
        assert_eq!(below(&after, OUT), out, "the old output");
    }
    let may_go = of_a_conversion(&before);
    for (name, content) in &before {
        if !name.starts_with("out/") && !may_go.contains(name) {
            assert_eq!(after.get(name), Some(content), "{name} is gone");
        }
    }
    done
}

/// The names in a manifest, and that of the manifest itself.
fn listed(files: &BTreeMap<String, Vec<u8>>, manifest: &str) -> BTreeSet<String> {
    let json: Option<Value> = files.get(manifest).and_then(|text| serde_json::from_slice(text).ok());
    let names = json.as_ref().and_then(|json| json["files"].as_object());
    names.into_iter().flatten().map(|(name, _)| name.clone()).chain([MANIFEST.to_owned()]).collect()
}

/// What of these files a conversion may remove that goes on with another's work.
fn of_a_conversion(files: &BTreeMap<String, Vec<u8>>) -> BTreeSet<String> {
    let mut all: BTreeSet<String> =
        ["lock", "journal.json", "journal.json.new", "made"].map(|name| format!("{PARTIAL}/{name}")).into();
    let journal: Option<Value> =
        files.get(&format!("{PARTIAL}/journal.json")).and_then(|text| serde_json::from_slice(text).ok());
    let begun = journal.as_ref().and_then(|json| json["files"].as_array());
    let begun: Vec<String> =
        begun.into_iter().flatten().filter_map(|name| name.as_str().map(str::to_owned)).collect();
    for place in ["model", "replaced"] {
        let place = format!("{PARTIAL}/{place}");
        let manifest = listed(files, &format!("{place}/{MANIFEST}"));
        all.extend(begun.iter().chain(&manifest).map(|name| format!("{place}/{name}")));
    }
    all
}
