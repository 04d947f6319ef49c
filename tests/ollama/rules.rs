//! Manifests and blobs of Ollama stores: one test for each rule on files (R1 to R8, R14, R15). Each message names
//! model, layer, digest and tensor, as far as there are any. Formats are in `ollama_formats.rs`.

use crate::checkpoint::{raw_file, rejected};
use crate::ollama::Model;
use candle_core::quantized::{gguf_file, GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use candle_quant::checkpoint::CheckpointKind;
use candle_quant::{Checkpoint, Error, Result};
use candle_quant_tools::verify::{verify_digest, verify_digests};
use serde_json::{json, Value};
use std::fs;

const NORM: [crate::checkpoint::Tensor; 1] = [("norm.weight", "F32", &[4])];

/// A model with one dense tensor, whose layer is the last one.
fn model() -> Model {
    Model::of(&json!({"model_type": "qwen3"}), &Value::Null, &NORM)
}

/// Opens the store with this text as the manifest.
fn with_manifest(text: &str) -> (Model, Result<Checkpoint>) {
    let model = model();
    fs::write(model.manifest_path(), text).unwrap();
    let opened = Checkpoint::open(model.root());
    (model, opened)
}

/// Opens a model whose last layer is a blob of these bytes; its error has to name the place.
#[track_caller]
fn blob_rejected(blob: &[u8], parts: &[&str]) {
    let mut model = model();
    model.add("tensor", Some("the.layer"), blob);
    let digest = format!("sha256:{}", model.digest());
    rejected(model.open(), parts);
    rejected(model.open(), &["layer `the.layer` of model `m:latest`", &digest]);
}

#[test]
fn models_open_by_store_and_by_manifest() {
    let model = model();
    let checkpoint = model.open().unwrap();
    assert_eq!(checkpoint.tensor_names().collect::<Vec<_>>(), ["norm.weight"]);
    let checkpoint = Checkpoint::open(model.manifest_path()).unwrap();
    assert_eq!(checkpoint.dense("norm.weight").unwrap().load(DType::F32, &Device::Cpu).unwrap().dims(), [4]);
}

/// R1
#[test]
fn manifests_are_json_of_layers() {
    for text in
        ["", "{", "null", "[]", "3", "{\"layers\":3}", "{\"layers\":[3]}", "{\"layers\":[],\"layers\":[]}"]
    {
        let (model, opened) = with_manifest(text);
        let path = model.manifest_path().canonicalize().unwrap();
        rejected(opened, &[path.to_str().unwrap(), "malformed JSON", "model `m:latest`"]);
    }
    for size in ["-1", "1.5", "\"3\"", "1e30", "99999999999999999999"] {
        let layer = format!(r#"{{"layers":[{{"digest":"sha256:{}","size":{size}}}]}}"#, "0".repeat(64));
        rejected(with_manifest(&layer).1, &["malformed JSON", "model `m:latest`"]);
    }
    for text in ["{}", r#"{"layers":null}"#, r#"{"layers":[]}"#] {
        rejected(with_manifest(text).1, &["the manifest of model `m:latest` lists no layers with weights"]);
    }
}

/// R1
#[test]
fn manifests_have_a_config() {
    let mut model = model();
    model.manifest["layers"].as_array_mut().unwrap().remove(0);
    rejected(model.open(), &["the manifest of model `m:latest` lists no layer `config.json`"]);
    for text in ["", "[]", "null", "{\"a\":"] {
        let mut model = self::model();
        model.manifest["layers"].as_array_mut().unwrap().remove(0);
        model.add("json", Some("config.json"), text.as_bytes());
        let digest = model.digest();
        rejected(model.open(), &["JSON", "layer `config.json` of model `m:latest`", &digest]);
    }
    let mut model = self::model();
    model.add("json", Some("config.json"), b"{}");
    rejected(model.open(), &["lists two layers `config.json` of different content", "`m:latest`"]);
}

/// R1
#[test]
fn layers_have_digest_and_size() {
    for key in ["digest", "size"] {
        let mut model = model();
        model.last().as_object_mut().unwrap().remove(key);
        rejected(model.open(), &["layer `norm.weight` of model `m:latest` has no digest or no size"]);
        let mut model = self::model();
        model.manifest["config"].as_object_mut().unwrap().remove(key);
        rejected(model.open(), &["of model `m:latest` has no digest or no size"]);
    }
}

/// R2
#[test]
fn digests_are_checked_before_they_are_paths() {
    let hex = "0123456789abcdefABCDEF0123456789abcdefABCDEF0123456789abcdefABCD";
    for digest in [
        "",
        "sha256",
        "sha256:",
        "sha256:../../../../etc/passwd",
        "sha256-/etc/passwd",
        "/etc/passwd",
        hex,
        &format!("sha256:{}", &hex[1..]),
        &format!("sha256:{hex}0"),
        &format!("sha512:{hex}"),
        &format!("SHA256:{hex}"),
        &format!("sha256/{hex}"),
        &format!("sha256:{}g", &hex[1..]),
        &format!("sha256:{}/..", &hex[3..]),
        &format!("sha256:{hex}\n"),
        &format!(" sha256:{hex}"),
    ] {
        let mut model = model();
        model.last()["digest"] = digest.into();
        let message = model.open().unwrap_err().to_string();
        let parts =
            ["layer `norm.weight` of model `m:latest`", "64 hexadecimal digits", &format!("{digest:?}")];
        for part in parts {
            assert!(message.contains(part), "{message}");
        }
        assert!(!message.contains("blobs"), "a path was made: {message}");
    }
}

/// R2 and section 2: both spellings, and blobs as the first versions named them.
#[test]
fn both_spellings_of_digests_are_accepted() {
    let mut model = model();
    let digest = model.digest();
    model.last()["digest"] = format!("sha256-{digest}").into();
    assert!(model.open().is_ok());
    let blobs = model.root().join("blobs");
    fs::rename(blobs.join(format!("sha256-{digest}")), blobs.join(format!("sha256:{digest}"))).unwrap();
    assert!(model.open().is_ok());
}

/// R3
#[test]
fn blobs_are_there() {
    for (kind, name) in [("tensor", Some("x.weight")), ("json", Some("x.json")), ("license", None)] {
        let mut model = model();
        model.add(kind, name, b"{}");
        let digest = model.digest();
        fs::remove_file(model.root().join(format!("blobs/sha256-{digest}"))).unwrap();
        let label = format!("layer `{}` of model `m:latest`", name.unwrap_or("license"));
        rejected(model.open(), &["this blob is missing", &label, &digest]);
    }
}

/// R4
#[test]
fn blobs_have_the_stated_size() {
    for (change, layer) in [(1, "norm.weight"), (-1, "norm.weight"), (1 << 40, "norm.weight")] {
        let mut model = model();
        let digest = model.digest();
        let size = model.last()["size"].as_i64().unwrap();
        model.last()["size"] = (size + change).into();
        let parts = [
            &format!("{size} bytes, the manifest states {} bytes", size + change),
            layer,
            "m:latest",
            &digest,
        ];
        rejected(model.open(), &parts);
    }
    let mut model = model();
    let digest = model.digest();
    let blob = model.root().join(format!("blobs/sha256-{digest}"));
    fs::remove_file(&blob).unwrap();
    fs::create_dir(&blob).unwrap();
    rejected(model.open(), &["no file, the manifest states", "norm.weight", "m:latest", &digest]);
}

/// R5
#[test]
fn other_content_of_the_same_size_is_found_on_request() {
    let mut model = model();
    let digest = model.digest();
    let path = model.root().join(format!("blobs/sha256-{digest}"));
    assert_eq!(verify_digests(&model.open().unwrap()).unwrap(), 3);
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, &bytes).unwrap();
    let checkpoint = model.open().unwrap();
    let label = "layer `norm.weight` of model `m:latest`";
    rejected(
        verify_digests(&checkpoint),
        &[path.file_name().unwrap().to_str().unwrap(), label, &digest, "expected"],
    );
    let wrong: Vec<_> = checkpoint.digests().iter().filter(|digest| verify_digest(digest).is_err()).collect();
    assert_eq!(wrong.len(), 1);
    assert_eq!((wrong[0].name(), wrong[0].sha256()), (label, digest.as_str()));
    assert_eq!(wrong[0].file(), path.canonicalize().unwrap());
    fs::remove_file(path).unwrap();
    assert!(matches!(verify_digest(wrong[0]), Err(Error::Io { .. })));
}

/// To open a named pipe waits for a writer that never comes.
#[cfg(unix)]
#[test]
fn a_blob_that_became_a_named_pipe_is_no_file() {
    let mut model = model();
    let digest = model.digest();
    let path = model.root().join(format!("blobs/sha256-{digest}"));
    let checkpoint = model.open().unwrap();
    fs::remove_file(&path).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
    let (sender, found) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(verify_digests(&checkpoint)));
    let found = found.recv_timeout(std::time::Duration::from_secs(60)).expect("it waits for a writer");
    rejected(found, &[path.file_name().unwrap().to_str().unwrap(), "not a regular file"]);
}

/// R6
#[test]
fn headers_are_whole() {
    let with_length = |length: u64, rest: &[u8]| [length.to_le_bytes().as_slice(), rest].concat();
    for blob in [&b""[..], b"1234567"] {
        blob_rejected(blob, &["bytes are too few for a safetensors file"]);
    }
    for (length, rest) in [(100_000_001, &b"{}"[..]), (u64::MAX, b"{}"), (u64::MAX - 7, b"")] {
        blob_rejected(&with_length(length, rest), &["it claims a header of"]);
    }
    for n in [3, 100_000_000] {
        blob_rejected(&with_length(n, b"{}"), &[&format!("the header claims {n} bytes and the file has 2")]);
    }
    for header in ["", "[]", "null", "3", "\"x\"", "{", r#"{"a":"#, "not json!!"] {
        blob_rejected(&raw_file(header, b""), &["malformed safetensors header"]);
    }
    for header in ["{}", r#"{"__metadata__":null}"#, r#"{"__metadata__":{"quant_type":"int4"}}"#] {
        blob_rejected(&raw_file(header, b""), &["the header lists no tensors"]);
    }
}

/// R7
#[test]
fn entries_are_sound() {
    for (dtype, shape, offsets, problem) in [
        ("\"F5\"", "[4]", "[0,16]", "`t`"),
        ("null", "[4]", "[0,16]", "`t`"),
        ("\"F32\"", "[-4]", "[0,16]", "`t`"),
        ("\"F32\"", "[4.0]", "[0,16]", "`t`"),
        ("\"F32\"", "[4]", "[0]", "`t`"),
        ("\"F32\"", "[4]", "[0,8,16]", "`t`"),
        ("\"F32\"", "[4]", "[0,\"16\"]", "`t`"),
        ("\"F32\"", "[4]", "[-1,15]", "`t`"),
        ("\"F32\"", "[4]", "[16,0]", "expected data_offsets that span 16 bytes"),
        ("\"F32\"", "[4]", "[0,17]", "expected data_offsets within the 16 bytes"),
        ("\"F32\"", "[4]", "[0,18446744073709551615]", "expected data_offsets within"),
        ("\"F32\"", "[5]", "[0,16]", "expected data_offsets that span 20 bytes"),
        ("\"F32\"", "[4294967296,4294967296]", "[0,16]", "expected a shape"),
        ("\"F4\"", "[3]", "[0,2]", "expected a shape of whole bytes"),
    ] {
        let header = format!(r#"{{"t":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}}}"#);
        blob_rejected(&raw_file(&header, &[0; 16]), &["`t`", problem]);
    }
    let two = r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"b":{"dtype":"F32","shape":[2],"data_offsets":[12,20]}}"#;
    blob_rejected(&raw_file(two, &[0; 20]), &["`b`", "overlaps the tensor before it"]);
}

/// R8
#[test]
fn tensors_are_in_one_layer() {
    let mut model = model();
    model.tensors("again", &json!({"a": "b"}), &NORM);
    let digest = model.digest();
    let parts = [
        "`norm.weight`",
        "each tensor in one layer",
        "another one in layer `norm.weight`",
        "layer `again` of model `m:latest`",
        &digest,
    ];
    rejected(model.open(), &parts);
    // The same blob twice says nothing twice.
    let mut model = self::model();
    model.tensors("again", &Value::Null, &NORM);
    assert_eq!(model.open().unwrap().tensor_names().count(), 1);
}

/// Section 2: layers are told apart by name where blobs are shared (versions up to 0.15).
#[test]
fn layers_may_share_a_blob() {
    let mut model = Model::new(&json!({}));
    let data: [crate::checkpoint::Tensor; 1] = [("data", "F32", &[4])];
    model.tensors("a.weight", &Value::Null, &data).tensors("b.weight", &Value::Null, &data);
    let checkpoint = model.open().unwrap();
    assert_eq!(checkpoint.tensor_names().collect::<Vec<_>>(), ["a.weight", "b.weight"]);
    model.last().as_object_mut().unwrap().remove("name");
    rejected(model.open(), &["neither header nor manifest name the tensor", "model `m:latest`"]);
}

/// R14
#[test]
fn missing_tensors_are_named() {
    let model = model();
    let checkpoint = model.open().unwrap();
    let parts = [model.root().to_str().unwrap(), "`lm_head.weight`", "found none"];
    rejected(checkpoint.weight("lm_head", Some(4)), &parts);
    rejected(checkpoint.dense("lm_head.weight"), &parts);
}

/// A GGUF file of one tensor, by candle's writer.
fn gguf() -> Vec<u8> {
    let tensor = Tensor::arange(0f32, 4., &Device::Cpu).unwrap();
    let norm = QTensor::quantize(&tensor, GgmlDType::F32).unwrap();
    let architecture = gguf_file::Value::String("other".into());
    let mut file = std::io::Cursor::new(Vec::new());
    let metadata = [("general.architecture", &architecture)];
    gguf_file::write(&mut file, &metadata, &[("output_norm.weight", &norm)]).unwrap();
    file.into_inner()
}

/// R15: models in GGUF files are those of that reader.
#[test]
fn gguf_models_are_recognised() {
    let mut model = Model::new(&json!({}));
    model.pop();
    model.add("model", None, &gguf()).add("license", None, b"free");
    let checkpoint = model.open().unwrap();
    assert_eq!(checkpoint.kind(), CheckpointKind::Gguf);
    assert_eq!(checkpoint.tensor_names().count(), 1);
    assert_eq!(verify_digests(&checkpoint).unwrap(), 3);
    let mut model = Model::new(&json!({}));
    for blob in [&b"GGML"[..], b"GGU", b"GGUF\x03\0\0\0"] {
        model.pop();
        model.add("model", None, blob);
        let digest = model.digest();
        rejected(model.open(), &["layer `model` of model `m:latest`", &digest]);
    }
}

/// R15
#[test]
fn cloud_models_are_told_apart() {
    let mut model = Model::new(&json!({}));
    model.pop();
    model.add("x", None, br#"{"remote_host":"https://ollama.com:443","remote_model":"m"}"#);
    model.manifest["config"] = model.pop();
    assert!(matches!(model.open(), Err(Error::Unsupported { .. })));
    rejected(
        model.open(),
        &["model `m:latest`, which runs on https://ollama.com:443 and has no weights here"],
    );
}

#[test]
fn adapters_are_not_passed_over_in_silence() {
    let mut model = model();
    model.add("adapter", None, b"GGUF");
    crate::checkpoint::warned(
        &model.open().unwrap(),
        &["layer `adapter` of model `m:latest`", "is not applied"],
    );
}

/// 6.3: what belongs to a draft model is there under its own names.
#[test]
fn drafts_do_not_disturb() {
    let mut model = model();
    model.add("json", Some("draft/config.json"), b"not read");
    model.tensors("draft.norm.weight", &Value::Null, &[("draft.norm.weight", "F32", &[4])]);
    model.tensors("mtp.fc.weight", &Value::Null, &[("mtp.fc.weight", "U32", &[4, 4])]);
    let checkpoint = model.open().unwrap();
    let names = ["draft.norm.weight", "mtp.fc.weight", "norm.weight"];
    assert_eq!(checkpoint.tensor_names().collect::<Vec<_>>(), names);
    assert_eq!(checkpoint.config()["model_type"], "qwen3");
    assert!(checkpoint.dense("norm.weight").is_ok() && checkpoint.warnings().is_empty());
}

#[test]
fn empty_stores_say_so() {
    let model = Model::new(&json!({}));
    rejected(Checkpoint::open(model.root()), &["an Ollama store without models"]);
    fs::write(model.root().join("manifests/registry.ollama.ai/library/m/.DS_Store"), "x").unwrap();
    rejected(Checkpoint::open(model.root()), &["an Ollama store without models"]);
}
