//! Damaged files beside the weights. Whatever they say, `verify` tells what is wrong or finds nothing, what it passes can be
//! used, nothing panics, and none of it takes much memory.
//!
//! `CANDLE_QUANT_COMPANION_CASES` sets how many files are damaged.

use candle_quant::{Checkpoint, Untrusted};
use candle_quant_tools::verify::verify_path;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use serde_json::{json, Value};
use std::fs;
use tempfile::TempDir;

#[path = "../../../tests/common/allocations.rs"]
mod allocations;
#[path = "../../../tests/common/tokenizers.rs"]
mod tokenizers;
use allocations::{alone, peak_of, Counting};
use tokenizers::{companions, tokenizers, use_all};

#[global_allocator]
static COUNTING: Counting = Counting;

const MOST: usize = 300_000_000;

/// A checkpoint of one tensor, with nothing beside it.
fn checkpoint() -> TempDir {
    let folder = TempDir::new().unwrap();
    let tensor = candle_core::Tensor::new(&[1f32, 2.], &candle_core::Device::Cpu).unwrap();
    let bytes = safetensors::serialize([("norm.weight", tensor)], None).unwrap();
    fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    fs::write(folder.path().join("config.json"), r#"{"eos_token_id": 0}"#).unwrap();
    folder
}

/// A place in a document: the keys and numbers that lead there.
fn place<'v>(rng: &mut StdRng, value: &'v mut Value) -> &'v mut Value {
    let is_leaf = match &*value {
        Value::Object(object) => object.is_empty(),
        Value::Array(array) => array.is_empty(),
        _ => true,
    };
    if is_leaf || rng.random_range(0..5) == 0 {
        return value;
    }
    match value {
        Value::Object(object) => {
            let index = rng.random_range(0..object.len());
            place(rng, object.values_mut().nth(index).unwrap())
        }
        Value::Array(array) => {
            let index = rng.random_range(0..array.len());
            place(rng, &mut array[index])
        }
        other => other,
    }
}

fn damage(rng: &mut StdRng, document: &mut Value) {
    let other = place(rng, &mut document.clone()).clone();
    let found = place(rng, document);
    let extremes = [
        json!(null),
        json!(true),
        json!(0),
        json!(-1),
        json!(1),
        json!(u32::MAX),
        json!(u64::MAX),
        json!(1e308),
        json!(1u64 << 40),
        json!(""),
        json!("\u{0}"),
        json!("a"),
        json!("é"),
        json!("x".repeat(20_000)),
        json!("[CLS]"),
        json!([]),
        json!({}),
        json!("(?:a{999}){999}"),
        json!("(?=(a+)+b)"),
        json!("/////w=="),
        json!("BAAAAP////8A"),
    ];
    match (rng.random_range(0..8), found) {
        (0..3, found) => *found = extremes.choose(rng).unwrap().clone(),
        (3, found) => *found = other,
        (4, found) => {
            for _ in 0..rng.random_range(1..150) {
                *found = json!([found.take()]);
            }
        }
        (5, Value::Object(object)) => {
            if let Some(key) = object.keys().nth(rng.random_range(0..object.len().max(1))).cloned() {
                let value = object.remove(&key).unwrap();
                if rng.random() {
                    object.insert(format!("{key}x"), value);
                }
            }
        }
        (_, Value::Array(array)) => {
            let times = *[0, 2, 50, 2000].choose(rng).unwrap();
            let copy: Vec<_> = array.iter().take(50).cloned().collect();
            (0..times).for_each(|_| array.extend(copy.iter().take(8).cloned()));
            if times == 0 {
                array.pop();
            }
        }
        (_, Value::String(text)) if text.len() < 30_000 => {
            *text = text.repeat(*[0, 2, 3000].choose(rng).unwrap())
        }
        (_, Value::Number(number)) => {
            *number = (number.as_u64().unwrap_or(7).wrapping_mul(1 << rng.random_range(0..40))).into();
        }
        (_, found) => *found = extremes.choose(rng).unwrap().clone(),
    }
}

fn damage_bytes(rng: &mut StdRng, bytes: &mut Vec<u8>) {
    let at = rng.random_range(0..bytes.len().max(1));
    match rng.random_range(0..5) {
        _ if at >= bytes.len() => bytes.push(rng.random()),
        0 => bytes[at] ^= 1 << rng.random_range(0..8),
        1 => bytes.truncate(at),
        2 => drop(bytes.remove(at)),
        3 => bytes.insert(at, *b"\"{}[],:\\0-\xff".choose(rng).unwrap()),
        _ => {
            let end = (at + rng.random_range(1..40)).min(bytes.len());
            let copy = bytes[at..end].to_vec();
            drop(bytes.splice(at..at, copy));
        }
    }
}

#[test]
fn damaged_files_are_told_of() {
    let _alone = alone();
    let cases = std::env::var("CANDLE_QUANT_COMPANION_CASES").ok();
    let cases: u64 = cases.map_or(300, |cases| cases.parse().expect("a number of cases"));
    let folder = checkpoint();
    let (mut refused, mut largest) = (0, 0);
    for case in 0..cases {
        let mut rng = StdRng::seed_from_u64(case);
        let (name, mut document) = companions().choose(&mut rng).unwrap().clone();
        let as_bytes = rng.random_range(0..4) == 0;
        let times = rng.random_range(1..4);
        if !as_bytes {
            (0..times).for_each(|_| damage(&mut rng, &mut document));
        }
        let mut bytes = document.to_string().into_bytes();
        if as_bytes {
            (0..times).for_each(|_| damage_bytes(&mut rng, &mut bytes));
        }
        let path = folder.path().join(name);
        fs::write(&path, &bytes).unwrap();
        let (report, peak) = peak_of(|| verify_path(folder.path()));
        let shown = String::from_utf8_lossy(&bytes);
        let shown = Untrusted::new(&shown);
        assert!(peak < MOST, "case {case}: verify takes {peak} bytes for {name}: {shown}");
        assert!(
            report.findings.iter().all(|finding| finding.message.contains(name)),
            "case {case}: {report:?}"
        );
        refused += u64::from(!report.passed(false));
        if name == "tokenizer.json" {
            let (used, peak_of_use) = peak_of(|| use_all(&Checkpoint::open(folder.path()).unwrap()));
            assert!(peak_of_use < MOST, "case {case}: {peak_of_use} bytes for {shown}");
            largest = largest.max(peak_of_use);
            // Some fail at the first use only.
            assert!(report.passed(false) || used.is_err(), "case {case}: {report:?} of {shown}");
        }
        largest = largest.max(peak);
        fs::remove_file(path).unwrap();
    }
    println!("{refused} of {cases} refused, {:.1} MB at most", largest as f64 / 1e6);
    assert!(refused > cases / 4 && refused < cases, "{refused} of {cases}");
}

#[test]
fn whole_files_are_fine() {
    let _alone = alone();
    for (name, document) in companions() {
        let folder = checkpoint();
        fs::write(folder.path().join(name), document.to_string()).unwrap();
        let report = verify_path(folder.path());
        assert!(report.passed(true), "{name}: {report:?}");
        if name == "tokenizer.json" {
            use_all(&Checkpoint::open(folder.path()).unwrap()).unwrap();
        }
    }
}

/// What made the tokenizers crate panic, or take gigabytes.
#[test]
fn tokenizers_of_attackers_are_errors() {
    let _alone = alone();
    let base = |section: &str, value: Value| {
        let mut tokenizer = tokenizers().remove(1);
        tokenizer[section] = value;
        tokenizer
    };
    let charsmap =
        |text: &str| base("normalizer", json!({"type": "Precompiled", "precompiled_charsmap": text}));
    let mut padded = base(
        "padding",
        json!({"strategy": "BatchLongest", "direction": "Right",
        "pad_to_multiple_of": 1u64 << 40, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}),
    );
    padded["truncation"] =
        json!({"direction": "Left", "max_length": 0, "strategy": "OnlySecond", "stride": u64::MAX});
    let long = "x".repeat(3_000_000);
    let many: Vec<_> = (0..1_000_000).map(|index| json!([format!("{index:08}"), -1.0])).collect();
    for (what, tokenizer, problem) in [
        (
            "a template without its token",
            base(
                "post_processor",
                json!({"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}], "pair": [], "special_tokens": {}}),
            ),
            Some("[X]"),
        ),
        ("an empty table", charsmap("AAAAAA=="), Some("empty table")),
        ("no table", charsmap(""), Some("no table")),
        ("a table of four gigabytes", charsmap("/////wAA"), Some("4294967295 bytes")),
        ("a table that leads out of itself", charsmap("BAAAAP////8A"), Some("gives up")),
        ("padding to a terabyte", padded, None),
        (
            "a token of megabytes",
            base("model", json!({"type": "Unigram", "unk_id": 0, "vocab": [[long, 0.0]]})),
            Some("of memory"),
        ),
        (
            "a million tokens",
            base("model", json!({"type": "Unigram", "unk_id": 0, "vocab": many})),
            Some("of memory"),
        ),
        (
            "a text that grows",
            base(
                "normalizer",
                json!({"type": "Sequence", "normalizers": vec![
            json!({"type": "Replace", "pattern": {"Regex": "."}, "content": "x".repeat(60)}); 20]}),
            ),
            Some("grow"),
        ),
        (
            "a pattern that grows",
            base(
                "pre_tokenizer",
                json!({"type": "Split", "behavior": "Isolated", "invert": false,
            "pattern": {"Regex": "(?:(?:(?=a)a){60000}){60000}"}}),
            ),
            Some("repetitions"),
        ),
    ] {
        let folder = checkpoint();
        fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        let (report, peak) = peak_of(|| verify_path(folder.path()));
        println!("{what}: {:.1} MB", peak as f64 / 1e6);
        assert!(peak < MOST, "{what}: {peak}");
        match problem {
            None => assert!(report.passed(true), "{what}: {report:?}"),
            Some(problem) => {
                let message = &report.findings[0].message;
                assert!(message.contains("tokenizer.json") && message.contains(problem), "{what}: {message}");
            }
        }
        assert_eq!(use_all(&Checkpoint::open(folder.path()).unwrap()).is_err(), problem.is_some(), "{what}");
    }
}
