//! What a quantized checkpoint of another tool than MLX may look like: one test for each rule.

use crate::checkpoint::{folder_of, rejected};
use crate::hf::{case_of, cases, compressed, entry, f32s, noise, open, weight, with, without, Case, Entry};
use candle_core::Device;
use candle_quant::checkpoint::{Checkpoint, CheckpointKind, Weight};
use candle_quant::Result;
use serde_json::{json, Value};

pub const FILE: &str = "model.safetensors";

/// The settings of a case with `changes` in their top level.
pub fn changed(case: &str, changes: &Value) -> Value {
    let mut quantization = case_of(case).quantization;
    for (key, value) in changes.as_object().unwrap() {
        quantization[key] = value.clone();
    }
    quantization
}

/// The weight of a case with other tensors.
pub fn weight_with(case: &str, changes: &[Entry]) -> Result<Weight> {
    let case = case_of(case);
    weight(&case.quantization, &with(&case.entries, changes))
}

#[test]
fn other_methods_are_named() {
    for method in [json!("bitnet"), json!("quip"), json!("something new"), json!(7)] {
        let result = open(&json!({"quant_method": method, "bits": 4}), &[]);
        rejected(
            result,
            &["config.json", &format!("quant_method {method}"), "not supported", "mlx_lm.convert"],
        );
    }
}

#[test]
fn other_algorithms_of_modelopt_are_named() {
    for algo in
        [json!("FP8_PB_WO"), json!("NVFP4_AWQ"), json!("W4A8_AWQ"), json!("MIXED_PRECISION"), json!(null)]
    {
        let result = open(&json!({"quant_method": "modelopt", "quant_algo": algo}), &[]);
        rejected(result, &["config.json", "modelopt", &format!("quant_algo {algo}"), "not supported"]);
    }
    let mixed = |algo: &str| {
        json!({"quant_method": "modelopt", "quantization": {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"m": {"quant_algo": "NVFP4", "group_size": 16}, "n": {"quant_algo": algo}},
        }})
    };
    rejected(open(&mixed("W8A8_SQ"), &[]), &["config.json", "quant_algo \"W8A8_SQ\"", "not supported"]);
    for algo in ["W4A16_NVFP4", "FP8"] {
        assert!(weight(&mixed(algo), &case_of("modelopt").entries).is_ok());
    }
    let result = open(&changed("modelopt", &json!({"group_size": 32})), &[]);
    rejected(result, &["config.json", "`group_size` is 32", "expected 16"]);
}

#[test]
fn other_formats_of_compressed_tensors_are_named() {
    let weights = json!({"num_bits": 8, "type": "float"});
    for format in ["mxfp6-pack-quantized", "dense"] {
        let result = open(&compressed(format, weights.clone()), &[]);
        rejected(
            result,
            &["config.json", "compressed-tensors", &format!("format \"{format}\""), "not supported"],
        );
    }
    for (key, value) in [("num_bits", json!(4)), ("type", json!("int")), ("strategy", json!("group"))] {
        let mut weights = json!({"num_bits": 8, "type": "float", "strategy": "channel"});
        weights[key] = value.clone();
        let result = open(&compressed("float-quantized", weights), &[]);
        rejected(result, &["config.json", "strategy tensor, channel or block", &format!("{key} {value}")]);
    }
    let blocks = json!({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [0, 128]});
    let result = open(&compressed("float-quantized", blocks), &[]);
    rejected(result, &["config.json", "`block_structure` is [0, 128]", "two positive numbers"]);
    let sparse = changed("pack-quantized", &json!({"sparsity_config": {"format": "sparse-24-bitmask"}}));
    rejected(open(&sparse, &[]), &["config.json", "sparsity format \"sparse-24-bitmask\"", "not supported"]);
    let dense = changed("pack-quantized", &json!({"sparsity_config": {"format": "dense"}}));
    assert!(weight(&dense, &case_of("pack-quantized").entries).is_ok());
}

/// What rotates weights is in them; what rotates activations would have to be done.
#[test]
fn transforms_of_activations_are_refused() {
    let of = |locations: &[Value]| {
        let apply: Vec<_> =
            locations.iter().map(|at| json!({"targets": ["Linear"], "location": at})).collect();
        changed(
            "pack-quantized",
            &json!({"transform_config": {"config_groups": {"R": {"type": "hadamard", "apply": apply}}}}),
        )
    };
    let entries = case_of("pack-quantized").entries;
    for refused in [json!("input"), json!("output"), json!("q_attn"), json!("k_cache"), json!(7), json!(null)]
    {
        let result = weight(&of(&[json!("weight_input"), refused.clone()]), &entries);
        let location = format!("location {refused}");
        rejected(result, &["config.json", "transform_config `R`", &location, "not supported"]);
    }
    // Queries and keys that are rotated alike have the products that they had.
    for read in [&["weight_input", "weight_output"], &["q_attn", "k_cache"]] {
        assert!(weight(&of(&read.map(|at| json!(at))), &entries).is_ok());
    }
    for none in [json!({}), json!(null), json!({"config_groups": {}})] {
        assert!(weight(&changed("pack-quantized", &json!({"transform_config": none})), &entries).is_ok());
    }
    for (wrong, told) in [
        (json!({"config_groups": {"R": {}}}), "`transform_config.config_groups.R`"),
        (json!({"config_groups": [{"apply": []}]}), "`transform_config.config_groups` is no object"),
        (json!([]), "`transform_config` is no object"),
    ] {
        let wrong = changed("pack-quantized", &json!({"transform_config": wrong}));
        rejected(weight(&wrong, &entries), &["config.json", told]);
    }
}

#[test]
fn schemes_are_those_of_their_format() {
    for (format, key, value) in [
        ("nvfp4-pack-quantized", "group_size", json!(32)),
        ("nvfp4-pack-quantized", "num_bits", json!(8)),
        ("mxfp4-pack-quantized", "group_size", json!(16)),
        ("mxfp4-pack-quantized", "type", json!("int")),
    ] {
        let result = open(&compressed(format, json!({key: value.clone()})), &[]);
        let mode = &format[..5];
        rejected(result, &["config.json", &format!("{key} {value}"), &format!("expected those of {mode}")]);
    }
}

#[test]
fn groups_of_modules_are_described() {
    let with_groups =
        |groups: Value| open(&json!({"quant_method": "compressed-tensors", "config_groups": groups}), &[]);
    rejected(with_groups(json!(null)), &["config.json", "`config_groups` is missing"]);
    rejected(with_groups(json!({})), &["config.json", "`config_groups` names no format"]);
    rejected(with_groups(json!({"a": {"weights": null}})), &["config.json", "names no format"]);
    rejected(with_groups(json!({"W4A16": ["Linear"]})), &["config.json", "`config_groups.W4A16`"]);
    rejected(
        with_groups(json!({"a": {"weights": {}}})),
        &["compressed-tensors with format null", "not supported"],
    );
}

#[test]
fn weights_have_a_format_that_the_config_names() {
    let groups_of_128 =
        compressed("pack-quantized", json!({"num_bits": 4, "type": "int", "group_size": 128}));
    for (quantization, case, expected, found) in [
        (&groups_of_128, "pack-quantized", "symmetric 4-bit g128", "symmetric 4-bit g64"),
        (&case_of("nvfp4-pack-quantized").quantization, "mxfp4-pack-quantized", "nvfp4", "found mxfp4"),
        (&case_of("mxfp4-pack-quantized").quantization, "nvfp4-pack-quantized", "mxfp4", "found nvfp4"),
    ] {
        let result = weight(quantization, &case_of(case).entries);
        rejected(result, &[FILE, "`m.weight_packed`", "config_groups", expected, found]);
    }
}

/// The file beside the config counts if the config says nothing and an algorithm is named.
#[test]
fn hf_quant_config_is_read() {
    let case = case_of("modelopt");
    let model =
        std::fs::read(crate::hf::folder(&case.quantization, &case.entries).path().join(FILE)).unwrap();
    let kind = |config: Value, beside: Value| {
        let (config, beside) = (config.to_string(), beside.to_string());
        let dir = folder_of(&[
            ("config.json", config.as_bytes()),
            ("hf_quant_config.json", beside.as_bytes()),
            (FILE, &model),
        ]);
        Ok(Checkpoint::open(dir.path())?.kind().to_string())
    };
    let nvfp4 = json!({"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}});
    assert_eq!(kind(json!({}), nvfp4.clone()).unwrap(), "Hugging Face modelopt");
    assert_eq!(kind(json!({"quantization_config": {}}), nvfp4.clone()).unwrap(), "dense safetensors");
    assert_eq!(kind(json!({"quantization": {}}), nvfp4).unwrap(), "dense safetensors");
    assert_eq!(kind(json!({}), json!({"quantization": {"quant_algo": null}})).unwrap(), "dense safetensors");
    assert_eq!(kind(json!({}), json!({})).unwrap(), "dense safetensors");
    let other = json!({"quantization": {"quant_algo": "W8A8_SQ"}});
    rejected(kind(json!({}), other), &["hf_quant_config.json", "quant_algo \"W8A8_SQ\"", "not supported"]);
}

/// A method without a quantized weight makes no quantized checkpoint, and MLX's own settings come first.
#[test]
fn tensors_make_the_kind() {
    let plain = [entry("n.weight", "BF16", &[2, 2], [0; 8])];
    for case in cases() {
        assert_eq!(open(&case.quantization, &plain).unwrap().kind(), CheckpointKind::Dense, "{}", case.name);
    }
    let mut config = json!({"quantization": {"bits": 4, "group_size": 64}});
    config["quantization_config"] = json!({"quant_method": "bitnet"});
    let mlx = [
        ("m.weight", "U32", &[8usize, 16][..]),
        ("m.scales", "BF16", &[8, 2]),
        ("m.biases", "BF16", &[8, 2]),
    ];
    let dir = crate::checkpoint::folder(&config, &mlx);
    assert_eq!(Checkpoint::open(dir.path()).unwrap().kind(), CheckpointKind::Mlx);
}

/// Tensors that a weight needs beside its codes.
const NEEDED: [(&str, &str); 20] = [
    ("gpt-oss", "m_scales"),
    ("mxfp8", "m.weight_scale_inv"),
    ("modelopt", "m.weight_scale_2"),
    ("nvfp4-pack-quantized", "m.weight_scale"),
    ("nvfp4-pack-quantized", "m.weight_global_scale"),
    ("mxfp4-pack-quantized", "m.weight_scale"),
    ("pack-quantized", "m.weight_scale"),
    ("pack-quantized zeros", "m.weight_scale"),
    ("pack-quantized zeros", "m.weight_zero_point"),
    ("fp8 floats", "m.weight_scale_inv"),
    ("awq", "m.scales"),
    ("awq", "m.qzeros"),
    ("awq gemv", "m.qzeros"),
    ("awq gemv_fast", "m.qzeros"),
    ("awq marlin", "m.scales"),
    ("gptq", "m.scales"),
    ("gptq", "m.qzeros"),
    ("bitsandbytes 4", "m.weight.absmax"),
    ("bitsandbytes 4", "m.weight.quant_map"),
    ("bitsandbytes 4", "m.weight.nested_quant_map"),
];

#[test]
fn parts_have_to_be_there() {
    for (name, part) in NEEDED {
        let case = case_of(name);
        let result = weight(&case.quantization, &without(&case.entries, part));
        rejected(result, &[FILE, &format!("`{part}`"), "beside `m", "found none"]);
    }
}

#[test]
fn parts_have_their_dtypes() {
    for (case, part, dtype) in [
        ("gpt-oss", "m_blocks", "F8_E4M3"),
        ("gpt-oss", "m_scales", "F8_E4M3"),
        ("mxfp4 words", "m.weight", "I32"),
        ("mxfp4 words", "m.scales", "F8_E4M3"),
        ("mxfp8", "m.weight", "U8"),
        ("modelopt", "m.weight", "I8"),
        ("modelopt", "m.weight_scale", "F8_E8M0"),
        ("modelopt", "m.weight_scale_2", "U32"),
        ("nvfp4-pack-quantized", "m.weight_packed", "F8_E4M3"),
        ("nvfp4-pack-quantized", "m.weight_global_scale", "U32"),
        ("mxfp4-pack-quantized", "m.weight_scale", "I8"),
        ("pack-quantized", "m.weight_packed", "U32"),
        ("pack-quantized", "m.weight_scale", "I16"),
        ("pack-quantized zeros", "m.weight_zero_point", "F32"),
        ("int-quantized", "m.weight_scale", "I16"),
        ("fp8 floats", "m.weight_scale_inv", "I32"),
        ("fp8 exponents", "m.weight", "U8"),
        ("fp8 exponents", "m.weight_scale_inv", "I8"),
        ("awq", "m.qweight", "U32"),
        ("awq", "m.qzeros", "F32"),
        ("awq", "m.scales", "I16"),
        ("awq gemv", "m.qzeros", "F32"),
        ("awq gemv_fast", "m.qweight", "F16"),
        ("awq gemv_fast", "m.qzeros", "I16"),
        ("awq marlin", "m.qweight", "F32"),
        ("awq marlin", "m.scales", "I16"),
        ("gptq", "m.qweight", "U32"),
        ("gptq", "m.qzeros", "F32"),
        ("gptq", "m.scales", "I16"),
        ("gptq", "m.g_idx", "U32"),
        ("bitsandbytes 4", "m.weight.absmax", "I8"),
        ("bitsandbytes 4", "m.weight.quant_map", "I32"),
        ("bitsandbytes 4", "m.weight.nested_absmax", "I32"),
        ("bitsandbytes 4", "m.weight.nested_quant_map", "I32"),
        ("bitsandbytes 4", "m.weight.quant_state.bitsandbytes__nf4", "I8"),
        ("bitsandbytes 8", "m.SCB", "I32"),
        ("bitsandbytes 8", "m.weight_format", "I8"),
    ] {
        let mut entries = case_of(case).entries;
        entries.iter_mut().find(|entry| entry.0 == part).unwrap().1 = dtype;
        rejected(
            weight(&case_of(case).quantization, &entries),
            &[FILE, &format!("`{part}`"), &format!("found {dtype}")],
        );
    }
    // Without exponents in the config bytes may be anything.
    let mut case = case_of("fp8 exponents");
    case.quantization["scale_fmt"] = json!(null);
    case.entries[1].1 = "U8";
    rejected(weight(&case.quantization, &case.entries), &[FILE, "`m.weight_scale_inv`", "F32", "found U8"]);
}

#[test]
fn parts_have_shapes_that_fit() {
    for (case, part, shape, expected) in [
        ("gpt-oss", "m_blocks", &[2, 8, 4, 8][..], "[.., N, K/32, 16]"),
        ("gpt-oss", "m_blocks", &[512], "[.., N, K/32, 16]"),
        ("gpt-oss", "m_scales", &[2, 16], "shape [2, 8, 2]"),
        ("gpt-oss", "m_scales", &[2, 2, 8], "shape [2, 8, 2]"),
        ("mxfp4 words", "m.weight", &[4, 16], "shape [4, 4]"),
        ("mxfp4 words", "m.scales", &[2, 8], "shape [8, 2]"),
        ("mxfp4 words", "m.weight", &[16, 4], "shape [16, 1]"),
        ("mxfp8", "m.weight", &[8, 8, 8], "a shape [N, K]"),
        ("mxfp8", "m.weight_scale_inv", &[2, 8], "shape [8, 2]"),
        ("modelopt", "m.weight", &[256], "two or more dimensions"),
        ("modelopt", "m.weight", &[64, 4], "whole groups of 16"),
        ("modelopt", "m.weight_scale", &[4, 8], "shape [8, 4]"),
        ("modelopt", "m.weight_scale", &[32], "shape [8, 4]"),
        ("mxfp4-pack-quantized", "m.weight_packed", &[4, 64], "shape [4, 4]"),
        ("pack-quantized", "m.weight_packed", &[128, 1], "32, 64 or 128 of K = 8"),
        ("pack-quantized", "m.weight_scale", &[16, 1], "config_groups"),
        ("pack-quantized", "m.weight_scale", &[1, 16], "32, 64 or 128 of K = 128"),
        ("pack-quantized", "m.weight_scale", &[2, 4, 2], "shape [8, 2]"),
        ("pack-quantized zeros", "m.weight_zero_point", &[1, 4], "shape [2, 2]"),
        ("pack-quantized zeros", "m.weight_packed", &[2, 4, 32], "a shape [N, K]"),
        ("int-quantized", "m.weight", &[16, 64], "shape [16, 1]"),
        ("int-quantized", "m.weight_scale", &[1, 8], "for rows"),
        ("fp8 floats", "m.weight", &[4, 128], "shape [2, 3]"),
        ("fp8 floats", "m.weight_scale_inv", &[2, 3], "shape [3, 2]"),
        ("fp8 exponents", "m.weight_scale_inv", &[6], "shape [3, 2]"),
        ("awq", "m.qweight", &[8, 8], "one row for each 32 of K = 8"),
        ("awq", "m.qweight", &[64], "two or more dimensions"),
        ("awq", "m.qweight", &[8, 8, 1], "a shape [K, N/8]"),
        ("awq", "m.qzeros", &[1, 2], "shape [2, 1]"),
        ("awq", "m.scales", &[1, 16], "one row for each 32 of K = 64"),
        ("awq", "m.scales", &[2, 2, 4], "shape [2, 8]"),
        ("awq gemv", "m.qweight", &[16, 8], "shape [16, 16]"),
        ("awq gemv", "m.qweight", &[32, 4], "whole groups of 64"),
        ("awq gemv", "m.qzeros", &[2, 8], "shape [8, 2]"),
        ("awq gemv", "m.scales", &[16, 8], "shape [8, 16]"),
        ("awq gemv_fast", "m.qweight", &[8, 32], "a multiple of 64"),
        ("awq gemv_fast", "m.qzeros", &[8, 16], "shape [16, 8]"),
        ("awq gemv_fast", "m.scales", &[8, 16], "shape [16, 8]"),
        ("awq marlin", "m.qweight", &[8, 64], "a multiple of 128 words"),
        ("awq marlin", "m.qweight", &[2, 2, 128], "a shape [K/16, 2 N]"),
        ("awq marlin", "m.scales", &[1, 128], "one row for each 32, as the config says, of K = 64"),
        ("awq marlin", "m.scales", &[2, 32, 2], "shape [2, 64]"),
        ("gptq", "m.qweight", &[8, 16], "shape [2, 16]"),
        ("gptq", "m.qweight", &[4, 4, 8], "a shape [K * bits / 32, N]"),
        ("gptq", "m.qzeros", &[1, 2], "shape [2, 1] of 4 bits"),
        ("gptq", "m.scales", &[1, 16], "shape [1, 8]"),
        ("gptq", "m.scales", &[2, 2, 4], "a shape [K/g, N]"),
        ("gptq", "m.g_idx", &[64, 2], "shape [128]"),
        ("bitsandbytes 4", "m.weight.absmax", &[2, 4], "shape [8]"),
        ("bitsandbytes 4", "m.weight.quant_map", &[4, 4], "shape [16]"),
        ("bitsandbytes 4", "m.weight.nested_absmax", &[2, 2], "shape [4]"),
        ("bitsandbytes 4", "m.weight.nested_quant_map", &[16, 16], "shape [256]"),
        ("bitsandbytes 8", "m.weight", &[64, 16], "shape [64]"),
        ("bitsandbytes 8", "m.weight", &[2, 4, 128], "a shape [N, K]"),
        ("bitsandbytes 8", "m.SCB", &[8, 1], "shape [8]"),
    ] {
        let mut entries = case_of(case).entries;
        let entry = entries.iter_mut().find(|entry| entry.0 == part).unwrap();
        entry.2 = shape.to_vec();
        rejected(weight(&case_of(case).quantization, &entries), &[FILE, "`m", expected, "found"]);
    }
}

/// The method says how many bits words in MLX's layout have.
#[test]
fn words_are_those_of_the_method() {
    let case = case_of("mxfp4 words");
    let result = weight(&json!({"quant_method": "mxfp8"}), &case.entries);
    rejected(result, &[FILE, "`m.scales`", "expected shape [8, 1]", "found [8, 2]"]);
}

#[test]
fn nothing_is_empty() {
    for (case, changes) in [
        ("gpt-oss", [entry("m_blocks", "U8", &[0, 8, 2, 16], []), entry("m_scales", "U8", &[0, 8, 2], [])]),
        ("mxfp4 words", [entry("m.weight", "U32", &[0, 8], []), entry("m.scales", "U8", &[0, 2], [])]),
        (
            "mxfp8",
            [entry("m.weight", "F8_E4M3", &[0, 64], []), entry("m.weight_scale_inv", "U8", &[0, 2], [])],
        ),
        ("modelopt", [entry("m.weight", "U8", &[8, 0], []), entry("m.weight_scale", "U8", &[8, 0], [])]),
        ("awq", [entry("m.qweight", "I32", &[64, 0], []), entry("m.scales", "F16", &[2, 0], [])]),
        ("gptq", [entry("m.qweight", "I32", &[16, 0], []), entry("m.scales", "F16", &[2, 0], [])]),
    ] {
        rejected(weight_with(case, &changes), &[FILE, "`m", "zero", "found ["]);
    }
}

#[test]
fn gpt_oss_gates_and_ups_come_in_pairs() {
    let case = case_of("gpt-oss");
    let odd = [
        entry("e.gate_up_proj_blocks", "U8", &[2, 7, 2, 16], noise(448, 1)),
        entry("e.gate_up_proj_scales", "U8", &[2, 7, 2], [120; 28]),
        entry("e.gate_up_proj_bias", "BF16", &[2, 7], [0; 28]),
    ];
    let checkpoint = open(&case.quantization, &with(&case.entries, &odd)).unwrap();
    for module in ["e.gate_proj", "e.up_proj"] {
        let result = checkpoint.weight(module, None);
        rejected(result, &[FILE, "`e.gate_up_proj_blocks`", "an even number of rows", "found 7"]);
        let result = checkpoint.dense(&format!("{module}.bias"));
        rejected(result, &[FILE, &format!("`{module}.bias`"), "an even number of biases", "[2, 7]"]);
    }
}

#[test]
fn what_cannot_be_followed_is_refused() {
    for (case, part) in [
        ("modelopt", "m.pre_quant_scale"),
        ("pack-quantized", "m.weight_zero_point"),
        ("mxfp4-pack-quantized", "m.weight_g_idx"),
        ("mxfp4-pack-quantized", "m.weight_zero_point"),
        ("int-quantized", "m.weight_zero_point"),
        ("awq", "m.g_idx"),
    ] {
        let result = weight_with(case, &[entry(part, "I32", &[1], [0; 4])]);
        rejected(result, &[FILE, &format!("`{part}`"), "no such tensor: ", "another quantization"]);
    }
}

#[test]
fn the_stored_shape_has_to_agree() {
    let numbers = |numbers: [u64; 2]| numbers.map(u64::to_le_bytes).concat();
    for (shape, found) in [
        (entry("m.weight_shape", "I64", &[2], numbers([8, 127])), "[8, 127]"),
        (entry("m.weight_shape", "I64", &[1, 2], numbers([8, 128])), "I64 [1, 2]"),
        (entry("m.weight_shape", "F64", &[2], numbers([8, 128])), "F64 [2]"),
    ] {
        let result = weight_with("pack-quantized", &[shape]);
        rejected(result, &[FILE, "`m.weight_shape`", "[8, 128], the shape of `m.weight_packed`", found]);
    }
    let short = entry("m.weight_shape", "I32", &[2], [8u32, 128].map(u32::to_le_bytes).concat());
    assert!(weight_with("pack-quantized", &[short]).is_ok());
}

#[test]
fn multipliers_are_one_or_one_each() {
    for (case, part) in [("modelopt", "m.weight_scale_2"), ("nvfp4-pack-quantized", "m.weight_global_scale")]
    {
        for shape in [&[8][..], &[1, 1], &[2]] {
            let values = vec![1.; shape.iter().product()];
            let result = weight_with(case, &[f32s(part, shape, &values)]);
            rejected(result, &[FILE, &format!("`{part}`"), "one value", &format!("shape {shape:?}")]);
        }
    }
}

#[test]
fn multipliers_are_finite() {
    for (case, part, values) in [
        ("modelopt", "m.weight_scale_2", [-1., f32::NAN, f32::INFINITY]),
        ("nvfp4-pack-quantized", "m.weight_global_scale", [0., f32::NAN, -2.]),
    ] {
        for value in values {
            let Weight::Packed(packed) = weight_with(case, &[f32s(part, &[1], &[value])]).unwrap() else {
                panic!("{case}");
            };
            let result = packed.load(&Device::Cpu);
            rejected(result, &[FILE, &format!("`{part}`"), "finite magnitude", &value.to_string()]);
        }
    }
}

#[test]
fn a_weight_is_stored_once() {
    for (case, twice, lead) in [
        ("awq", "m.weight", "m.qweight"),
        ("awq gemv", "m.weight", "m.qweight"),
        ("gptq", "m.weight", "m.qweight"),
        ("pack-quantized", "m.weight", "m.weight_packed"),
        ("gpt-oss", "e.up_proj.weight", "e.gate_up_proj_blocks"),
        ("gpt-oss", "e.gate_proj.bias", "e.gate_up_proj_bias"),
    ] {
        let Case { quantization, entries, .. } = case_of(case);
        let result = open(&quantization, &with(&entries, &[entry(twice, "BF16", &[2, 2], [0; 8])]));
        rejected(result, &[FILE, &format!("`{lead}`"), "in one form", &format!("`{twice}` as well")]);
    }
}

#[test]
fn integers_without_scales_are_no_weights() {
    for case in cases().into_iter().filter(|case| case.name != "fp8 floats") {
        let entries = [entry("m.weight", "U8", &[2, 2], [0; 4])];
        rejected(
            weight(&case.quantization, &entries),
            &[FILE, "`m.weight`", "expected a float weight", "U8"],
        );
    }
}
