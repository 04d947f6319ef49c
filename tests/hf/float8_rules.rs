//! What checkpoints of 8-bit floats may look like: one test for each rule.

use crate::checkpoint::{rejected, warned};
use crate::hf::{case_of, compressed, entry, f32s, noise, open, weight, with, Case};
use crate::rules::{changed, weight_with, FILE};
use serde_json::json;

#[test]
fn fp8_is_e4m3_with_known_scales() {
    for (key, value) in [("fmt", json!("e5m2")), ("expert_dtype", json!("fp4"))] {
        let result = open(&changed("fp8 floats", &json!({key: value.clone()})), &[]);
        rejected(result, &["config.json", "fp8", &format!("{key} {value}"), "not supported"]);
    }
    let result = open(&changed("fp8 floats", &json!({"scale_fmt": "ue5m3"})), &[]);
    rejected(result, &["config.json", "`scale_fmt` is \"ue5m3\"", "expected \"ue8m0\""]);
    for (size, part) in [
        (json!([128]), "not a list of two"),
        (json!("128"), "not a list of two"),
        (json!([128, 0]), "expected two positive numbers"),
        (json!([-1, 1.5]), "expected two positive numbers"),
    ] {
        let result = open(&changed("fp8 floats", &json!({"weight_block_size": size})), &[]);
        rejected(result, &["config.json", "`weight_block_size`", part]);
    }
}

#[test]
fn fp8_tiles_have_a_size() {
    let case = case_of("fp8 floats");
    let result = weight(&json!({"quant_method": "fp8"}), &case.entries);
    rejected(result, &[FILE, "`m.weight_scale_inv`", "no weight_block_size", "shape [3, 2]"]);
}

/// Dequantized where codes took as much memory as numbers do, and said.
#[test]
fn fp8_that_is_dequantized_is_said() {
    let case = case_of("fp8 floats");
    for (columns, tiles, format) in [(8, 8, "fp8 g32, filled"), (7, 10, "F32")] {
        let quantization = changed("fp8 floats", &json!({"weight_block_size": [3, columns]}));
        let scales = f32s("m.weight_scale_inv", &[3, tiles], &vec![0.5; 3 * tiles]);
        let checkpoint = open(&quantization, &with(&case.entries, &[scales])).unwrap();
        assert_eq!(checkpoint.weight("m", None).unwrap().format_name(), format);
        match format {
            "F32" => warned(&checkpoint, &["model.safetensors", "`m`", "so few columns", "dequantized"]),
            _ => assert!(checkpoint.warnings().is_empty()),
        }
    }
}

#[test]
fn exponents_cover_a_part_of_a_group() {
    let case = case_of("fp8 exponents");
    let narrow = changed("fp8 exponents", &json!({"weight_block_size": [3, 48]}));
    assert_eq!(weight(&narrow, &case.entries).unwrap().format_name(), "mxfp8, filled");
    let short = [
        entry("m.weight", "F8_E4M3", &[8, 48], noise(384, 1)),
        entry("m.weight_scale_inv", "F8_E8M0", &[3, 2], [120; 6]),
    ];
    assert_eq!(weight_with("fp8 exponents", &short).unwrap().format_name(), "mxfp8, filled");
    let narrow = changed("fp8 exponents", &json!({"weight_block_size": [3, 4]}));
    let scales = entry("m.weight_scale_inv", "F8_E8M0", &[3, 16], [120; 48]);
    let result = weight(&narrow, &with(&case.entries, &[scales]));
    rejected(result, &[FILE, "`m.weight`", "one exponent each", "K = 64, tiles of 3 x 4"]);
}

#[test]
fn float8_weights_need_scales() {
    let entries = [entry("m.weight", "F8_E4M3", &[2, 2], [0; 4])];
    for case in ["fp8 floats", "fp8 exponents", "mxfp8"] {
        let result = weight(&case_of(case).quantization, &entries);
        rejected(result, &[FILE, "`m.weight_scale_inv`", "beside `m.weight`", "found none"]);
    }
    for case in ["awq", "modelopt"] {
        rejected(weight(&case_of(case).quantization, &entries), &[FILE, "`m.weight`", "F8_E4M3"]);
    }
}

#[test]
fn scales_need_float8_weights() {
    let half = entry("m.weight", "BF16", &[8, 64], [0; 1024]);
    rejected(weight_with("fp8 floats", &[half]), &[FILE, "`m.weight`", "expected F8_E4M3", "found BF16"]);
}

#[test]
fn scales_of_modelopt_are_one_or_one_for_each_row() {
    let Case { quantization, entries, .. } = case_of("modelopt fp8");
    let with_scales =
        |dims: &[usize]| with(&entries, &[f32s("m.weight_scale", dims, &vec![0.5; dims.iter().product()])]);
    for dims in [&[][..], &[1], &[8], &[8, 1]] {
        assert_eq!(weight(&quantization, &with_scales(dims)).unwrap().format_name(), "fp8 g64", "{dims:?}");
    }
    for dims in [&[7][..], &[1, 8], &[8, 2]] {
        let found = format!("shape {dims:?}");
        rejected(weight(&quantization, &with_scales(dims)), &[FILE, "`m.weight_scale`", "one scale", &found]);
    }
}

/// A config may name several schemes: the shape of the scales tells which is a weight's.
#[test]
fn a_weight_of_one_block_is_told_from_one_of_rows() {
    let mut quantization =
        compressed("float-quantized", json!({"num_bits": 8, "type": "float", "strategy": "channel"}));
    quantization["config_groups"]["group_1"] = json!({"targets": ["m"], "weights":
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [4, 64]}});
    let entries = case_of("float-quantized").entries;
    for (dims, format) in [([8, 1], "fp8 g64"), ([2, 1], "fp8 g64")] {
        let count = dims[0] * dims[1];
        let entries = with(&entries, &[f32s("m.weight_scale", &dims, &vec![0.5; count])]);
        assert_eq!(weight(&quantization, &entries).unwrap().format_name(), format);
    }
    let wrong = with(&entries, &[f32s("m.weight_scale", &[3, 1], &[0.5; 3])]);
    rejected(weight(&quantization, &wrong), &[FILE, "`m.weight_scale`", "shape [3, 1]"]);
}

#[test]
fn scales_of_keys_and_values_are_not_used_and_that_is_said() {
    for case in ["float-quantized", "fp8 groups", "modelopt fp8"] {
        let case = case_of(case);
        let scale = f32s("model.layers.0.self_attn.k_scale", &[1], &[0.5]);
        let checkpoint = open(&case.quantization, &with(&case.entries, &[scale])).unwrap();
        assert!(!checkpoint.contains("model.layers.0.self_attn.k_scale"));
        warned(&checkpoint, &["model.safetensors", "`model.layers.0.self_attn.k_scale`", "not used"]);
        assert!(open(&case.quantization, &case.entries).unwrap().warnings().is_empty());
    }
}
