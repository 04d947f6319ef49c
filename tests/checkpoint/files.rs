//! Files: headers that lie, shards that are missing, data at odd offsets. Bad input is one error that
//! names the file, never a panic.

use crate::checkpoint::{file, folder, folder_of, header, raw_file, rejected, warned, Tensor};
use candle_core::{DType, Device};
use candle_quant::checkpoint::{Checkpoint, CheckpointKind, Weight};
use candle_quant::{Error, Result};
use proptest::prelude::*;
use proptest::test_runner::{TestCaseResult, TestRunner};
use serde_json::json;
use std::{fs, path::Path};

const TENSORS: [Tensor; 5] = [
    ("m.weight", "U32", &[8, 16]),
    ("m.scales", "BF16", &[8, 2]),
    ("m.biases", "BF16", &[8, 2]),
    ("m.bias", "F32", &[8]),
    ("norm.weight", "F16", &[3]),
];
const INDEX: &str = "model.safetensors.index.json";

/// Opens a directory whose only file is `model.safetensors` with these bytes.
fn open_bytes(bytes: &[u8]) -> Result<Checkpoint> {
    Checkpoint::open(folder_of(&[("model.safetensors", bytes)]).path())
}

/// Opens a file with this header and `size` bytes of data.
fn open_header(header: &str, size: usize) -> Result<Checkpoint> {
    open_bytes(&raw_file(header, &vec![0; size]))
}

#[test]
fn data_at_odd_offsets_is_read() {
    for padding in 0..8 {
        let (mut header, size) = header(&TENSORS);
        header.push_str(&" ".repeat(padding));
        let data: Vec<u8> = (0..size).map(|i| (i % 63) as u8).collect();
        let dir = folder_of(&[("model.safetensors", &raw_file(&header, &data))]);
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let bias = checkpoint.dense("m.bias").unwrap();
        assert_eq!(
            (bias.name(), bias.dtype(), bias.dims(), bias.size_in_bytes()),
            ("m.bias", DType::F32, &[8][..], 32)
        );
        let begin = 8 * 16 * 4 + 2 * 8 * 2 * 2;
        let expected: Vec<f32> = data[begin..begin + 32]
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
            .collect();
        let loaded = bias.load(DType::F32, &Device::Cpu).unwrap();
        assert_eq!(loaded.to_vec1::<f32>().unwrap(), expected);
        let doubled = bias.load(DType::F64, &Device::Cpu).unwrap();
        assert_eq!(
            doubled.to_vec1::<f64>().unwrap(),
            expected.iter().map(|&x| x.into()).collect::<Vec<f64>>()
        );
    }
}

/// Larger than the piece that is copied at a time, with bytes that tell the position.
#[test]
fn large_tensors_are_read_whole() {
    let elements = (9 << 20) / 2 + 5;
    let (header, size) = header(&[("first", "U8", &[3]), ("large", "I16", &[elements])]);
    assert_eq!(size, 3 + 2 * elements);
    let mut data = vec![1, 2, 3];
    data.extend((0..elements).flat_map(|i| ((i % 30011) as i16).to_le_bytes()));
    let dir = folder_of(&[("model.safetensors", &raw_file(&header, &data))]);
    let large = Checkpoint::open(dir.path()).unwrap().dense("large").unwrap();
    let loaded = large.load(DType::I16, &Device::Cpu).unwrap().to_vec1::<i16>().unwrap();
    assert_eq!(loaded.len(), elements);
    assert!(loaded.iter().enumerate().all(|(i, &x)| x == (i % 30011) as i16));
}

#[test]
fn dense_dtypes_are_loaded_as_they_are() {
    for dtype in ["U8", "U32", "I16", "I32", "I64", "F16", "BF16", "F32", "F64"] {
        let checkpoint = open_bytes(&file(&[("x", dtype, &[2, 3])])).unwrap();
        let dense = checkpoint.dense("x").unwrap();
        assert_eq!(format!("{:?}", dense.dtype()), dtype);
        let tensor = dense.load(dense.dtype(), &Device::Cpu).unwrap();
        assert_eq!((tensor.dtype(), tensor.dims()), (dense.dtype(), &[2, 3][..]));
        assert_eq!(checkpoint.kind(), CheckpointKind::Dense);
    }
    for dtype in ["F8_E4M3", "BOOL", "I8"] {
        let checkpoint = open_bytes(&file(&[("x", dtype, &[2, 3])])).unwrap();
        rejected(checkpoint.dense("x"), &["model.safetensors", "`x`", dtype, "F16, BF16"]);
    }
}

#[test]
fn truncated_files_are_refused() {
    let whole = file(&TENSORS);
    for length in [0, 1, 7] {
        rejected(open_bytes(&whole[..length]), &["model.safetensors", "too few for a safetensors file"]);
    }
    rejected(open_bytes(&whole[..8]), &["model.safetensors", "the header claims", "the file has 0"]);
    rejected(open_bytes(&whole[..100]), &["model.safetensors", "the header claims", "the file has 92"]);
    rejected(
        open_bytes(&whole[..whole.len() - 1]),
        &["model.safetensors", "`norm.weight`", "data_offsets within"],
    );
}

#[test]
fn headers_longer_than_the_file_are_refused() {
    for length in [9u64, 99_999_999, 100_000_001, u64::MAX] {
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend_from_slice(b"{}");
        rejected(open_bytes(&bytes), &["model.safetensors", &length.to_string()]);
    }
}

#[test]
fn headers_that_are_no_json_object_are_refused() {
    let deep = "[".repeat(100_000);
    for header in ["", "{", "[]", "null", "\"x\"", "{\"x\":1}", "{\"x\":{}}", "\u{0}", deep.as_str()] {
        rejected(open_header(header, 0), &["model.safetensors", "malformed safetensors header"]);
    }
    let mut bytes = raw_file("{\"x\":null}", &[]);
    bytes[11] = 0xff; // no UTF-8
    rejected(open_bytes(&bytes), &["model.safetensors", "malformed safetensors header"]);
}

#[test]
fn header_entries_are_checked() {
    for (entry, parts) in [
        (r#"{"dtype":"F32","shape":[2],"data_offsets":[0,4]}"#, ["span 8 bytes", "[0, 4]"]),
        (r#"{"dtype":"F16","shape":[2],"data_offsets":[0,8]}"#, ["span 4 bytes", "[0, 8]"]),
        (r#"{"dtype":"F32","shape":[2],"data_offsets":[8,0]}"#, ["span 8 bytes", "[8, 0]"]),
        (r#"{"dtype":"F32","shape":[2],"data_offsets":[4,12]}"#, ["within the 8 bytes", "[4, 12]"]),
        (
            r#"{"dtype":"F32","shape":[2],"data_offsets":[18446744073709551608,18446744073709551615]}"#,
            ["within the 8 bytes", "18446744073709551608"],
        ),
        (r#"{"dtype":"F4","shape":[3],"data_offsets":[0,8]}"#, ["whole bytes", "F4 [3]"]),
        (
            r#"{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]}"#,
            ["fits 64 bits", "4294967296"],
        ),
        (
            r#"{"dtype":"F32","shape":[9223372036854775807],"data_offsets":[0,8]}"#,
            ["fits 64 bits", "9223372036854775807"],
        ),
        (
            r#"{"dtype":"F32","shape":[4294967296,4294967296,0],"data_offsets":[0,0]}"#,
            ["fits 64 bits", "4294967296"],
        ),
        (r#"{"dtype":"F33","shape":[2],"data_offsets":[0,8]}"#, ["malformed", "F33"]),
        (r#"{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}"#, ["malformed", "-2"]),
        (r#"{"dtype":"F32","shape":[2.5],"data_offsets":[0,8]}"#, ["malformed", "2.5"]),
        (r#"{"dtype":"F32","shape":[2],"data_offsets":[0,8,9]}"#, ["malformed", "`a.b`"]),
        (r#"{"dtype":"F32","shape":[2]}"#, ["malformed", "data_offsets"]),
        (r#"{"dtype":"F32","data_offsets":[0,8]}"#, ["malformed", "shape"]),
    ] {
        let header = format!("{{\"a.b\":{entry}}}");
        rejected(open_header(&header, 8), &["model.safetensors", "`a.b`", parts[0], parts[1]]);
    }
}

#[test]
fn tensors_lie_side_by_side() {
    let two = |a: [usize; 2], b: [usize; 2]| {
        json!({
            "a": {"dtype": "U8", "shape": [a[1] - a[0]], "data_offsets": a},
            "b": {"dtype": "U8", "shape": [b[1] - b[0]], "data_offsets": b},
        })
        .to_string()
    };
    assert!(open_header(&two([0, 4], [4, 8]), 8).is_ok());
    assert!(open_header(&two([4, 8], [0, 4]), 8).is_ok());
    assert!(open_header(&two([0, 8], [8, 8]), 8).is_ok());
    rejected(open_header(&two([0, 4], [2, 8]), 8), &["model.safetensors", "`b`", "overlaps"]);
    rejected(open_header(&two([0, 8], [0, 8]), 8), &["model.safetensors", "`b`", "overlaps"]);
    rejected(open_header(&two([0, 3], [4, 8]), 8), &["model.safetensors", "`b`", "gap"]);
    rejected(open_header(&two([1, 4], [4, 8]), 8), &["model.safetensors", "`a`", "gap"]);
    rejected(open_header(&two([0, 4], [4, 8]), 9), &["model.safetensors", "1 bytes after the last tensor"]);
    let twice = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}"#;
    rejected(open_header(twice, 8), &["model.safetensors", "`a` is listed twice"]);
}

#[test]
fn directories_without_a_checkpoint_are_refused() {
    rejected(
        Checkpoint::open(folder_of(&[]).path()),
        &["no model.safetensors.index.json and no model*.safetensors"],
    );
    let other = folder_of(&[("config.json", b"{}"), ("adapters.safetensors", &file(&TENSORS))]);
    rejected(Checkpoint::open(other.path()), &["no model*.safetensors", other.path().to_str().unwrap()]);
    let missing = other.path().join("missing");
    assert!(matches!(Checkpoint::open(&missing), Err(Error::Io { path, .. }) if path == missing));
    let no_file = folder_of(&[]);
    fs::create_dir(no_file.path().join("model.safetensors")).unwrap();
    rejected(Checkpoint::open(no_file.path()), &["model.safetensors", "not a regular file"]);
}

#[test]
fn configs_are_json_objects() {
    let model = file(&TENSORS);
    for config in ["", "[]", "3", "{\"quantization\":", "\u{0}"] {
        let dir = folder_of(&[("model.safetensors", &model), ("config.json", config.as_bytes())]);
        rejected(Checkpoint::open(dir.path()), &["config.json"]);
    }
}

#[test]
fn a_file_can_be_opened_by_itself() {
    let dir = folder_of(&[("weights.safetensors", &file(&TENSORS))]);
    let path = dir.path().join("weights.safetensors");
    let checkpoint = Checkpoint::open(&path).unwrap();
    assert_eq!(checkpoint.path(), path);
    assert_eq!((checkpoint.config(), checkpoint.tokenizer_file()), (&json!(null), None));
    assert!(checkpoint.tensor_names().eq(["m.bias", "m.weight", "norm.weight"]));
    assert!(checkpoint.contains("m.bias") && !checkpoint.contains("m"));

    fs::write(dir.path().join("config.json"), r#"{"quantization":{"bits":8,"group_size":32}}"#).unwrap();
    fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    assert_eq!(checkpoint.tokenizer_file(), Some(dir.path().join("tokenizer.json")));
    let Weight::Packed(packed) = checkpoint.weight("m", None).unwrap() else { panic!("dense") };
    assert_eq!(packed.format().to_string(), "affine 8-bit g32");
}

#[test]
fn modules_are_listed_in_counting_order() {
    let names = ["l.10.a", "l.2.a", "l.2.b", "l.2", "l.x", "a.02", "a.2", "l.1a.b", "a.18446744073709551616"];
    let weights: Vec<_> = names.iter().map(|name| format!("{name}.weight")).collect();
    let mut tensors: Vec<Tensor> = weights.iter().map(|name| (name.as_str(), "F16", &[1usize][..])).collect();
    tensors.push(("l.2.a.bias", "F16", &[1]));
    let checkpoint = open_bytes(&file(&tensors)).unwrap();
    assert_eq!(
        checkpoint.modules(),
        ["a.02", "a.2", "a.18446744073709551616", "l.2", "l.2.a", "l.2.b", "l.10.a", "l.1a.b", "l.x"]
    );
}

#[test]
fn missing_tensors_are_named() {
    let dir = folder(&json!({}), &[("model.norm.weight", "F16", &[3])]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let path = dir.path().to_str().unwrap();
    rejected(
        checkpoint.weight("norm", None),
        &[path, "`norm.weight`", "found none", "there is `model.norm.weight`"],
    );
    rejected(checkpoint.dense("x.model.norm.weight"), &[path, "there is `model.norm.weight`"]);
    rejected(checkpoint.dense("orm.weight"), &[path, "`orm.weight`", "check that the model fits"]);
}

/// Two shards with these tensors and an index with this weight map.
fn sharded(weight_map: &str, first: &[Tensor], second: &[Tensor]) -> tempfile::TempDir {
    let index = format!("{{\"metadata\":{{}},\"weight_map\":{weight_map}}}");
    folder_of(&[
        ("model-1.safetensors", &file(first)),
        ("model-2.safetensors", &file(second)),
        (INDEX, index.as_bytes()),
    ])
}

const A: Tensor = ("a", "F16", &[3]);
const B: Tensor = ("b", "F16", &[3]);

#[test]
fn the_index_says_where_tensors_are() {
    let dir = sharded(r#"{"a":"model-1.safetensors","b":"model-2.safetensors"}"#, &[A], &[B]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert!(checkpoint.tensor_names().eq(["a", "b"]));
    assert!(checkpoint.warnings().is_empty());

    // What it does not list does not exist, be it in a shard it names or in another file.
    let dir = sharded(r#"{"a":"model-1.safetensors"}"#, &[A, B], &[("c", "F16", &[3])]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert!(checkpoint.tensor_names().eq(["a"]));
    warned(&checkpoint, &["model-1.safetensors", "1 tensors", "`b`"]);
}

#[test]
fn an_index_that_does_not_fit_its_shards_is_refused() {
    let open = |weight_map: &str| Checkpoint::open(sharded(weight_map, &[A], &[B]).path());
    rejected(
        open(r#"{"a":"model-1.safetensors","b":"model-1.safetensors"}"#),
        &["model-1.safetensors", "`b`", INDEX, "no such tensor"],
    );
    rejected(
        open(r#"{"a":"model-1.safetensors","b":"model-3.safetensors"}"#),
        &["model-3.safetensors", "shard is missing", "`b`", INDEX],
    );
    rejected(
        open(r#"{"a":"model-1.safetensors","a":"model-2.safetensors"}"#),
        &[INDEX, "`a` is listed twice"],
    );
    rejected(open("{}"), &[INDEX, "lists no tensors"]);
    rejected(open("[]"), &[INDEX, "malformed JSON"]);
    rejected(open(r#"{"a":1}"#), &[INDEX, "malformed JSON", "`a`"]);
}

#[test]
fn an_index_names_files_beside_it_only() {
    let outside = folder_of(&[("secret.safetensors", &file(&[A]))]);
    let absolute = outside.path().join("secret.safetensors");
    let sub = |name: &str| format!("sub/{name}");
    for shard in [
        absolute.to_str().unwrap(),
        "../secret.safetensors",
        "..",
        ".",
        "",
        "./model-1.safetensors",
        "model-1.safetensors/",
        &sub("model-1.safetensors"),
    ] {
        let dir = sharded(&json!({"a": shard}).to_string(), &[A], &[B]);
        rejected(Checkpoint::open(dir.path()), &[INDEX, "not a plain file name", &format!("{shard:?}")]);
    }
}

#[test]
fn without_an_index_all_files_belong_together() {
    let dir = folder_of(&[
        ("model-1.safetensors", &file(&[A])),
        ("model-2.safetensors", &file(&[B])),
        ("x.safetensors", b""),
    ]);
    assert!(Checkpoint::open(dir.path()).unwrap().tensor_names().eq(["a", "b"]));
    let dir = folder_of(&[("model-1.safetensors", &file(&[A])), ("model-2.safetensors", &file(&[B, A]))]);
    rejected(
        Checkpoint::open(dir.path()),
        &["model-2.safetensors", "`a`", "the same tensor in", "model-1.safetensors"],
    );
}

/// Opens whatever is in `dir` and asks for all of it.
fn open_and_load_everything(dir: &Path) -> Result<()> {
    let checkpoint = Checkpoint::open(dir)?;
    let modules = checkpoint.modules();
    for (module, k) in modules.iter().flat_map(|module| [(module, None), (module, Some(128))]) {
        match checkpoint.weight(module, k)? {
            Weight::Packed(packed) => drop(packed.load(&Device::Cpu)?),
            other => drop(other.to_dense(DType::F32, &Device::Cpu)?),
        }
    }
    for name in checkpoint.tensor_names().filter(|name| !name.ends_with(".weight")) {
        checkpoint.dense(name)?.load(DType::F32, &Device::Cpu)?;
    }
    Ok(())
}

/// Damaged files give an error of this crate that names a file, or load.
#[test]
fn damage_is_an_error_at_most() {
    let cases = ProptestConfig { cases: 5_000, failure_persistence: None, ..ProptestConfig::default() };
    std::thread::scope(|scope| {
        for which in 0..4 {
            let mut runner = TestRunner::new(cases.clone());
            let edits = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0usize..4), 1..4);
            scope.spawn(move || {
                let result = runner.run(&edits, |edits| damage(which, edits));
                result.unwrap_or_else(|error| panic!("file {which}: {error}"));
            });
        }
    });
}

/// Edits of one of four files: where, a value, and what is done there.
fn damage(which: usize, edits: Vec<(prop::sample::Index, u8, usize)>) -> TestCaseResult {
    let mut files = [
        ("model-1.safetensors", file(&TENSORS[..2])),
        ("model-2.safetensors", file(&TENSORS[2..])),
        ("config.json", br#"{"quantization":{"bits":4,"group_size":64,"m":{"bits":4,"mode":"affine"}}}"#.to_vec()),
        (INDEX, json!({"weight_map": {
            "m.weight": "model-1.safetensors", "m.scales": "model-1.safetensors", "m.biases": "model-2.safetensors",
            "m.bias": "model-2.safetensors", "norm.weight": "model-2.safetensors",
        }}).to_string().into_bytes()),
    ];
    let bytes = &mut files[which].1;
    for (at, value, kind) in edits {
        let at = at.index(bytes.len().max(1));
        match kind {
            _ if at >= bytes.len() => bytes.push(value),
            0 => bytes[at] = value,
            1 => bytes[at] ^= 1 << (value % 8),
            2 => bytes.insert(at, value),
            _ if value < 64 => bytes.truncate(at),
            _ => drop(bytes.remove(at)),
        }
    }
    let files: Vec<_> = files.iter().map(|(name, bytes)| (*name, bytes.as_slice())).collect();
    let dir = folder_of(&files);
    if let Err(error) = open_and_load_everything(dir.path()) {
        prop_assert!(
            !matches!(error, Error::Candle(_) | Error::Mismatch { .. }),
            "unchecked before use: {error}"
        );
        prop_assert!(error.to_string().contains(dir.path().to_str().unwrap()), "no file named: {error}");
    }
    Ok(())
}
