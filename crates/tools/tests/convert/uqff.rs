//! `convert --to uqff`: files of mistral.rs, byte for byte where it wrote some from the same source.

use super::common::{convert, files, json_file, tensors, tensors_of, Source};
use candle_core::{DType, Device};
use candle_quant::checkpoint::{Checkpoint, CheckpointKind};
use candle_quant_tools::convert::{self, ConvertOptions, ConvertPlan, Recipe, RunOptions, Target};
use candle_quant_tools::verify;
use serde_json::{json, Value};
use std::fs;
use std::path::{Path, PathBuf};

pub fn fixture(path: &str) -> PathBuf {
    PathBuf::from(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures").join(path)
}

pub fn open(path: &str) -> Checkpoint {
    Checkpoint::open(fixture(path)).unwrap()
}

pub fn uqff(format: &str) -> ConvertOptions {
    ConvertOptions::uqff(Target::Uqff.usual_recipe(format.parse().unwrap()))
}

fn mlx(format: &str) -> ConvertOptions {
    ConvertOptions::mlx(Recipe::safe(format.parse().unwrap()))
}

/// The header without the metadata, whose order is not always the same in mistral.rs' files, and all bytes behind it.
fn parts(path: &Path) -> (String, Vec<u8>) {
    let bytes = fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = std::str::from_utf8(&bytes[8..8 + length]).unwrap();
    let (metadata, entries) = header.split_once("},").unwrap();
    assert!(metadata.starts_with(r#"{"__metadata__":{"uqff."#) && length.is_multiple_of(8), "{metadata}");
    (entries.trim_end().to_owned(), bytes[8 + length..].to_vec())
}

fn assert_same(found: &Path, expected: &Path) {
    let (found_parts, expected_parts) = (parts(found), parts(expected));
    assert_eq!(found_parts.0, expected_parts.0, "{}", found.display());
    assert!(found_parts.1 == expected_parts.1, "{}", found.display());
}

/// What the report says of the output, but for the words of reasons.
fn reported(folder: &Path) -> Value {
    let report = json_file(folder.join("uqff_report.json"));
    assert_eq!((&report["schema"], &report["uqff_version"]), (&json!(1), &json!("1.2.0")));
    let mut output = report["outputs"][0].clone();
    for fallback in output["fallbacks"].as_array_mut().into_iter().flatten() {
        assert!(fallback.as_object_mut().unwrap().remove("reason").is_some());
    }
    output
}

#[test]
fn the_output_is_that_of_mistralrs() {
    for (source, format, expected, shard) in [
        ("qwen3_s", "4", "afq4", "afq4-0.uqff"),
        ("qwen3_s", "8", "afq8", "afq8-0.uqff"),
        ("qwen3_s", "q8_0", "q8_0", "q8_0-0.uqff"),
        ("qwen3_s", "hqq4", "hqq4", "hqq4-0.uqff"),
        ("qwen3_s", "fp8", "fp8", "fp8-0.uqff"),
        ("qwen3_s", "f8q8", "f8q8", "f8q8-0.uqff"),
        ("qwen3moe_s", "4", "moe_afq4", "afq4-0.uqff"),
        ("odd_small", "4", "odd_afq4", "afq4-0.uqff"),
    ] {
        let source = open(&format!("convert/{source}"));
        let (out, expected) = (convert(&source, &uqff(format)), fixture("uqff").join(expected));
        assert_same(&out.path().join(shard), &expected.join(shard));
        let residual = "residual.safetensors";
        assert_same(&out.path().join(residual), &expected.join(residual));
        assert_eq!(json_file(out.path().join("config.json")), json_file(expected.join("config.json")));
        assert_eq!(reported(&out.path()), reported(&expected));
        let names: Vec<_> = files(out.path()).into_keys().collect();
        let mut expected = [shard, "candle-quant.json", "config.json", residual, "uqff_report.json"];
        expected.sort_unstable();
        assert_eq!(names, expected);
        let written = Checkpoint::open(out.path()).unwrap();
        assert_eq!(written.kind(), CheckpointKind::Uqff);
        let report = verify::verify(&written);
        // That HQQ is dequantized is a warning.
        assert!(report.passed(format != "hqq4"), "{report} {:?}", report.findings);
    }
}

/// Its quantizer lets a tenth of the numbers saturate, which is not repeated: here the layout is the same, and the loss
/// smaller.
#[test]
fn mxfp4_is_laid_out_as_by_mistralrs_and_loses_less() {
    let source = open("convert/qwen3_s");
    let out = convert(&source, &uqff("mxfp4"));
    let expected = fixture("uqff/mxfp4");
    assert_eq!(parts(&out.path().join("mxfp4-0.uqff")).0, parts(&expected.join("mxfp4-0.uqff")).0);
    assert_same(&out.path().join("residual.safetensors"), &expected.join("residual.safetensors"));
    assert_eq!(reported(&out.path()), reported(&expected));
    let name = "model.layers.0.mlp.up_proj.weight";
    let exact = dequantized(&source, name);
    let error = |folder: PathBuf| {
        let numbers = dequantized(&Checkpoint::open(folder).unwrap(), name);
        exact.iter().zip(numbers).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>()
    };
    assert!(error(out.path()) < 0.5 * error(expected));
}

fn dequantized(checkpoint: &Checkpoint, name: &str) -> Vec<f32> {
    let numbers = checkpoint.tensor(name, None).unwrap().to_dense(DType::F32, &Device::Cpu).unwrap();
    numbers.flatten_all().unwrap().to_vec1().unwrap()
}

/// Codes, scales and biases are those of mistral.rs, and so is where they lie, by way of MLX or not.
#[test]
fn afq_and_mxfp4_go_to_mlx_and_back() {
    for (name, shard) in [
        ("afq4", "afq4-0.uqff"),
        ("afq8", "afq8-0.uqff"),
        ("mxfp4", "mxfp4-0.uqff"),
        ("frommlx6", "afq6-0.uqff"),
        ("qwen2_afq4", "afq4-0.uqff"),
        ("moe_afq4", "afq4-0.uqff"),
        ("odd_afq4", "afq4-0.uqff"),
    ] {
        let expected = fixture("uqff").join(name);
        let source = Checkpoint::open(&expected).unwrap();
        let between = convert(&source, &mlx("keep"));
        let checkpoint = Checkpoint::open(between.path()).unwrap();
        let report = verify::verify(&checkpoint);
        assert!(report.passed(true), "{name} {report} {:?}", report.findings);
        for out in [convert(&checkpoint, &uqff("keep")), convert(&source, &uqff("keep"))] {
            assert_same(&out.path().join(shard), &expected.join(shard));
            assert_same(&out.path().join("residual.safetensors"), &expected.join("residual.safetensors"));
            assert_eq!(
                reported(&out.path())["actual_counts"],
                reported(&expected)["actual_counts"],
                "{name}"
            );
        }
    }
}

#[test]
fn mlx_goes_to_uqff_and_back() {
    for name in [
        "qwen3-affine-b2-g32",
        "qwen3-affine-b3-g64",
        "qwen3-affine-b4-g64-sharded",
        "qwen3-affine-b6-g32",
        "qwen3-affine-b8-g128",
        "llama-mixed_3_6",
        "llama-untied-bias-b4-g64-f16",
        "llama-untied-mxfp4",
        "qwen3moe-affine-b4-g64",
        "gptoss-mxfp4-mlxlm",
    ] {
        let folder = fixture("mlx").join(name);
        let between = convert(&Checkpoint::open(&folder).unwrap(), &uqff("keep"));
        let checkpoint = Checkpoint::open(between.path()).unwrap();
        assert_eq!(checkpoint.kind(), CheckpointKind::Uqff);
        let config = json_file(between.path().join("config.json"));
        assert!(config.get("quantization").or(config.get("quantization_config")).is_none());
        let report = verify::verify(&checkpoint);
        assert!(report.passed(true), "{name} {report} {:?}", report.findings);
        let back = convert(&checkpoint, &mlx("keep"));
        let mut expected = tensors(&folder);
        // The others are references.
        expected.retain(|tensor, _| tensor.contains('.'));
        let found = tensors(back.path());
        assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>(), "{name}");
        assert!(found == expected, "{name}");
    }
}

/// What lies otherwise in its files has the same codes and scales in UQFF and in a store.
#[test]
fn other_layouts_are_rearranged_exactly() {
    for name in ["mlx/gptoss-mxfp4-hf", "hf/awq-g64", "hf/ct-int4-g32"] {
        let source = open(name);
        let ollama =
            ConvertOptions::ollama(Target::Ollama.usual_recipe("keep".parse().unwrap()), "m").unwrap();
        for options in [uqff("keep"), ollama] {
            let out = convert(&source, &options);
            let written = Checkpoint::open(out.path()).unwrap();
            let mut packed = 0;
            for tensor in source.tensor_names() {
                let format = source.tensor(tensor, None).unwrap().format_name();
                let stored = [tensor.to_owned(), format!("{tensor}.weight")];
                let stored = stored.iter().find(|name| written.contains(name)).unwrap();
                // What symmetric codes mean is written with biases.
                let expected = format.replace("symmetric", "affine");
                assert_eq!(written.tensor(stored, None).unwrap().format_name(), expected, "{name} {tensor}");
                assert!(dequantized(&source, tensor) == dequantized(&written, stored), "{name} {tensor}");
                packed += usize::from(!format.contains('F'));
            }
            assert!(packed > 5, "{name}");
        }
    }
}

/// An embedding that is not packed is a layer in 1.2, and was none before.
#[test]
fn models_of_earlier_versions_become_such_of_today() {
    let source = open("uqff/v0816_afq4");
    let out = convert(&source, &uqff("keep"));
    let written = Checkpoint::open(out.path()).unwrap();
    assert!(source.tensor_names().eq(written.tensor_names()));
    for name in source.tensor_names() {
        assert!(dequantized(&source, name) == dequantized(&written, name), "{name}");
    }
    assert_eq!(tensors_of(&out.path().join("afq4-0.uqff"))["model.embed_tokens.weight.format"].2, [1]);
}

#[test]
fn what_uqff_has_no_type_for_is_refused_by_the_plan() {
    let uniform = |format: &str| {
        let mut options = uqff(format);
        options.recipe = Recipe::named("uniform", format.parse().unwrap()).unwrap();
        options
    };
    for (source, options, parts) in [
        (
            "convert/qwen3_s",
            uqff("5"),
            ["`model.layers.0.mlp.down_proj.weight`", "affine 5-bit g64 (format)"],
        ),
        ("convert/qwen3_s", uniform("nvfp4"), ["`lm_head.weight`", "nvfp4"]),
        ("convert/qwen3_s", uniform("1:g32"), ["`lm_head.weight`", "affine 1-bit g32"]),
        ("mlx/qwen3-mxfp8", uqff("keep"), ["`model.embed_tokens.weight`", "mxfp8"]),
        ("mlx/qwen3-affine-b5-g128", uqff("4"), ["`model.embed_tokens.weight`", "affine 5-bit g128"]),
        ("mlx/llama-untied-mxfp4", uniform("5:g32"), ["`lm_head.weight`", "affine 5-bit g32"]),
    ] {
        let error = ConvertPlan::new(&open(source), &options).map(|_| ()).unwrap_err().to_string();
        let formats = "UQFF, which has affine formats of 2, 3, 4, 6 and 8 bits, mxfp4, q4_0 to q8_0";
        let remedy = match source {
            "mlx/qwen3-mxfp8" | "mlx/qwen3-affine-b5-g128" => "requantize or dequantize it",
            _ => "give it one of these formats",
        };
        for part in parts.into_iter().chain([formats, remedy]) {
            assert!(error.contains(part), "{part} in {error}");
        }
    }
    // It is a matter of the rule where the weight is no part of the output as it is.
    let mut options = uqff("4");
    options.requantize = true;
    assert!(ConvertPlan::new(&open("mlx/qwen3-affine-b5-g128"), &options).is_ok());
}

#[test]
fn shards_are_counted_from_zero_and_the_first_has_the_version() {
    let mut options = uqff("4:g32");
    options.max_shard_size = 100_000;
    let out = convert(&open("convert/qwen3_s"), &options);
    let shards = reported(&out.path())["shards"].clone();
    let count = shards.as_array().unwrap().len();
    assert!(count > 2);
    for (index, shard) in shards.as_array().unwrap().iter().enumerate() {
        assert_eq!(shard, &format!("afq4-{index}.uqff"));
        let stored = tensors_of(&out.path().join(shard.as_str().unwrap()));
        let version: Vec<_> = stored.iter().filter(|(name, _)| name.starts_with("uqff.version")).collect();
        let numbers: Vec<_> = version.iter().map(|(_, (.., bytes))| bytes[0]).collect();
        assert_eq!(numbers, if index == 0 { vec![1, 2, 0] } else { vec![] });
    }
    assert!(verify::verify(&Checkpoint::open(out.path()).unwrap()).passed(true));
}

/// The program's name, whatever the crate is called: it is part of the bytes.
#[test]
fn the_producer_is_the_program() {
    let out = convert(&open("convert/qwen3_s"), &uqff("4"));
    for file in ["afq4-0.uqff", "residual.safetensors"] {
        let bytes = fs::read(out.path().join(file)).unwrap();
        let header = String::from_utf8_lossy(&bytes[8..512]).into_owned();
        assert!(header.contains(r#""uqff.producer":"candle-quant""#), "{file}: {header}");
    }
    let tool = json_file(out.path().join("uqff_report.json"))["generated_by"]["tool"].clone();
    assert!(tool.as_str().unwrap().starts_with("candle-quant 0."), "{tool}");
}

#[test]
fn an_output_is_replaced_by_one_of_another_kind() {
    let source = open("convert/odd_small");
    let out = convert(&source, &uqff("4"));
    for options in [mlx("4"), uqff("8")] {
        let plan = ConvertPlan::new(&source, &options).unwrap();
        let error =
            convert::convert(&plan, out.path(), &RunOptions::default(), &|_| ()).unwrap_err().to_string();
        assert!(error.contains("it exists already"), "{error}");
        let overwrite = RunOptions { overwrite: true, ..RunOptions::default() };
        convert::convert(&plan, out.path(), &overwrite, &|_| ()).unwrap();
        assert_eq!(out.path().join("uqff_report.json").exists(), options.target == Target::Uqff);
    }
}

#[test]
fn groups_of_one_number_and_experts_that_are_fused() {
    let source = Source::new()
        .with_config(r#"{"hidden_size": 64}"#)
        .with("l.0.mlp.up_proj.weight", &[2, 64], &[vec![0.5; 64], vec![0.; 64]].concat())
        .random("l.0.mlp.experts.gate_up_proj", &[3, 96, 64])
        .random("l.0.mlp.experts.down_proj", &[3, 64, 32])
        .random("l.0.mlp.gate.weight", &[3, 64])
        .finish();
    let out = convert(&source.open(), &uqff("8:g32"));
    let written = Checkpoint::open(out.path()).unwrap();
    assert_eq!(dequantized(&written, "l.0.mlp.up_proj.weight"), [vec![0.5; 64], vec![0.; 64]].concat());
    for (projection, dims) in
        [("gate_proj", [3, 48, 64]), ("up_proj", [3, 48, 64]), ("down_proj", [3, 64, 32])]
    {
        let weight = written.weight(&format!("l.0.mlp.experts.{projection}"), None).unwrap();
        assert_eq!((weight.dims(), weight.format_name().as_str()), (&dims[..], "affine 8-bit g32"));
    }
    assert!(tensors(out.path()).contains_key("l.0.mlp.gate.weight"));
}

#[test]
fn a_model_without_layers_is_none() {
    let source = Source::new().random("norm.weight", &[64]).finish();
    let error = ConvertPlan::new(&source.open(), &uqff("4")).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("without any linear layer"), "{error}");
}
