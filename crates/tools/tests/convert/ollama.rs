//! `convert --to ollama`: stores as Ollama's importer writes them from the same source, byte for byte.

use super::common::{convert, files, json_file, tensors, Source};
use super::numpy::Random;
use candle_core::{DType, Device};
use candle_quant::checkpoint::{Checkpoint, CheckpointKind};
use candle_quant_tools::convert::{self, ConvertOptions, ConvertPlan, Recipe, RunOptions, Target};
use candle_quant_tools::verify;
use half::bf16;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

fn fixture(path: &str) -> PathBuf {
    PathBuf::from(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures").join(path)
}

/// The store that Ollama's importer has written.
fn theirs() -> PathBuf {
    fixture("ollama/current")
}

fn ollama(format: &str, name: &str) -> ConvertOptions {
    ConvertOptions::ollama(Target::Ollama.usual_recipe(format.parse().unwrap()), name).unwrap()
}

fn mlx(format: &str) -> ConvertOptions {
    ConvertOptions::mlx(Recipe::safe(format.parse().unwrap()))
}

fn manifest_in(store: &Path, model: &str, tag: &str) -> PathBuf {
    store.join("manifests/registry.ollama.ai/library").join(model).join(tag)
}

fn blob(store: &Path, layer: &Value) -> PathBuf {
    store.join("blobs").join(layer["digest"].as_str().unwrap().replace(':', "-"))
}

/// The layers of a model and the blob of its config.
fn layers(store: &Path, model: &str, tag: &str) -> Vec<Value> {
    let manifest = json_file(manifest_in(store, model, tag));
    let mut layers = manifest["layers"].as_array().unwrap().clone();
    layers.push(manifest["config"].clone());
    layers
}

/// The source of the fixtures, with the numbers that the script has drawn from which they were made.
fn source(model: &str) -> Source {
    const LAYERS: usize = 2;
    let mut source = Source::new();
    let mut add = |name: String, seed: &str, shape: &[usize]| {
        let taken = std::mem::replace(&mut source, Source::new());
        source = taken.with_bytes(&name, "BF16", shape, &drawn(seed, shape));
    };
    add("model.embed_tokens.weight".into(), "embed", &[512, 256]);
    add("model.norm.weight".into(), "norm", &[256]);
    add("lm_head.weight".into(), "lm_head", &[512, 256]);
    let mlp = |layer: usize| model == "tiny-dense" || layer == 0;
    for layer in 0..LAYERS {
        let p = format!("model.layers.{layer}.");
        for (module, seed, shape) in [
            ("self_attn.q_proj", "q", vec![256, 256]),
            ("self_attn.k_proj", "k", vec![128, 256]),
            ("self_attn.v_proj", "v", vec![128, 256]),
            ("self_attn.o_proj", "o", vec![256, 256]),
            ("self_attn.q_norm", "qn", vec![64]),
            ("self_attn.k_norm", "kn", vec![64]),
            ("input_layernorm", "iln", vec![256]),
            ("post_attention_layernorm", "pln", vec![256]),
        ] {
            add(format!("{p}{module}.weight"), &format!("{p}{seed}"), &shape);
        }
        if mlp(layer) {
            for (module, seed, shape) in
                [("gate_proj", "g", [512, 256]), ("up_proj", "u", [512, 256]), ("down_proj", "d", [256, 512])]
            {
                add(format!("{p}mlp.{module}.weight"), &format!("{p}{seed}"), &shape);
            }
            continue;
        }
        add(format!("{p}mlp.gate.weight"), &format!("{p}router"), &[4, 256]);
        let experts = (0..4).map(|expert| format!("{p}mlp.experts.{expert}."));
        for block in experts.chain([format!("{p}mlp.shared_experts.")]) {
            for (module, seed, shape) in
                [("gate_proj", "g", [128, 256]), ("up_proj", "u", [128, 256]), ("down_proj", "d", [256, 128])]
            {
                add(format!("{block}{module}.weight"), &format!("{block}{seed}"), &shape);
            }
        }
    }
    if model == "tiny-dense" {
        add("model.layers.0.self_attn.q_proj.bias".into(), "qb", &[256]);
    }
    let source = source.finish();
    for layer in layers(&theirs(), model, "int4") {
        if let (Some(name), Some("application/vnd.ollama.image.json")) =
            (layer["name"].as_str(), layer["mediaType"].as_str())
        {
            fs::copy(blob(&theirs(), &layer), source.folder.path().join(name)).unwrap();
        }
    }
    source
}

/// The bytes of a tensor as that script makes them: with outliers and a group of zeros if it is a large matrix.
fn drawn(seed: &str, shape: &[usize]) -> Vec<u8> {
    let mut random = Random::seeded_by(seed);
    let mut normal = |count: usize| (0..count).map(|_| random.normal() as f32).collect::<Vec<_>>();
    let numbers = match *shape {
        [rows, k] => {
            let scale = (k as f64).powf(-0.5);
            let mut numbers: Vec<_> =
                normal(rows * k).into_iter().map(|number| number * scale as f32).collect();
            if k >= 128 && rows >= 3 {
                numbers[5] = (12. * scale) as f32;
                numbers[k + 64..k + 128].fill(0.);
                numbers[2 * k + 7] = (-9. * scale) as f32;
            }
            numbers
        }
        _ if seed == "qb" => normal(shape[0]).into_iter().map(|number| number * 0.1).collect(),
        _ => normal(shape[0]).into_iter().map(|number| 1. + 0.1 * number).collect(),
    };
    numbers.into_iter().flat_map(|number| bf16::from_f32(number).to_le_bytes()).collect()
}

#[test]
fn stores_are_those_of_the_importer() {
    for (model, formats) in
        [("tiny-dense", &["int4", "int8", "nvfp4", "mxfp4", "mxfp8"][..]), ("tiny-moe", &["int4", "nvfp4"])]
    {
        let source = source(model);
        for format in formats {
            let out = convert(&source.open(), &ollama(format, &format!("{model}:{format}")));
            let (ours, theirs) = (out.path(), theirs());
            // All blobs, and in the manifest the order of layers, and names and sizes.
            let manifests =
                [&ours, &theirs].map(|store| fs::read_to_string(manifest_in(store, model, format)));
            let [found, expected] = manifests.map(Result::unwrap);
            assert_eq!(found, expected, "{model}:{format}");
            for layer in layers(&theirs, model, format) {
                assert!(fs::read(blob(&ours, &layer)).unwrap() == fs::read(blob(&theirs, &layer)).unwrap());
            }
            let digests = layers(&ours, model, format).into_iter().map(|layer| layer["digest"].to_string());
            let digests: std::collections::BTreeSet<_> = digests.collect();
            assert_eq!(files(ours.join("blobs")).len(), digests.len());
            let names: Vec<_> =
                fs::read_dir(&ours).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            assert_eq!(names.len(), 2, "{names:?}");
            let written = Checkpoint::open(&ours).unwrap();
            assert_eq!(written.kind(), CheckpointKind::Ollama);
            let theirs = Checkpoint::open(manifest_in(&theirs, model, format)).unwrap();
            assert_eq!(findings(&written), findings(&theirs), "{model}:{format}");
        }
    }
}

/// What is wrong with a checkpoint: of `tiny-dense` a bias that its config does not have.
fn findings(checkpoint: &Checkpoint) -> Vec<String> {
    verify::verify(checkpoint).findings.into_iter().map(|finding| finding.message).collect()
}

fn dequantized(checkpoint: &Checkpoint, name: &str) -> Vec<f32> {
    let numbers = checkpoint.tensor(name, None).unwrap().to_dense(DType::F32, &Device::Cpu).unwrap();
    numbers.flatten_all().unwrap().to_vec1().unwrap()
}

/// Codes, scales and biases are the same in all of them, and experts have the names that each has for them.
#[test]
fn models_go_to_mlx_and_back() {
    for (model, tag) in [
        ("tiny-dense", "int4"),
        ("tiny-dense", "nvfp4"),
        ("tiny-dense", "mxfp8"),
        ("tiny-moe", "int4"),
        ("tiny-moe", "nvfp4"),
    ] {
        let source = Checkpoint::open(manifest_in(&theirs(), model, tag)).unwrap();
        let between = convert(&source, &mlx("keep"));
        let checkpoint = Checkpoint::open(between.path()).unwrap();
        let back = convert(&checkpoint, &ollama("keep", "back"));
        let written = Checkpoint::open(back.path()).unwrap();
        assert_eq!(findings(&checkpoint), findings(&source));
        assert_eq!(findings(&written), findings(&source));
        for name in source.tensor_names() {
            let stack = name.replace(".mlp.experts.", ".mlp.switch_mlp.");
            let format =
                |checkpoint: &Checkpoint, name: &str| checkpoint.tensor(name, None).unwrap().format_name();
            for other in [&checkpoint, &written] {
                assert_eq!(format(&source, name), format(other, &stack), "{model}:{tag} {name}");
                assert!(dequantized(&source, name) == dequantized(other, &stack), "{model}:{tag} {name}");
            }
        }
        if model == "tiny-dense" {
            let blobs = |store: &Path, model, tag| -> Vec<_> {
                let layers = layers(store, model, tag).into_iter();
                let blobs = layers.filter(|layer| layer["mediaType"].as_str().unwrap().ends_with("tensor"));
                blobs.map(|layer| (layer["name"].clone(), layer["digest"].clone())).collect()
            };
            assert_eq!(blobs(&back.path(), "back", "latest"), blobs(&theirs(), model, tag));
        }
    }
}

#[test]
fn mlx_goes_to_ollama_and_back() {
    for name in [
        "qwen3-affine-b4-g64",
        "qwen3-affine-b8-g128",
        "qwen3-affine-b4-g32-legacy-config",
        "qwen3-nvfp4",
        "qwen3-mxfp8",
        "llama-untied-mxfp4",
        "qwen3moe-affine-b4-g64",
    ] {
        let folder = fixture("mlx").join(name);
        let between = convert(&Checkpoint::open(&folder).unwrap(), &ollama("keep", "m"));
        let checkpoint = Checkpoint::open(between.path()).unwrap();
        let report = verify::verify(&checkpoint);
        assert!(report.passed(true), "{name} {report} {:?}", report.findings);
        let back = convert(&checkpoint, &mlx("keep"));
        let mut expected = tensors(&folder);
        // The others are references.
        expected.retain(|tensor, _| tensor.contains('.'));
        assert!(tensors(back.path()) == expected, "{name}");
    }
    for (name, format) in
        [("qwen3-affine-b6-g32", "affine 6-bit g32"), ("qwen3-affine-b1-g64", "affine 1-bit g64")]
    {
        let source = Checkpoint::open(fixture("mlx").join(name)).unwrap();
        let error = ConvertPlan::new(&source, &ollama("keep", "m")).map(|_| ()).unwrap_err().to_string();
        for part in [
            "`model.embed_tokens.weight`",
            format,
            "an Ollama store",
            "4 and 8 bits (int4, int8), nvfp4, mxfp4 and mxfp8",
        ] {
            assert!(error.contains(part), "{part} in {error}");
        }
    }
}

fn small() -> Source {
    Source::new()
        .with_config("{}")
        .random("l.0.up_proj.weight", &[32, 64])
        .random("norm.weight", &[64])
        .finish()
}

fn run(source: &Source, format: &str, name: &str, store: &Path, options: RunOptions) -> Result<(), String> {
    let plan = ConvertPlan::new(&source.open(), &ollama(format, name)).unwrap();
    convert::convert(&plan, store, &options, &|_| ()).map(|_| ()).map_err(|error| error.to_string())
}

#[test]
fn a_store_has_many_models_and_each_is_replaced_only_when_asked_to() {
    let (source, folder) = (small(), tempfile::tempdir().unwrap());
    let store = folder.path().join("store");
    let no = RunOptions::default();
    run(&source, "int4", "m", &store, no).unwrap();
    run(&source, "int8", "host:80/space/m:tag", &store, no).unwrap();
    assert!(store.join("manifests/host:80/space/m/tag").is_file());
    let open = |path: &str| Checkpoint::open(store.join("manifests").join(path)).unwrap();
    let format = |path| open(path).tensor("l.0.up_proj.weight", None).unwrap().format_name();
    let first = "registry.ollama.ai/library/m/latest";
    let before = files(store.join("blobs"));
    // Upper and lower case are the same.
    for name in ["m", "M:Latest"] {
        let error = run(&source, "mxfp8", name, &store, no).unwrap_err();
        assert!(error.contains("m/latest") && error.contains("--overwrite"), "{error}");
    }
    assert!(files(store.join("blobs")) == before);
    assert_eq!(format(first), "affine 4-bit g64");
    let overwrite = RunOptions { overwrite: true, ..no };
    run(&source, "mxfp8", "M", &store, overwrite).unwrap();
    assert_eq!((format(first), format("host:80/space/m/tag")), ("mxfp8".into(), "affine 8-bit g64".into()));
    assert_eq!(fs::read_dir(store.join("manifests/registry.ollama.ai/library")).unwrap().count(), 1);
    assert_eq!(fs::read_dir(&store).unwrap().count(), 2);
    // The blobs of others are still there.
    assert!(before.keys().all(|blob| store.join("blobs").join(blob).is_file()));
}

/// As the importer keeps them: under their names, which end in no `weight`.
#[test]
fn stacks_of_the_source_stay_what_they_are() {
    let source = Source::new()
        .with_config(r#"{"hidden_size": 64}"#)
        .random("l.0.mlp.experts.gate_up_proj", &[2, 96, 64])
        .random("l.0.mlp.experts.down_proj", &[2, 64, 64])
        .random("l.0.mlp.switch_mlp.up_proj.weight", &[2, 32, 64])
        .random("l.1.mlp.experts.0.w1.weight", &[32, 64])
        .finish();
    let out = convert(&source.open(), &ollama("int4", "m"));
    let mut layers = layers(&out.path(), "m", "latest");
    layers.retain(|layer| layer["mediaType"].as_str().unwrap().ends_with("tensor"));
    let expected = [
        ("l.0.mlp.experts.down_proj", "int8"),
        ("l.0.mlp.experts.gate_up_proj", "int4"),
        ("l.0.mlp.switch_mlp.up_proj.weight", "int4"),
        ("l.1.mlp.experts.0.w1.weight", "int4"),
    ];
    assert_eq!(layers.len(), expected.len());
    for (layer, (name, format)) in layers.iter().zip(expected) {
        assert_eq!(layer["name"], name);
        let bytes = fs::read(blob(&out.path(), layer)).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        assert_eq!(header["__metadata__"]["quant_type"], format);
        assert!(header.get(name).is_some() && header.get(format!("{name}.scale")).is_some());
    }
}

#[test]
fn a_model_without_a_config_is_none() {
    let source = Source::new().random("l.0.up_proj.weight", &[32, 64]).finish();
    let error = ConvertPlan::new(&source.open(), &ollama("int4", "m")).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("no config.json"), "{error}");
}

#[test]
fn names_do_not_lead_out_of_the_store() {
    let recipe = || Target::Ollama.usual_recipe("int4".parse().unwrap());
    for name in ["", "..", "../m", "m:../../x", "a/../m", "/m", "m:", "a/b/c/d", "m\\x", "m\0"] {
        let error = ConvertOptions::ollama(recipe(), name).unwrap_err().to_string();
        assert!(error.contains("name of a model"), "{name}: {error}");
    }
}

#[cfg(unix)]
#[test]
fn links_do_not_lead_out_of_the_store() {
    use std::os::unix::fs::symlink;
    let source = small();
    for link in
        ["manifests", "blobs", "manifests/registry.ollama.ai", "manifests/registry.ollama.ai/library/m"]
    {
        let folder = tempfile::tempdir().unwrap();
        let (store, outside) = (folder.path().join("store"), folder.path().join("outside"));
        for folder in [&outside, &store.join("blobs"), &store.join("manifests/registry.ollama.ai/library")] {
            fs::create_dir_all(folder).unwrap();
        }
        let link = store.join(link);
        let _ = fs::remove_dir_all(&link);
        symlink(&outside, &link).unwrap();
        let error = run(&source, "int4", "m", &store, RunOptions::default()).unwrap_err();
        assert!(error.contains("leads out of the store"), "{error}");
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
    }
    // A manifest or a blob that is a link is neither replaced nor followed.
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path();
    run(&source, "int4", "a", store, RunOptions::default()).unwrap();
    let models = store.join("manifests/registry.ollama.ai/library");
    fs::create_dir(models.join("b")).unwrap();
    symlink(models.join("a/latest"), models.join("b/latest")).unwrap();
    let before = fs::read(models.join("a/latest")).unwrap();
    let replace = RunOptions { overwrite: true, ..RunOptions::default() };
    let error = run(&source, "int8", "b", store, replace).unwrap_err();
    assert!(error.contains("b/latest") && error.contains("not a file, but a link"), "{error}");
    assert!(fs::read(models.join("a/latest")).unwrap() == before);
    assert!(fs::symlink_metadata(models.join("b/latest")).unwrap().is_symlink());
    let first = layers(store, "a", "latest").remove(0);
    let (first, elsewhere) = (blob(store, &first), store.join("elsewhere.partial"));
    fs::rename(&first, &elsewhere).unwrap();
    symlink(&elsewhere, &first).unwrap();
    let error = run(&source, "int4", "c", store, RunOptions::default()).unwrap_err();
    assert!(error.contains("sha256-") && error.contains("not a file, but a link"), "{error}");
    assert!(fs::symlink_metadata(&first).unwrap().is_symlink() && !models.join("c/latest").exists());
}

#[test]
fn what_is_no_store_is_not_written_to() {
    let (source, folder) = (small(), tempfile::tempdir().unwrap());
    fs::write(folder.path().join("mine"), "").unwrap();
    for store in [folder.path().to_owned(), folder.path().join("mine")] {
        let error = run(&source, "int4", "m", &store, RunOptions::default()).unwrap_err();
        assert!(error.contains("not a store of Ollama"), "{error}");
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

/// Interrupted before the manifest is there, nothing tells of the model, and the rest is done later.
#[test]
fn an_interrupted_model_is_not_there_and_is_resumed() {
    let (source, folder) = (source("tiny-dense"), tempfile::tempdir().unwrap());
    let store = folder.path().join("store");
    let plan = ConvertPlan::new(&source.open(), &ollama("int4", "tiny-dense:int4")).unwrap();
    let strict = RunOptions { max_relative_rms: Some(1e-6), ..RunOptions::default() };
    let error = convert::convert(&plan, &store, &strict, &|_| ()).unwrap_err().to_string();
    assert!(error.contains("above the limit"), "{error}");
    assert!(!store.join("manifests").exists() && !store.join("blobs").exists());
    // Killed while blobs were moved.
    let folder = store.join("registry.ollama.ai+library+tiny-dense+int4.partial/model");
    fs::remove_file(folder.join("layer-00003")).unwrap();
    let skipped = std::sync::atomic::AtomicUsize::new(0);
    let resume = RunOptions { resume: true, ..RunOptions::default() };
    let report = convert::convert(&plan, &store, &resume, &|event| {
        if let convert::ConvertEvent::Skipped { tensors, .. } = event {
            skipped.fetch_add(tensors, std::sync::atomic::Ordering::Relaxed);
        }
    })
    .unwrap();
    assert_eq!(skipped.into_inner(), plan.tensors().count() - 1);
    assert!(report.files.iter().all(|file| store.join(&file.file).is_file()), "{:?}", report.files);
    let found = fs::read(manifest_in(&store, "tiny-dense", "int4")).unwrap();
    assert!(found == fs::read(manifest_in(&theirs(), "tiny-dense", "int4")).unwrap());
}

/// Killed between the rename of the manifest and the end.
#[cfg(unix)]
#[test]
fn a_model_that_is_published_is_only_cleaned_up_after() {
    use std::os::unix::fs::MetadataExt;
    let (source, folder) = (small(), tempfile::tempdir().unwrap());
    let store = folder.path().join("store");
    let plan = ConvertPlan::new(&source.open(), &ollama("int4", "m")).unwrap();
    let partial = store.join("registry.ollama.ai+library+m+latest.partial");
    let journal = std::sync::Mutex::new(Value::Null);
    convert::convert(&plan, &store, &RunOptions::default(), &|event| {
        if let convert::ConvertEvent::Measured { .. } = event {
            *journal.lock().unwrap() = json_file(partial.join("journal.json"));
        }
    })
    .unwrap();
    let manifest = manifest_in(&store, "m", "latest");
    let (before, metadata) = (fs::read(&manifest).unwrap(), fs::metadata(&manifest).unwrap());
    let mut journal = journal.into_inner().unwrap();
    journal["published"] = serde_json::json!([metadata.dev(), metadata.ino()]);
    fs::create_dir_all(partial.join("model")).unwrap();
    fs::write(partial.join("journal.json"), journal.to_string()).unwrap();
    let resume = RunOptions { resume: true, ..RunOptions::default() };
    convert::convert(&plan, &store, &resume, &|_| ()).unwrap();
    assert!(!partial.exists() && fs::read(&manifest).unwrap() == before);
    assert_eq!(fs::metadata(&manifest).unwrap().ino(), metadata.ino());
}

#[test]
fn a_target_without_a_name_is_refused() {
    let mut options = mlx("4");
    options.target = Target::Ollama;
    let error = ConvertPlan::new(&small().open(), &options).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("ConvertOptions::ollama"), "{error}");
}
