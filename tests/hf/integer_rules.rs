//! What checkpoints of integers and of bitsandbytes may look like: one test for each rule.

use crate::checkpoint::{rejected, warned};
use crate::hf::{case_of, compressed, entry, f32s, noise, open, weight, with, without, Entry};
use crate::rules::{changed, weight_with, FILE};
use serde_json::json;

#[test]
fn integers_have_known_bits_and_groups_or_rows() {
    let right = json!({"num_bits": 4, "type": "int", "symmetric": true, "group_size": 64});
    for (format, key, value) in [
        ("pack-quantized", "num_bits", json!(1)),
        ("pack-quantized", "num_bits", json!(7)),
        ("pack-quantized", "num_bits", json!(null)),
        ("pack-quantized", "type", json!("float")),
        ("pack-quantized", "group_size", json!(16)),
        ("pack-quantized", "group_size", json!(null)),
        ("int-quantized", "num_bits", json!(9)),
        ("int-quantized", "num_bits", json!(null)),
    ] {
        let mut weights = right.clone();
        weights[key] = value.clone();
        let result = open(&compressed(format, weights), &[]);
        let group = "`config_groups.group_0.weights`";
        rejected(result, &["config.json", format, group, &format!("{key} {value}"), "not supported"]);
    }
    let token = json!({"num_bits": 8, "type": "int", "strategy": "token"});
    rejected(open(&compressed("int-quantized", token), &[]), &["config.json", "strategy \"token\""]);
}

/// The stored shape decides if the config names several widths.
#[test]
fn widths_of_integers_are_those_of_the_shape() {
    let scheme = |bits: usize| json!({"weights": {"num_bits": bits, "type": "int", "group_size": 64}});
    let quantization = json!({
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"a": scheme(8), "b": scheme(4)},
    });
    let entries = case_of("pack-quantized").entries;
    assert_eq!(weight(&quantization, &entries).unwrap().format_name(), "symmetric 4-bit g64");
    let wide = with(
        &without(&entries, "m.weight_shape"),
        &[entry("m.weight_packed", "I32", &[8, 32], noise(1024, 15))],
    );
    assert_eq!(weight(&quantization, &wide).unwrap().format_name(), "symmetric 8-bit g64");
}

#[test]
fn awq_has_four_bits_in_known_layouts() {
    for version in [json!("llm-awq"), json!("exllama"), json!("marlin2"), json!(1)] {
        let result = open(&changed("awq", &json!({"version": version})), &[]);
        rejected(result, &["config.json", &format!("version {version}"), "not supported"]);
    }
    rejected(
        open(&changed("awq", &json!({"bits": 8})), &[]),
        &["config.json", "with 8 bits", "not supported"],
    );
    for (key, value) in [("bits", json!(0)), ("bits", json!("4")), ("group_size", json!(1.5))] {
        let result = open(&changed("awq", &json!({key: value.clone()})), &[]);
        rejected(result, &["config.json", &format!("`{key}` is {value}"), "positive whole number"]);
    }
    let entries = case_of("awq").entries;
    for accepted in [json!({"version": "GEMM"}), json!({"version": null, "group_size": null})] {
        assert!(weight(&changed("awq", &accepted), &entries).is_ok(), "{accepted}");
    }
}

/// Module `m` of AutoAWQ with so many groups of all of K.
fn awq_of_groups(k: usize, groups: usize) -> [Entry; 3] {
    [
        entry("m.qweight", "I32", &[k, 1], noise(k * 4, 18)),
        entry("m.qzeros", "I32", &[groups, 1], noise(groups * 4, 19)),
        entry("m.scales", "F16", &[groups, 8], vec![0; groups * 16]),
    ]
}

/// -1 is one group for a row, of whatever K that whole groups here are made of.
#[test]
fn awq_has_groups_of_rows() {
    let of_rows = changed("awq", &json!({"group_size": -1}));
    for (k, group_size) in [(64, 64), (96, 32), (192, 64), (256, 128), (1056, 32)] {
        let found = weight(&of_rows, &awq_of_groups(k, 1)).unwrap();
        assert_eq!((found.format_name(), found.dims()), (format!("affine 4-bit g{group_size}"), &[8, k][..]));
    }
    let result = weight(&of_rows, &awq_of_groups(80, 1));
    rejected(
        result,
        &[FILE, "`m.scales`", "each 32 of K = 80, or for each multiple of 32", "found shape [1, 8]"],
    );
    let of_256 = changed("awq", &json!({"group_size": 256}));
    assert_eq!(weight(&of_256, &awq_of_groups(512, 2)).unwrap().format_name(), "affine 4-bit g128");
    for (k, groups) in [(512, 1), (512, 4), (128, 1), (512, 3)] {
        let result = weight(&of_256, &awq_of_groups(k, groups));
        let expected = format!("one row for each 256 of K = {k}, as the config says");
        rejected(result, &[FILE, "`m.scales`", &expected, &format!("found shape [{groups}, 8]")]);
    }
    // Zeros are those of the groups in the file.
    let zeros = entry("m.qzeros", "I32", &[4, 1], noise(16, 19));
    let result = weight(&of_256, &with(&awq_of_groups(512, 2), &[zeros]));
    rejected(result, &[FILE, "`m.qzeros`", "expected shape [2, 1]", "found [4, 1]"]);
}

#[test]
fn gptq_has_known_widths_and_layouts() {
    for (key, value) in [
        ("bits", json!(5)),
        ("checkpoint_format", json!("marlin")),
        ("checkpoint_format", json!("gptq_p")),
        ("format", json!("bitblas")),
        ("is_marlin_format", json!(true)),
        ("pack_dtype", json!("int16")),
    ] {
        let result = open(&changed("gptq", &json!({key: value.clone()})), &[]);
        rejected(result, &["config.json", "gptq", &format!("{key} {value}"), "not supported"]);
    }
    let entries = case_of("gptq").entries;
    for accepted in [
        json!({"checkpoint_format": "gptq", "format": "gptq", "pack_dtype": "int32", "is_marlin_format": false}),
        json!({"checkpoint_format": "gptq_v2"}),
        json!({"bits": null, "group_size": null}),
        json!({"dynamic": {"+:.*": {"bits": 4, "group_size": 64}, "-:.*v_proj": {}}, "bits": 8, "group_size": 32}),
    ] {
        assert!(weight(&changed("gptq", &accepted), &entries).is_ok(), "{accepted}");
    }
    let result = weight(&changed("gptq", &json!({"group_size": 32})), &entries);
    rejected(result, &[FILE, "`m.scales`", "one row for each 32 of K = 128, as the config says", "[2, 8]"]);
    let result = weight(&changed("gptq", &json!({"bits": 8})), &entries);
    rejected(result, &[FILE, "`m.qzeros`", "shape [2, 2] of 8 bits", "[2, 1]"]);
}

#[test]
fn bitsandbytes_says_what_its_bytes_are() {
    let right = json!({
        "quant_type": "nf4", "blocksize": 128, "shape": [8, 128], "nested_blocksize": 2, "nested_offset": 0.5,
    });
    assert!(weight_with("bitsandbytes 4", &[crate::hf::state(&right)]).is_ok());
    for (key, value, expected) in [
        ("quant_type", json!("fp4"), "expected quant_type nf4, found \"fp4\""),
        ("blocksize", json!(0), "found blocksize 0"),
        ("blocksize", json!(32), "expected shape [16], found [4]"),
        ("shape", json!([8]), "the shape [N, K] of a matrix, found shape [8]"),
        ("shape", json!([8, -128]), "found shape [8,-128]"),
        ("shape", json!([16, 128]), "1024 bytes for [16, 128], found 512 bytes"),
        ("shape", json!([16, 32]), "256 bytes for [16, 32], found 512 bytes"),
        ("shape", json!([0, 128]), "elements can be counted, found shape [0, 128]"),
        ("shape", json!([1u64 << 33, 1u64 << 34]), "elements can be counted, found shape"),
        ("nested_blocksize", json!(null), "found nested_blocksize null"),
        ("nested_offset", json!("0"), "a number for nested_offset"),
    ] {
        let mut state = right.clone();
        state[key] = value;
        rejected(weight_with("bitsandbytes 4", &[crate::hf::state(&state)]), &[FILE, "`m.weight", expected]);
    }
    let garbage = entry("m.weight.quant_state.bitsandbytes__nf4", "U8", &[3], *b"{1}");
    rejected(weight_with("bitsandbytes 4", &[garbage]), &[FILE, "bitsandbytes__nf4`", "expected JSON"]);
    let mut map = crate::hf::NF4;
    map[3] = -0.394_917_6;
    let map = f32s("m.weight.quant_map", &[16], &map);
    let parts = [FILE, "`m.weight.quant_map`", "the numbers of nf4, -0.3949175", "found -0.3949176"];
    rejected(weight_with("bitsandbytes 4", &[map]), &parts);
    let mut case = case_of("bitsandbytes 4");
    let state = case.entries.iter_mut().find(|entry| entry.0.ends_with("nf4")).unwrap();
    state.0 = state.0.replace("nf4", "fp4");
    let parts = [FILE, "bitsandbytes__fp4`", "expected quant_type fp4", "found \"nf4\""];
    rejected(weight(&case.quantization, &case.entries), &parts);
    let order = entry("m.weight_format", "U8", &[], [2]);
    rejected(
        weight_with("bitsandbytes 8", &[order]),
        &[FILE, "`m.weight_format`", "0, for codes in rows", "[2]"],
    );
}

#[test]
fn the_config_and_the_scales_of_awq_agree() {
    let case = case_of("awq");
    let result = weight(&changed("awq", &json!({"group_size": 64})), &case.entries);
    rejected(result, &[FILE, "`m.scales`", "one row for each 64 of K = 64, as the config says", "[2, 8]"]);
    // Groups of 16 don't exist, whatever the config says.
    let small = [entry("m.scales", "F16", &[4, 8], [0; 64]), entry("m.qzeros", "I32", &[4, 1], [0; 16])];
    let case = json!({"quant_method": "awq"});
    let result = weight(&case, &with(&case_of("awq").entries, &small));
    rejected(result, &[FILE, "`m.scales`", "each 32 of K = 64, or for each multiple of 32", "[4, 8]"]);
}

/// Scales of keys and values are no tensors of the model, by their names of today and of before, and that is said.
#[test]
fn scales_of_the_cache_have_no_names() {
    for name in ["int-quantized", "pack-quantized", "fp8 floats", "modelopt", "awq", "gptq"] {
        let case = case_of(name);
        for scale in [
            "self_attn.q_scale",
            "self_attn.k_scale",
            "self_attn.v_scale",
            "self_attn.kv_scale",
            "self_attn.k_zero_point",
            "self_attn.v_zero_point",
            "self_attn.k_proj.k_scale",
            "self_attn.k_proj.output_scale",
            "self_attn.v_proj.output_scale",
            "self_attn.v_proj.output_zero_point",
            "self_attn.qkv_proj.output_scale",
        ] {
            let checkpoint =
                open(&case.quantization, &with(&case.entries, &[f32s(scale, &[1], &[0.5])])).unwrap();
            assert!(checkpoint.tensor_names().eq(["m.weight"]), "{name} {scale}");
            warned(&checkpoint, &[FILE, "keys and values", &format!("`{scale}`"), "not used"]);
        }
    }
    // Beside a weight that they belong to.
    let case = case_of("int-quantized");
    let mut entries = case.entries;
    entries.iter_mut().for_each(|entry| entry.0 = entry.0.replace("m.", "self_attn.k_proj."));
    entries.push(f32s("self_attn.k_proj.output_scale", &[1], &[0.5]));
    let checkpoint = open(&case.quantization, &entries).unwrap();
    assert!(checkpoint.tensor_names().eq(["self_attn.k_proj.weight"]));
    warned(&checkpoint, &[FILE, "`self_attn.k_proj.output_scale`", "not used"]);
}
