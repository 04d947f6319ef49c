//! Writes what the compiler is asked about candle_nn's interface, from candle_nn's source as Cargo has it.

mod cargo;
mod checks;
mod count;
mod differences;
mod places;
mod planted;
mod signatures;
mod sources;

use cargo::{features_of, source_of};
use checks::{Check, Checks};
use count::Counts;
use differences::DIFFERENCES;
use sources::Sources;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    let folder = source_of("candle-nn");
    let facade = PathBuf::from("../../crates/nn");
    let manifest = facade.join("Cargo.toml");
    for watched in [folder.as_path(), Path::new("build"), Path::new("../../Cargo.lock"), &manifest] {
        println!("cargo:rerun-if-changed={}", watched.display());
    }
    let sources = Sources::read(&planted::planted(folder.clone()));
    let checks = Checks::of(&sources);
    let names: BTreeSet<_> = checks.checks.iter().map(|check| check.id.as_str()).collect();
    for (name, _) in DIFFERENCES {
        assert!(names.contains(name), "candle_nn has no item {name:?}: remove it from build/differences.rs");
    }

    let mut same = String::new();
    let mut different: BTreeMap<_, String> = BTreeMap::new();
    for check in &checks.checks {
        match DIFFERENCES.iter().find(|(name, _)| *name == check.id) {
            None => writeln!(same, "// {}, as {}\n{}\n", check.id, check.public, check.code).unwrap(),
            Some(difference) => different.entry(difference).or_default().push_str(&examples(check)),
        }
    }
    let different: String = different
        .into_iter()
        .map(|((name, reason), text)| {
            let module = name.replace(|letter: char| !letter.is_alphanumeric(), "_");
            format!("#[doc = {text:?}]\n#[doc = {reason:?}]\npub mod {module} {{}}\n")
        })
        .collect();
    let counts = |name: &str, counts: &Counts| {
        let rows: String = counts.iter().map(|(kind, count)| format!("({kind:?}, {count}), ")).collect();
        format!("pub const {name}: &[(&str, usize)] = &[{rows}];\n")
    };
    let counts = counts("CHECKED", &checks.counts())
        + &counts("OFF", &sources.off)
        + &counts("WRITTEN", &sources.written);
    let output = PathBuf::from(std::env::var("OUT_DIR").expect("Cargo sets it"));
    let missing: Vec<_> = features_of(&folder).difference(&features_of(&facade)).cloned().collect();
    let features = format!("pub const MISSING_FEATURES: &[&str] = &{missing:?};\n");
    let files = [
        ("interface.rs", same),
        ("differences.rs", different),
        ("counts.rs", counts),
        ("features.rs", features),
    ];
    for (name, text) in files {
        std::fs::write(output.join(name), text).expect("the folder is Cargo's");
    }
    // So that errors show readable lines. Without rustfmt they show long ones.
    let _ = Command::new("rustfmt").arg("--edition=2024").arg(output.join("interface.rs")).status();
}

/// Two examples for rustdoc: about candle_nn itself the code compiles, so it asks the right thing; about ours it doesn't.
fn examples(check: &Check) -> String {
    // rustdoc hides lines that begin with "# ".
    let ours = check.code.to_string().replace("# [", "#[");
    let original = ours.replace("candle_quant_nn", "candle_nn");
    format!("```\n{original}\nfn main() {{}}\n```\n```compile_fail\n{ours}\nfn main() {{}}\n```\n")
}
