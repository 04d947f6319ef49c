//! The files that are written.

use super::common::{bundled, bundled_path, content, convert, files, json_file, tensors, Source};
use candle_core::{DType, Device, Tensor};
use candle_quant::checkpoint::{Checkpoint, Weight};
use candle_quant::{QuantFormat, QuantTensor};
use candle_quant_tools::convert::{self, ConvertOptions, ConvertPlan, Recipe, RunOptions};
use candle_quant_tools::verify;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;

fn safe(format: &str) -> ConvertOptions {
    ConvertOptions::mlx(Recipe::safe(format.parse().unwrap()))
}

fn load(source: &Checkpoint, module: &str) -> QuantTensor {
    match source.weight(module, None).unwrap() {
        Weight::Packed(packed) => packed.load(&Device::Cpu).unwrap(),
        other => panic!("{other:?}"),
    }
}

fn numbers(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn bytes_do_not_depend_on_threads() {
    let mut options = safe("4");
    options.max_shard_size = 300_000;
    // Rows of many blocks.
    let wide = Source::new().random("w.weight", &[700, 1024]).random("x.weight", &[64, 64]).finish();
    for source in [bundled("tiny-bf16"), wide.open()] {
        let outputs = [1, 2, 5].map(|threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let plan = ConvertPlan::new(&source, &options).unwrap();
            let folder = tempfile::tempdir().unwrap();
            let out = folder.path().join("out");
            let report =
                pool.install(|| convert::convert(&plan, &out, &RunOptions::default(), &|_| ())).unwrap();
            (files(&out), serde_json::to_string(&report).unwrap())
        });
        assert!(outputs[0] == outputs[1] && outputs[0] == outputs[2]);
    }
}

#[test]
fn tensors_are_aligned() {
    let recipe = "format = \"4\"\n[[rule]]\nrole = \"v\"\nformat = \"nvfp4\"\n[[rule]]\nrole = \"down\"\nformat = \"f32\"";
    let out = convert(&bundled("tiny-bf16"), &ConvertOptions::mlx(Recipe::from_toml("x", recipe).unwrap()));
    let bytes = fs::read(out.path().join("model.safetensors")).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    let header: Value = serde_json::from_slice(&bytes[8..8 + length as usize]).unwrap();
    let mut dtypes = BTreeSet::new();
    for (name, info) in header.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__") {
        let dtype = info["dtype"].as_str().unwrap();
        let width = ["U8", "", "BF16", "", "U32", "F32"]
            .iter()
            .position(|known| *known == dtype)
            .unwrap()
            .clamp(1, 4);
        assert_eq!((8 + length + info["data_offsets"][0].as_u64().unwrap()) % width as u64, 0, "{name}");
        dtypes.insert(dtype);
    }
    assert_eq!(dtypes, BTreeSet::from(["BF16", "F32", "U32", "U8"]));
}

#[test]
fn blocks_of_rows_join_to_what_the_whole_is() {
    let source = Source::new().random("w.weight", &[701, 1024]).finish();
    for format in ["3:g32", "8", "mxfp4", "nvfp4"] {
        let out = convert(&source.open(), &safe(format));
        let written = load(&Checkpoint::open(out.path()).unwrap(), "w");
        let dense = source.open().dense("w.weight").unwrap().load(DType::F32, &Device::Cpu).unwrap();
        let expected = QuantTensor::quantize(&dense, written.format()).unwrap();
        let words = |tensor: &QuantTensor| tensor.packed().flatten_all().unwrap().to_vec1::<u32>().unwrap();
        assert_eq!(words(&written), words(&expected), "{format}");
        assert_eq!(numbers(written.scales()), numbers(expected.scales()), "{format}");
        assert_eq!(written.biases().map(numbers), expected.biases().map(numbers), "{format}");
    }
}

#[test]
fn index_and_config_describe_what_is_there() {
    let mut options = safe("4:g32");
    options.max_shard_size = 300_000;
    let out = convert(&bundled("tiny-bf16"), &options);
    let index = json_file(out.path().join("model.safetensors.index.json"));
    let stored = tensors(out.path());
    let listed = index["weight_map"].as_object().unwrap();
    assert_eq!(listed.keys().collect::<BTreeSet<_>>(), stored.keys().collect());
    let bytes: usize = stored.values().map(|(_, _, bytes)| bytes.len()).sum();
    assert_eq!(index["metadata"]["total_size"], bytes);
    let shards: BTreeSet<_> = listed.values().map(|file| file.as_str().unwrap()).collect();
    assert!(shards.len() > 2 && shards.iter().all(|file| out.path().join(file).is_file()), "{shards:?}");
    // Config: the text of the source, with two objects more.
    let text = fs::read_to_string(out.path().join("config.json")).unwrap();
    let source = fs::read_to_string(bundled_path("tiny-bf16").join("config.json")).unwrap();
    let kept = source.trim_end().trim_end_matches('}').trim_end();
    assert!(text.starts_with(kept), "{text}");
    let config = json_file(out.path().join("config.json"));
    assert_eq!(config["quantization"], config["quantization_config"]);
    let expected = serde_json::json!({"bits": 4, "group_size": 32, "mode": "affine",
        "model.embed_tokens": {"bits": 5, "group_size": 32, "mode": "affine"}});
    assert_eq!(config["quantization"], expected);
    for file in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        assert_eq!(
            fs::read(out.path().join(file)).unwrap(),
            fs::read(bundled_path("tiny-bf16").join(file)).unwrap()
        );
    }
    let report = verify::verify(&Checkpoint::open(out.path()).unwrap());
    assert!(report.passed(true), "{report} {:?}", report.findings);
}

#[test]
fn a_config_that_names_nothing_packed_has_no_quantization() {
    let out = convert(&bundled("tiny-bf16"), &safe("f16"));
    let config = json_file(out.path().join("config.json"));
    assert!(config.get("quantization").is_none() && config.get("quantization_config").is_none());
    assert!(tensors(out.path()).values().all(|(dtype, ..)| dtype == "F16"));
    // A downcast with one packed role is described by that.
    let recipe = "format = \"f16\"\n[[rule]]\nrole = \"embed\"\nformat = \"6\"";
    let out = convert(&bundled("tiny-bf16"), &ConvertOptions::mlx(Recipe::from_toml("x", recipe).unwrap()));
    assert_eq!(json_file(out.path().join("config.json"))["quantization"]["bits"], 6);
    assert!(verify::verify(&Checkpoint::open(out.path()).unwrap()).passed(true));
}

#[test]
fn one_file_without_a_config_becomes_a_checkpoint_that_opens() {
    let source = Source::new().random("w.up_proj.weight", &[32, 64]).random("norm.weight", &[64]).finish();
    let file = source.folder.path().join("model.safetensors");
    let out = convert(&Checkpoint::open(file).unwrap(), &safe("mxfp4"));
    assert_eq!(load(&Checkpoint::open(out.path()).unwrap(), "w.up_proj").format(), QuantFormat::MXFP4);
    assert_eq!(tensors(out.path())["norm.weight"], tensors(source.folder.path())["norm.weight"]);
}

#[test]
fn experts_become_stacks() {
    let mut source = Source::new()
        .with_config(r#"{"hidden_size": 64, "model_type": "mixtral", "num_local_experts": 3}"#)
        .random("m.layers.0.block_sparse_moe.gate.weight", &[3, 64])
        .random("m.layers.1.mlp.experts.gate_up_proj", &[3, 96, 64])
        .random("m.layers.1.mlp.experts.down_proj", &[3, 64, 32]);
    for expert in 0..3 {
        for (name, shape) in [("w1", [32, 64]), ("w2", [64, 32]), ("w3", [32, 64])] {
            let path = format!("m.layers.0.block_sparse_moe.experts.{expert}.{name}");
            source =
                source.random(&format!("{path}.weight"), &shape).random(&format!("{path}.bias"), &shape[..1]);
        }
    }
    let source = source.finish();
    let out = convert(&source.open(), &safe("8:g32"));
    let written = Checkpoint::open(out.path()).unwrap();
    let dense = |name: &str| source.open().dense(name).unwrap().load(DType::F32, &Device::Cpu).unwrap();
    let format = QuantFormat::affine(8, 32).unwrap();
    let check = |module: &str, expected: &Tensor| {
        let (found, expected) = (load(&written, module), QuantTensor::quantize(expected, format).unwrap());
        assert_eq!(found.dims(), expected.dims(), "{module}");
        let dequantized = |tensor: &QuantTensor| numbers(&tensor.dequantize(DType::F32).unwrap());
        assert_eq!(dequantized(&found), dequantized(&expected), "{module}");
    };
    for (ours, theirs) in [("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")] {
        let each = |part: &str| -> Vec<Tensor> {
            (0..3)
                .map(|e| dense(&format!("m.layers.0.block_sparse_moe.experts.{e}.{theirs}.{part}")))
                .collect()
        };
        let module = format!("m.layers.0.block_sparse_moe.switch_mlp.{ours}");
        check(&module, &Tensor::stack(&each("weight"), 0).unwrap());
        let bias = written.dense(&format!("{module}.bias")).unwrap().load(DType::F32, &Device::Cpu).unwrap();
        assert_eq!(numbers(&bias), numbers(&Tensor::stack(&each("bias"), 0).unwrap()));
    }
    let fused = dense("m.layers.1.mlp.experts.gate_up_proj");
    check("m.layers.1.mlp.switch_mlp.gate_proj", &fused.narrow(1, 0, 48).unwrap());
    check("m.layers.1.mlp.switch_mlp.up_proj", &fused.narrow(1, 48, 48).unwrap());
    check("m.layers.1.mlp.switch_mlp.down_proj", &dense("m.layers.1.mlp.experts.down_proj"));
    assert_eq!(written.tensor_names().count(), 1 + 2 * 3 + 3);
}

#[test]
fn experts_that_are_not_packed_keep_their_names() {
    let source = Source::new()
        .random("l.0.mlp.experts.0.up_proj.weight", &[32, 64])
        .random("l.0.mlp.experts.1.up_proj.weight", &[32, 64])
        .finish();
    let out = convert(&source.open(), &safe("keep"));
    assert_eq!(tensors(out.path()), tensors(source.folder.path()));
    // One is missing: they can't be stacked.
    let source = Source::new()
        .random("l.0.mlp.experts.0.up_proj.weight", &[32, 64])
        .random("l.0.mlp.experts.2.up_proj.weight", &[32, 64])
        .finish();
    let plan = ConvertPlan::new(&source.open(), &safe("4")).unwrap();
    assert_eq!(plan.fallbacks(), 2);
    assert!(plan.tensors().all(|t| t.fallback.as_deref().unwrap().contains("some are missing")));
    // Rows or columns? Nothing tells.
    let source = Source::new()
        .with_config(r#"{"hidden_size": 64}"#)
        .random("l.0.mlp.experts.gate_up_proj", &[2, 64, 64])
        .finish();
    let plan = ConvertPlan::new(&source.open(), &safe("4")).unwrap();
    assert!(plan
        .tensors()
        .all(|t| t.to == "F32" && t.fallback.as_deref().unwrap().contains("may be columns")));
}

#[test]
fn an_output_that_exists_is_not_touched() {
    let out = convert(&bundled("tiny-bf16"), &safe("4"));
    let before = files(out.path());
    let plan = ConvertPlan::new(&bundled("tiny-bf16"), &safe("8")).unwrap();
    for resume in [false, true] {
        let options = RunOptions { resume, ..RunOptions::default() };
        let error = convert::convert(&plan, out.path(), &options, &|_| ()).unwrap_err().to_string();
        assert!(error.contains("it exists already, and is not overwritten"), "{error}");
        assert_eq!(files(out.path()), before);
    }
}

#[test]
fn experts_that_would_be_one_are_kept() {
    for (first, second) in [("0.w1", "0.gate_proj"), ("1.up_proj", "01.up_proj"), ("1.up_proj", "+1.up_proj")]
    {
        let source = Source::new()
            .random("l.0.mlp.experts.0.up_proj.weight", &[32, 64])
            .random(&format!("l.0.mlp.experts.{first}.weight"), &[32, 64])
            .random(&format!("l.0.mlp.experts.{second}.weight"), &[32, 64])
            .finish();
        for options in [safe("4"), safe("keep"), ConvertOptions::dense()] {
            let out = convert(&source.open(), &options);
            let kept = tensors(out.path());
            for name in [first, second].map(|name| format!("l.0.mlp.experts.{name}.weight")) {
                assert_eq!(kept.get(&name), tensors(source.folder.path()).get(&name), "{name}");
            }
        }
        let plan = ConvertPlan::new(&source.open(), &safe("4")).unwrap();
        assert!(plan.tensors().any(|t| t.fallback.as_deref().unwrap_or("").contains("twice there")));
    }
}

#[test]
fn every_tensor_is_told_of() {
    let source = Source::new()
        .random("w.weight", &[32, 64])
        .with("empty.weight", &[0, 64], &[])
        .with("scalar", &[], &[1.])
        .finish();
    let plan = ConvertPlan::new(&source.open(), &safe("4")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let finished = std::sync::Mutex::new(Vec::new());
    let progress = |event: convert::ConvertEvent| {
        if let convert::ConvertEvent::Finished { tensor } = event {
            finished.lock().unwrap().push(tensor.to_owned());
        }
    };
    convert::convert(&plan, folder.path().join("out"), &RunOptions::default(), &progress).unwrap();
    let mut finished = finished.into_inner().unwrap();
    finished.sort();
    assert_eq!(finished, ["empty.weight", "scalar", "w.weight"]);
}

/// A snapshot of Hugging Face's cache consists of links.
#[cfg(unix)]
#[test]
fn files_that_are_links_are_read_and_copied() {
    let folder = tempfile::tempdir().unwrap();
    let (blobs, snapshot) = (folder.path().join("blobs"), folder.path().join("snapshots/main"));
    fs::create_dir(&blobs).unwrap();
    fs::create_dir_all(&snapshot).unwrap();
    let mut all = files(bundled_path("tiny-bf16"));
    all.insert("chat_template.jinja".into(), b"{{ messages }}".to_vec());
    for (index, (name, bytes)) in all.iter().enumerate() {
        fs::write(blobs.join(index.to_string()), bytes).unwrap();
        std::os::unix::fs::symlink(format!("../../blobs/{index}"), snapshot.join(name)).unwrap();
    }
    let out = convert(&Checkpoint::open(&snapshot).unwrap(), &safe("4"));
    let mut expected = content(convert(&bundled("tiny-bf16"), &safe("4")).path());
    expected.insert("chat_template.jinja".into(), b"{{ messages }}".to_vec());
    assert!(content(out.path()) == expected);
    assert!(fs::read_dir(out.path()).unwrap().all(|entry| entry.unwrap().file_type().unwrap().is_file()));
}

#[test]
fn sources_in_shards_are_what_whole_ones_are() {
    let mut keep = safe("keep");
    keep.max_shard_size = 300_000;
    let sharded = convert(&bundled("tiny-bf16"), &keep);
    let source = Checkpoint::open(sharded.path()).unwrap();
    let shards = files(sharded.path()).into_keys().filter(|name| name.ends_with(".safetensors")).count();
    assert!(shards > 2, "{shards}");
    let whole = convert(&bundled("tiny-bf16"), &safe("4"));
    assert!(content(convert(&source, &safe("4")).path()) == content(whole.path()));
}

/// As Python writes them, and no JSON.
#[test]
fn configs_keep_nan_and_infinity() {
    let config = r#"{"time_step_limit": [0.0, Infinity], "pad": NaN, "hidden_size": 64}"#;
    let source = Source::new().with_config(config).random("w.up_proj.weight", &[32, 64]).finish();
    let out = convert(&source.open(), &safe("4"));
    let text = fs::read_to_string(out.path().join("config.json")).unwrap();
    let kept = "{\n  \"time_step_limit\": [0.0, Infinity],\n  \"pad\": NaN,\n  \"hidden_size\": 64,\n  \"quantization\": {";
    assert!(text.starts_with(kept), "{text}");
    assert_eq!(
        load(&Checkpoint::open(out.path()).unwrap(), "w.up_proj").format().to_string(),
        "affine 4-bit g64"
    );
    let out = convert(&Checkpoint::open(out.path()).unwrap(), &ConvertOptions::dense());
    let text = fs::read_to_string(out.path().join("config.json")).unwrap();
    assert!(
        text.contains("[0.0, Infinity]") && text.contains("\"pad\": NaN") && !text.contains("quant"),
        "{text}"
    );
}
