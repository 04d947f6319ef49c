//! Checkpoints written by AutoAWQ, AutoGPTQ, GPTQModel, bitsandbytes, compressed-tensors, llm-compressor, ModelOpt and transformers:
//! every tensor dequantizes to what the tool itself makes of it, and the models compute what transformers computes.

use crate::common::{distance, reference_in};
use crate::hf::{fixture, read_json, sha256, FIXTURES};
use candle_core::{DType, Device, Tensor};
use candle_quant::checkpoint::{Checkpoint, CheckpointKind, QuantMethod, Weight};
use candle_quant_models::Model;
use std::collections::HashMap;
use std::fs;

fn open(name: &str) -> Checkpoint {
    Checkpoint::open(fixture(name)).unwrap()
}

#[test]
fn tensors_decode_as_in_the_tools_that_wrote_them() {
    for (name, format) in FIXTURES {
        let checkpoint = open(name);
        let expected = read_json(fixture(name).join("expected.json"));
        let expected = expected.as_object().unwrap();
        assert!(checkpoint.tensor_names().eq(expected.keys().map(String::as_str)), "{name}");
        let mut quantized = 0;
        for (tensor, expected) in expected {
            assert!(checkpoint.contains(tensor), "{name} {tensor}");
            let weight = checkpoint.tensor(tensor, None).unwrap();
            let dequantized = weight.to_dense(DType::F32, &Device::Cpu).unwrap();
            assert_eq!(serde_json::json!(dequantized.dims()), expected["shape"], "{name} {tensor}");
            assert_eq!(sha256(&dequantized), expected["sha256"].as_str().unwrap(), "{name} {tensor}");
            quantized += usize::from(weight.format_name() == format && tensor.ends_with("_proj.weight"));
        }
        // Which linear layers have no whole tiles, or were excluded.
        let dense = match name {
            "fp8-128x128" | "ct-fp8-block" | "awq-marlin-g128" => 2,
            "fp8-ue8m0-32x32" => 0,
            _ => usize::from(!name.starts_with("ct-llmc-")),
        };
        // Three projections of each of four experts are nine more than those of one block.
        let linear = if name == "gptq-act-order-experts" { 16 } else { 7 };
        assert_eq!(quantized, linear - dense, "{name}");
    }
}

#[test]
fn kinds_are_those_of_the_config() {
    for (name, _) in FIXTURES {
        let (method, shown) = match name.split_once('-').unwrap().0 {
            "awq" => (QuantMethod::Awq, "Hugging Face awq"),
            "hqq" => (QuantMethod::Hqq, "Hugging Face hqq"),
            "gptq" => (QuantMethod::Gptq, "Hugging Face gptq"),
            "bnb" => (QuantMethod::BitsAndBytes, "Hugging Face bitsandbytes"),
            "ct" => (QuantMethod::CompressedTensors, "Hugging Face compressed-tensors"),
            "fp8" => (QuantMethod::Fp8, "Hugging Face fp8"),
            _ => (QuantMethod::ModelOpt, "Hugging Face modelopt"),
        };
        let kind = open(name).kind();
        assert_eq!((kind, kind.to_string().as_str()), (CheckpointKind::HuggingFace(method), shown));
    }
}

#[test]
fn nothing_is_dequantized() {
    for (name, _) in FIXTURES {
        let checkpoint = open(name);
        for module in checkpoint.modules() {
            checkpoint.weight(&module, None).unwrap();
        }
        // Of what is rounded in that tool alone.
        let noted = ["scales of rounded keys and values (`model.layers.0.self_attn.k_scale`) are not used"];
        let noted = if name == "ct-llmc-fp8-kv" { &noted[..] } else { &[] };
        let warnings = checkpoint.warnings();
        assert_eq!(warnings.len(), noted.len(), "{name}: {warnings:?}");
        assert!(warnings.iter().zip(noted).all(|(warning, noted)| warning.contains(noted)), "{warnings:?}");
    }
}

/// A dense F32 copy of a checkpoint.
fn dense_copy(checkpoint: &Checkpoint, name: &str) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    let mut config = read_json(fixture(name).join("config.json"));
    config.as_object_mut().unwrap().remove("quantization_config");
    fs::write(copy.path().join("config.json"), config.to_string()).unwrap();
    let dequantize =
        |tensor: &str| checkpoint.tensor(tensor, None).unwrap().to_dense(DType::F32, &Device::Cpu).unwrap();
    let tensors: HashMap<String, Tensor> =
        checkpoint.tensor_names().map(|tensor| (tensor.to_owned(), dequantize(tensor))).collect();
    candle_core::safetensors::save(&tensors, copy.path().join("model.safetensors")).unwrap();
    copy
}

#[test]
fn models_compute_what_transformers_and_a_dense_copy_compute() {
    for (name, _) in FIXTURES {
        let checkpoint = open(name);
        let (tokens, expected) = reference_in(&fixture(name).join("refs.safetensors"));
        let logits = |checkpoint: &Checkpoint| {
            Model::load(checkpoint, DType::F32, &Device::Cpu).unwrap().forward(&tokens, 0).unwrap()
        };
        let packed = logits(&checkpoint);
        let copy = dense_copy(&checkpoint, name);
        let dense = Checkpoint::open(copy.path()).unwrap();
        assert_eq!(dense.kind(), CheckpointKind::Dense);
        for expected in [expected, logits(&dense)] {
            let distance = distance(&packed, &expected);
            assert!(distance.max <= 3e-4 && distance.other_argmax == 0, "{name}: {distance:?}");
        }
    }
}

/// A quantized layer of a fixture, and its shape.
fn up_projection(name: &str) -> (&'static str, [usize; 2]) {
    match name {
        "gptq-act-order-experts" => ("model.layers.0.mlp.experts.2.up_proj", [96, 64]),
        "ct-llmc-fp8-kv" | "ct-llmc-w4a8" => ("model.layers.0.mlp.up_proj", [128, 128]),
        _ => ("model.layers.0.mlp.up_proj", [256, 128]),
    }
}

#[test]
fn k_has_to_be_the_models() {
    for (name, _) in FIXTURES {
        let checkpoint = open(name);
        let (module, dims) = up_projection(name);
        assert_eq!(checkpoint.weight(module, Some(dims[1])).unwrap().dims(), dims);
        let (tensor, found) = (format!("`{module}.weight`"), format!("{dims:?}"));
        let parts = ["model.safetensors", &tensor, "256 input features", &found];
        crate::checkpoint::rejected(checkpoint.weight(module, Some(256)), &parts);
    }
}

#[test]
fn packed_weights_are_not_dense_tensors() {
    for (name, _) in FIXTURES {
        let dense = open(name).dense(&format!("{}.weight", up_projection(name).0));
        crate::checkpoint::rejected(dense, &["up_proj.weight`", "found a packed weight"]);
    }
}

/// Sizes are those of the tensors in the file.
#[test]
fn sizes_are_those_in_the_file() {
    let size = |name: &str| match open(name).weight("model.layers.0.mlp.up_proj", None).unwrap() {
        Weight::Packed(packed) => packed.size_in_bytes(),
        other => other.size_in_bytes(),
    };
    let codes = 256 * 128;
    assert_eq!(size("awq-g64"), codes / 2 + 2 * 256 * 2 + 2 * 256 / 2);
    assert_eq!(size("awq-gemv-g64"), codes / 2 + 256 * 16 * 2 + 256 * 2 * 4);
    assert_eq!(size("awq-gemv_fast-g32"), codes / 2 + 2 * 256 * 32 * 2);
    assert_eq!(size("gptq-b3-g32"), codes * 3 / 8 + 4 * 256 * 2 + 4 * 256 * 3 / 8);
    assert_eq!(size("gptq-b8-channel"), codes + 256 * 2 + 256);
    assert_eq!(size("bnb-int8"), codes + 256 * 4);
    assert_eq!(size("bnb-nf4"), codes / 2 + 256 * 2 * 4);
    assert_eq!(size("bnb-nf4-nested"), codes / 2 + 256 * 2 + 2 * 4 + 256 * 4);
    assert_eq!(size("ct-int4-asym-g64"), codes / 2 + 256 * 2 * 2 + 256 / 8 * 2 * 4);
    assert_eq!(size("ct-w8a8"), codes + 256 * 2);
    assert_eq!(size("ct-int4-g32"), codes / 2 + 256 * 4 * 2);
    assert_eq!(size("ct-nvfp4"), codes / 2 + 256 * 8 + 4);
    assert_eq!(size("ct-mxfp4"), codes / 2 + 256 * 4);
    assert_eq!(size("fp8-ue8m0-32x32"), codes + 8 * 4);
    assert_eq!(size("fp8-128x128"), codes + 2 * 4);
}
