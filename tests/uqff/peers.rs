//! UQFF models written by mistral.rs, and small ones of every family: every tensor has the numbers that
//! independent decoders give.

use crate::checkpoint::{folder_of, rejected, warned};
use crate::uqff::{assert_expected, expected, fixture, json, open, FIXTURES};
use candle_core::{DType, Device};
use candle_quant::checkpoint::{Checkpoint, CheckpointKind, Weight};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;

#[test]
fn every_tensor_of_every_fixture_is_bit_for_bit_as_expected() {
    let mut tensors = 0;
    for name in FIXTURES {
        let (checkpoint, expected) = (open(name), expected(name));
        assert_eq!(checkpoint.kind(), CheckpointKind::Uqff);
        let names: BTreeSet<_> = checkpoint.tensor_names().collect();
        assert_eq!(names, expected.keys().map(String::as_str).collect(), "{name}");
        for (tensor, expected) in &expected {
            assert_expected(&checkpoint, tensor, expected);
        }
        tensors += expected.len();
    }
    assert_eq!(tensors, 262);
}

/// The format of each weight, for reports, by fixture.
#[test]
fn weights_stay_in_their_formats() {
    let check = |name: &str, formats: &[(&str, &str)]| {
        let checkpoint = open(name);
        for (module, format) in formats {
            let weight = checkpoint.weight(module, None).unwrap();
            assert_eq!(weight.format_name(), *format, "{name} {module}");
        }
    };
    let (k, head) = ("model.layers.0.self_attn.k_proj", "lm_head");
    let embed = "model.embed_tokens";
    check("afq4", &[(k, "affine 4-bit g64"), (head, "affine 6-bit g64"), (embed, "affine 6-bit g64")]);
    check("afq8", &[(k, "affine 8-bit g64"), (head, "affine 8-bit g64")]);
    check("frommlx6", &[(k, "affine 6-bit g32"), (head, "affine 8-bit g64")]);
    check("q4k", &[(k, "ggml Q4K"), (head, "ggml Q6K"), (embed, "ggml Q6K")]);
    check("q8_0", &[(k, "ggml Q8_0"), (embed, "ggml Q8_0")]);
    check("mxfp4", &[(k, "mxfp4"), (head, "mxfp4")]);
    check("fp8", &[(k, "mxfp8"), (embed, "mxfp8")]);
    check("f8q8", &[(k, "symmetric 8-bit g32"), (embed, "symmetric 8-bit g32")]);
    check("hqq4", &[(k, "affine 4-bit g64, across rows"), (head, "affine 4-bit g64, across rows")]);
    check("v0816_afq4", &[(k, "affine 4-bit g64"), (head, "affine 4-bit g64"), (embed, "BF16")]);
    check("v090_q4k", &[(k, "ggml Q4K"), (head, "ggml Q4K"), (embed, "BF16")]);
    check("odd_afq4", &[(k, "BF16"), ("model.layers.0.mlp.down_proj", "affine 4-bit g64"), (head, "BF16")]);
    check("moe_afq4", &[("model.layers.0.mlp.experts.down_proj", "affine 4-bit g64")]);
    check(
        "families",
        &[
            ("ggml.q2_k", "ggml Q2K"),
            ("ggml.q5_1", "ggml Q5_1"),
            ("ggml.q8_1", "ggml Q8_1"),
            ("ggml.q8_k", "ggml Q8K"),
            ("ggml.f16", "F16"),
            ("ggml.bf16", "BF16"),
            ("ggml.odd_f32", "F32"),
            ("ggml.stack", "ggml Q4K"),
            ("afq.b3_g128", "affine 3-bit g128"),
            ("afq.stack", "affine 3-bit g64"),
            ("unquant.f16", "F16"),
            ("hqq.b4", "F32"),
            ("hqq.b8", "affine 8-bit g64, across rows"),
            ("fp8.packed", "mxfp8"),
            ("fp8.denormal", "mxfp8"),
            ("fp8.ragged", "fp8 g64, filled"),
            ("fp8.negative", "fp8 g64"),
            ("f8q8.packed", "symmetric 8-bit g32"),
            ("f8q8.ragged", "F32"),
            ("f8q8.filled", "F32"),
            ("mxfp4.stack", "mxfp4"),
        ],
    );
}

/// What is dequantized is said, once for each reason.
#[test]
fn dequantized_weights_are_reported() {
    for name in FIXTURES {
        let warnings = open(name).warnings();
        match name {
            "families" => {
                let reasons = [
                    ["2 weights", "`f8q8.filled.weight`", "F8Q8 run across rows"],
                    ["2 weights", "`hqq.b4.weight`", "so few rows share groups of HQQ"],
                ];
                assert_eq!(warnings.len(), reasons.len(), "{warnings:#?}");
                for parts in reasons {
                    assert!(
                        warnings.iter().any(|warning| parts.iter().all(|part| warning.contains(part))),
                        "{parts:?}: {warnings:#?}"
                    );
                }
            }
            _ => assert!(warnings.is_empty(), "{name}: {warnings:#?}"),
        }
    }
}

#[test]
fn sizes_are_those_of_the_file() {
    let checkpoint = open("f8q8");
    let weight = checkpoint.weight("model.layers.0.self_attn.k_proj", Some(256)).unwrap();
    assert_eq!((weight.dims(), weight.size_in_bytes()), (&[128, 256][..], 128 * 256 / 32 * 33));
    let weight = open("fp8").weight("model.layers.0.self_attn.k_proj", Some(256)).unwrap();
    assert_eq!(weight.size_in_bytes(), 128 * 256 + 4);
    let weight = open("hqq4").weight("model.layers.0.self_attn.k_proj", Some(256)).unwrap();
    assert_eq!(weight.size_in_bytes(), 32 * 512 + 2 * 512 * 4);
    let weight = open("moe_afq4").weight("model.layers.0.mlp.experts.down_proj", Some(128)).unwrap();
    assert_eq!((weight.dims(), weight.size_in_bytes()), (&[4, 256, 128][..], 4 * 256 * (16 * 4 + 2 * 2 * 2)));
}

/// What is stored at an address of any remainder comes out the same.
#[test]
fn data_may_lie_at_any_address() {
    let file = fs::read(fixture("families/families-0.uqff")).unwrap();
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let expected = expected("families");
    for padding in 1..8 {
        let mut shifted = (length as u64 + padding).to_le_bytes().to_vec();
        shifted.extend(&file[8..8 + length]);
        shifted.extend(std::iter::repeat_n(b' ', padding as usize));
        shifted.extend(&file[8 + length..]);
        let dir = folder_of(&[("families-0.uqff", &shifted)]);
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        for (tensor, expected) in &expected {
            assert_expected(&checkpoint, tensor, expected);
        }
    }
}

/// Neither the `quantization` that an MLX checkpoint leaves in the config decides anything, nor a missing config.
#[test]
fn the_config_is_not_asked_for_formats() {
    let checkpoint = open("frommlx6");
    assert_eq!(checkpoint.config()["quantization"]["bits"], 6);
    assert_eq!(checkpoint.kind(), CheckpointKind::Uqff);
    assert_eq!(checkpoint.weight("lm_head", Some(256)).unwrap().format_name(), "affine 8-bit g64");
    assert!(open("families").config().is_null());
}

/// Linear biases, not the biases of groups.
#[test]
fn linear_biases_are_tensors_of_their_own() {
    let checkpoint = open("qwen2_afq4");
    let bias = checkpoint.dense("model.layers.0.self_attn.k_proj.bias").unwrap();
    assert_eq!((bias.dtype(), bias.dims()), (DType::BF16, &[128][..]));
    let checkpoint = open("families");
    let bias = checkpoint.dense("fp8.packed.bias").unwrap();
    assert_eq!((bias.dtype(), bias.dims(), bias.size_in_bytes()), (DType::F32, &[5][..], 5));
    assert_eq!(checkpoint.dense("ggml.stack.bias").unwrap().dims(), [2, 3]);
}

#[test]
fn stacks_are_loaded_whole() {
    for (name, module) in [("moe_afq4", "model.layers.0.mlp.experts.gate_proj"), ("families", "mxfp4.stack")]
    {
        match open(name).weight(module, None).unwrap() {
            Weight::Packed(stack) => {
                let tensor = stack.load(&Device::Cpu).unwrap();
                assert_eq!(tensor.dims(), stack.dims());
                assert_eq!(tensor.dims().len(), 3);
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn packed_weights_are_not_dense_tensors() {
    let checkpoint = open("q4k");
    let name = "model.layers.0.self_attn.k_proj.weight";
    rejected(
        checkpoint.dense(name),
        &["q4k-0.uqff", name, "expected a dense tensor", "ggml Q4K", "module's weight"],
    );
    let k = checkpoint.weight("model.layers.0.self_attn.k_proj", Some(128));
    rejected(k.map(drop), &["q4k-0.uqff", name, "expected 128 input features", "found 256", "config.json"]);
}

/// The broken and the unusual files that come with the format's test suite.
#[test]
fn the_cases_of_the_fixtures_are_told_apart() {
    let module = "model.layers.0.self_attn.k_proj";
    let whole = open("afq4");
    let expected = &expected("afq4")[&format!("{module}.weight")];
    assert_expected(&whole, &format!("{module}.weight"), expected);
    let mut cases = 0;
    for case in json(fixture("rejects/cases.json")).as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let opened = Checkpoint::open(fixture("rejects").join(name));
        cases += 1;
        let parts: &[&str] = match name {
            "major2" => &["x-0.uqff", "expected 1.0 to 1.2", "2.2.0, incompatible"],
            "minor3" => &["x-0.uqff", "1.3.0, written by a newer version", "upgrade"],
            "noversion" => &["x-0.uqff", "`uqff.version.major`", "found none"],
            "nopatch" => &["x-0.uqff", "`uqff.version.patch`", "no such entry"],
            "version_shape1" => &["x-0.uqff", "`uqff.version.major`", "U32 of shape []", "found U32 [1]"],
            "format7" => &["x-0.uqff", "k_proj.weight.format`", "0 to 6", "found 7"],
            "bits5" => &["x-0.uqff", "k_proj.weight.bits`", "2, 3, 4, 6 or 8", "AFQ", "found 5"],
            "bits8_wrong" => {
                &["x-0.uqff", "k_proj.weight.scales`", "each 16 columns", "[128, 4]", "[128, 32]"]
            }
            "noscales" => &["x-0.uqff", "k_proj.weight.scales`", "AFQ", "found none"],
            "split2_dup" => &["x-1.uqff", "`model.layers.0.self_attn.k_proj", "the same entry", "x-0.uqff"],
            _ => {
                assert_eq!(case["expect"], Value::from("ok"), "{name}");
                let checkpoint = opened.unwrap_or_else(|error| panic!("{name}: {error}"));
                assert_expected(&checkpoint, &format!("{module}.weight"), expected);
                match name {
                    "ok_unknown_key" => warned(&checkpoint, &["x-0.uqff", "1 entries", "`foo.bar`"]),
                    _ => assert!(checkpoint.warnings().is_empty(), "{name}"),
                }
                continue;
            }
        };
        assert_eq!(case["expect"], Value::from("error"), "{name}");
        rejected(opened, parts);
    }
    assert_eq!(cases, 14);
}

#[test]
fn a_file_from_before_version_1_has_to_be_regenerated() {
    let parts = ["AFQ4-0.uqff", "before 1.0", "regenerate", "mistral.rs 0.8.4 or later"];
    rejected(Checkpoint::open(fixture("v060_AFQ4")), &parts);
}
