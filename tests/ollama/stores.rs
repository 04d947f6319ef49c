//! Models that Ollama's importer wrote, of four eras: every tensor has the numbers that two other decoders gave.

use candle_core::{DType, Device, Tensor};
use candle_quant::checkpoint::{Checkpoint, CheckpointKind, Weight};
use candle_quant::VarBuilder;
use candle_quant_models::{Config, Model};
use candle_quant_tools::verify::verify_digests;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

fn fixtures() -> PathBuf {
    Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures/ollama")
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap_or_else(|error| panic!("{path:?}: {error}"))
}

/// What is expected of each model, `store/model:tag`: every tensor's shape, type and digest of its F32 numbers.
fn expected() -> BTreeMap<String, BTreeMap<String, Value>> {
    serde_json::from_value(json(&fixtures().join("expected.json"))).unwrap()
}

/// The manifest of `store/model:tag`.
fn manifest(model: &str) -> PathBuf {
    let (store, name) = model.split_once('/').unwrap();
    fixtures().join(store).join("manifests/registry.ollama.ai/library").join(name.replace(':', "/"))
}

fn sha256(tensor: &Tensor) -> String {
    let numbers = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The name of a type as the reference decoder has it.
fn type_of(weight: &Weight) -> String {
    match weight {
        Weight::Packed(packed) => match packed.format().mode() {
            "affine" => format!("int{}/{}", packed.format().bits(), packed.format().group_size()),
            mode => format!("{mode}/{}", packed.format().group_size()),
        },
        _ => "dense".into(),
    }
}

#[track_caller]
fn check(checkpoint: &Checkpoint, name: &str, in_features: Option<usize>, expected: &Value, context: &str) {
    let weight = checkpoint.tensor(name, in_features).unwrap_or_else(|error| panic!("{context}: {error}"));
    assert_eq!(type_of(&weight), expected["type"].as_str().unwrap(), "{context} {name}");
    let dims: Vec<usize> = serde_json::from_value(expected["shape"].clone()).unwrap();
    assert_eq!(weight.dims(), dims, "{context} {name}");
    let dequantized = weight.to_dense(DType::F32, &Device::Cpu).unwrap();
    assert_eq!(sha256(&dequantized), expected["sha256"].as_str().unwrap(), "{context} {name}");
}

#[test]
fn every_tensor_of_every_era_has_the_expected_numbers() {
    let expected = expected();
    assert_eq!(expected.len(), 10);
    for (model, tensors) in &expected {
        let checkpoint = Checkpoint::open(manifest(model)).unwrap();
        assert_eq!(checkpoint.kind(), CheckpointKind::Ollama);
        assert_eq!(
            checkpoint.tensor_names().collect::<Vec<_>>(),
            tensors.keys().collect::<Vec<_>>(),
            "{model}"
        );
        for (name, tensor) in tensors {
            // As the model asks, and without K: then config and metadata decide.
            let k = tensor["shape"].as_array().unwrap().last().unwrap().as_u64().unwrap() as usize;
            check(&checkpoint, name, Some(k), tensor, model);
            check(&checkpoint, name, None, tensor, model);
            assert!(checkpoint.contains(name));
            assert!(!checkpoint.contains(&format!("{name}.scale")));
        }
        assert!(checkpoint.warnings().is_empty(), "{model}: {:?}", checkpoint.warnings());
    }
    let types: BTreeSet<_> =
        expected.values().flat_map(BTreeMap::values).map(|tensor| tensor["type"].as_str().unwrap()).collect();
    let all = ["dense", "int4/32", "int4/64", "int8/64", "mxfp4/32", "mxfp8/32", "nvfp4/16"];
    assert_eq!(types.into_iter().collect::<Vec<_>>(), all);
}

#[test]
fn linear_biases_are_tensors_and_the_biases_of_formats_are_not() {
    let checkpoint = Checkpoint::open(manifest("current/tiny-dense:int4")).unwrap();
    let q_proj = "model.layers.0.self_attn.q_proj";
    assert_eq!(checkpoint.dense(&format!("{q_proj}.bias")).unwrap().dims(), [256]);
    for part in ["weight.scale", "weight.bias"] {
        let error = checkpoint.dense(&format!("{q_proj}.{part}")).unwrap_err().to_string();
        assert!(error.contains("expected a tensor of this name, found none"), "{error}");
    }
    let error = checkpoint.dense(&format!("{q_proj}.weight")).unwrap_err().to_string();
    assert!(error.contains("found a packed weight") && error.contains("`tiny-dense:int4`"), "{error}");
}

#[test]
fn companion_files_come_from_layers() {
    for model in expected().keys() {
        let checkpoint = Checkpoint::open(manifest(model)).unwrap();
        let model_type = if model.contains("moe") { "qwen3_moe" } else { "qwen3" };
        assert_eq!(checkpoint.config()["model_type"], model_type);
        let tokenizer = json(&checkpoint.tokenizer_file().unwrap());
        assert_eq!(tokenizer["added_tokens"][0]["content"], "<|endoftext|>");
    }
}

#[test]
fn digests_of_all_blobs_are_those_of_the_manifest() {
    for model in expected().keys() {
        let checkpoint = Checkpoint::open(manifest(model)).unwrap();
        let layers = json(&manifest(model))["layers"].as_array().unwrap().len();
        assert_eq!(verify_digests(&checkpoint).unwrap(), layers + 1, "{model}");
    }
    assert_eq!(verify_digests(&crate::common::bundled("tiny")).unwrap(), 0);
}

#[test]
fn a_store_of_one_model_is_opened_and_another_lists_its_models() {
    let checkpoint = Checkpoint::open(fixtures().join("v0.21")).unwrap();
    assert!(checkpoint.contains("model.layers.1.mlp.switch_mlp.down_proj.weight"));
    let error = Checkpoint::open(fixtures().join("current")).unwrap_err().to_string();
    let models = [
        "7 models",
        "`tiny-dense:int4`",
        "`tiny-dense:int8`",
        "`tiny-dense:mxfp4`",
        "`tiny-dense:mxfp8`",
        "`tiny-dense:nvfp4`",
        "`tiny-moe:int4`",
        "`tiny-moe:nvfp4`",
        "OLLAMA_MODELS",
    ];
    for part in models {
        assert!(error.contains(part), "{error}");
    }
}

/// Copies a model to a store of its own, without the layers that `keep` does not want.
fn copy_of(model: &str, keep: impl Fn(&str) -> bool) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let root = fixtures().join(model.split_once('/').unwrap().0);
    let mut manifest_json = json(&manifest(model));
    let layers = manifest_json["layers"].as_array_mut().unwrap();
    layers.retain(|layer| keep(layer["name"].as_str().unwrap()));
    fs::create_dir(dir.path().join("blobs")).unwrap();
    for layer in layers.iter().chain([&json(&manifest(model))["config"]]) {
        let blob = format!("blobs/{}", layer["digest"].as_str().unwrap().replace(':', "-"));
        fs::copy(root.join(&blob), dir.path().join(&blob)).unwrap();
    }
    let path = dir.path().join("manifests/registry.ollama.ai/library/copy");
    fs::create_dir_all(&path).unwrap();
    fs::write(path.join("latest"), manifest_json.to_string()).unwrap();
    dir
}

/// A run on packed weights against one of the same code on the dequantized ones.
#[test]
fn whole_models_run_on_their_packed_weights() {
    let tokens: Vec<u32> = (0..40u32).map(|i| i.wrapping_mul(2_654_435_761) >> 23).collect();
    let tokens = Tensor::new(tokens, &Device::Cpu).unwrap().unsqueeze(0).unwrap();
    let models = expected();
    assert_eq!(models.len(), 10);
    for model in models.keys() {
        // The source has one linear bias to tell it from the biases of formats; Qwen3 has none.
        let store = copy_of(model, |layer| !layer.ends_with("_proj.bias"));
        let checkpoint = Checkpoint::open(store.path()).unwrap();
        let mut packed = Model::load(&checkpoint, DType::F32, &Device::Cpu).unwrap();
        let logits = packed.forward(&tokens, 0).unwrap();

        let dequantize =
            |name: &str| checkpoint.tensor(name, None).unwrap().to_dense(DType::F32, &Device::Cpu).unwrap();
        let dequantized: HashMap<_, _> =
            checkpoint.tensor_names().map(|name| (name.to_owned(), dequantize(name))).collect();
        let vb = candle_nn::VarBuilder::from_tensors(dequantized, DType::F32, &Device::Cpu);
        let config = Config::from_json(checkpoint.config()).unwrap();
        let mut dense = Model::new(&config, VarBuilder::from(vb)).unwrap();
        let distance = crate::common::distance(&logits, &dense.forward(&tokens, 0).unwrap());
        assert!(distance.max <= 3e-4 && distance.other_argmax == 0, "{model}: {distance:?}");
    }
}

/// The stores of `bad`: which message each has to give, and which are to be read all the same.
#[test]
fn broken_stores_give_an_error_that_names_the_place() {
    const UP: &str = "model.layers.0.mlp.up_proj.weight";
    let a64 = "a".repeat(64);
    let b64 = "b".repeat(64);
    let cases: [(&str, &[&str]); 12] = [
        ("empty-blob", &["0 bytes are too few", UP]),
        ("header-len-max", &["claims a header of 18446744073709551615 bytes", UP]),
        ("header-not-json", &["malformed safetensors header", UP]),
        ("data-truncated", &["data_offsets within", UP]),
        ("offset-past-eof", &["1099511627776", "data_offsets within", UP]),
        ("offset-size-mismatch", &["data_offsets that span 65536 bytes", UP]),
        ("missing-scale", &["leaves a gap", UP]), // where the scales were
        ("meta-fp-as-affine", &["metadata of nvfp4", "\"int4\" with group size \"16\"", UP]),
        ("digest-mismatch", &["not a safetensors file", UP, &a64]),
        ("digest-format", &["sha256:../../../etc/passwd", "64 hexadecimal digits", UP]),
        ("blob-missing", &["this blob is missing", UP, &b64]),
        ("layer-size-mismatch", &["600 bytes, the manifest states 1 bytes", "layer `dup`"]),
    ];
    let dir = fixtures().join("bad/manifests/registry.ollama.ai/library");
    let mut all: Vec<_> =
        fs::read_dir(&dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    all.retain(|name| !name.starts_with("ok-"));
    all.sort();
    let mut tested: Vec<_> = cases.iter().map(|(name, _)| *name).collect();
    tested.sort_unstable();
    assert_eq!(all, tested);
    for (name, parts) in cases {
        let path = dir.join(name).join("latest");
        let load = || Checkpoint::open(&path)?.tensor(UP, None)?.to_dense(DType::F32, &Device::Cpu);
        let error = load().expect_err(name).to_string();
        for part in parts.iter().chain([&format!("model `{name}:latest`").as_str()]) {
            assert!(error.contains(part), "{name}: no {part:?} in: {error}");
        }
        let layer = json(&path)["layers"]
            .as_array()
            .unwrap()
            .iter()
            .find(|layer| layer["name"] == UP)
            .unwrap()
            .clone();
        let digest = layer["digest"].as_str().unwrap();
        assert!(name == "layer-size-mismatch" || error.contains(digest), "{name}: {error}");
    }
}

#[test]
fn odd_metadata_of_known_shapes_is_read_around() {
    const UP: &str = "model.layers.0.mlp.up_proj.weight";
    let expected = expected();
    for (name, same_as, warning) in [
        ("ok-meta-null", "current/tiny-dense:nvfp4", None),
        ("ok-meta-group-notint", "current/tiny-dense:int4", Some("\"sixty-four\" is no number")),
    ] {
        let checkpoint = Checkpoint::open(manifest(&format!("bad/{name}:latest"))).unwrap();
        for k in [None, Some(256)] {
            check(&checkpoint, UP, k, &expected[same_as][UP], name);
        }
        match (warning, checkpoint.warnings().as_slice()) {
            (None, []) => {}
            (Some(part), [only]) => assert!(only.contains(part) && only.contains(UP), "{only}"),
            (_, other) => panic!("{name}: {other:?}"),
        }
    }
}
