//! Every layout against its definition, computed in f64 from the bytes of the file.

use crate::hf::{
    case_of, compressed, dequantized, entry, f32s, noise, open, weight, with, without, Case, Entry,
};
use half::{bf16, f16};
use serde_json::{json, Value};

fn e2m1(code: u8) -> f64 {
    let magnitude = [0., 0.5, 1., 1.5, 2., 3., 4., 6.][usize::from(code & 7)];
    if code & 8 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

fn e4m3(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    let magnitude = match exponent {
        0 => mantissa * 2f64.powi(-9),
        _ => (1. + mantissa / 8.) * 2f64.powi(exponent - 7),
    };
    if code & 128 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

fn e8m0(code: u8) -> f64 {
    2f64.powi(i32::from(code) - 127)
}

pub fn nibble(bytes: &[u8], index: usize) -> u8 {
    bytes[index / 2] >> (index % 2 * 4) & 15
}

/// The bytes of the tensor `name`.
pub fn bytes<'a>(entries: &'a [Entry], name: &str) -> &'a [u8] {
    &entries.iter().find(|entry| entry.0 == name).unwrap().3
}

/// Asserts that module `m` has this format and shape, and that its numbers are `expected(row, column)`.
#[track_caller]
pub fn check(
    quantization: &Value,
    entries: &[Entry],
    format: &str,
    shape: &[usize],
    expected: impl Fn(usize, usize) -> f64,
) {
    let (found, dims, values) = dequantized(quantization, entries);
    assert_eq!((found.as_str(), dims.as_slice()), (format, shape));
    let k = *shape.last().unwrap();
    for (index, value) in values.iter().enumerate() {
        let expected = expected(index / k, index % k) as f32;
        assert!(*value == expected, "{index}: {value} instead of {expected}");
    }
}

#[test]
fn gpt_oss_blocks() {
    let Case { quantization, entries, .. } = case_of("gpt-oss");
    let blocks = bytes(&entries, "m_blocks");
    check(&quantization, &entries, "mxfp4", &[2, 8, 64], |row, k| {
        e2m1(nibble(blocks, row * 64 + k)) * e8m0(121)
    });
}

#[test]
fn words_and_scales() {
    let Case { quantization, entries, .. } = case_of("mxfp4 words");
    let words = bytes(&entries, "m.weight");
    check(&quantization, &entries, "mxfp4", &[8, 64], |row, k| e2m1(nibble(words, row * 64 + k)) * e8m0(122));
    // MXFP8 in MLX's names: words of four codes.
    let entries =
        [entry("m.weight", "U32", &[8, 16], noise(512, 6)), entry("m.scales", "U8", &[8, 2], [122; 16])];
    let mxfp8 = json!({"quant_method": "mxfp8"});
    check(&mxfp8, &entries, "mxfp8", &[8, 64], |row, k| e4m3(entries[0].3[row * 64 + k]) * e8m0(122));
}

#[test]
fn mxfp8_codes() {
    let Case { quantization, entries, .. } = case_of("mxfp8");
    let (codes, scales) = (bytes(&entries, "m.weight"), bytes(&entries, "m.weight_scale_inv"));
    let expected = |row: usize, k: usize| e4m3(codes[row * 64 + k]) * e8m0(scales[row * 2 + k / 32]);
    check(&quantization, &entries, "mxfp8", &[8, 64], expected);
    let renamed = with(
        &without(&entries, "m.weight_scale_inv"),
        &[entry("m.weight_scale", "F8_E8M0", &[8, 2], scales)],
    );
    check(&quantization, &renamed, "mxfp8", &[8, 64], expected);
}

/// `e2m1 * (e4m3 * multiplier)`, each product rounded to f32.
fn nvfp4(codes: &[u8], scales: &[u8], multiplier: f32, row: usize, k: usize) -> f64 {
    let scale = (e4m3(scales[row * 4 + k / 16]) as f32) * multiplier;
    e2m1(nibble(codes, row * 64 + k)) * f64::from(scale)
}

#[test]
fn modelopt_multiplies_scales() {
    let Case { quantization, entries, .. } = case_of("modelopt");
    let (codes, scales) = (bytes(&entries, "m.weight"), bytes(&entries, "m.weight_scale"));
    let expected = |row, k| nvfp4(codes, scales, 0.37, row, k);
    check(&quantization, &entries, "nvfp4", &[8, 64], expected);
    // One multiplier in a vector; scales as bytes without a type.
    let changes = [f32s("m.weight_scale_2", &[1], &[0.37]), entry("m.weight_scale", "U8", &[8, 4], scales)];
    check(&quantization, &with(&entries, &changes), "nvfp4", &[8, 64], expected);
}

#[test]
fn stacks_have_one_multiplier_for_each_matrix() {
    let Case { quantization, .. } = case_of("modelopt");
    let entries = [
        entry("m.weight", "U8", &[2, 4, 32], noise(256, 1)),
        entry("m.weight_scale", "F8_E4M3", &[2, 4, 4], noise(32, 2)),
        f32s("m.weight_scale_2", &[2], &[0.25, 3.]),
    ];
    let expected = |row: usize, k: usize| nvfp4(&entries[0].3, &entries[1].3, [0.25, 3.][row / 4], row, k);
    check(&quantization, &entries, "nvfp4", &[2, 4, 64], expected);
}

#[test]
fn compressed_tensors_divides_scales() {
    let Case { quantization, entries, .. } = case_of("nvfp4-pack-quantized");
    let (codes, scales) = (bytes(&entries, "m.weight_packed"), bytes(&entries, "m.weight_scale"));
    check(&quantization, &entries, "nvfp4", &[8, 64], |row, k| nvfp4(codes, scales, 1. / 1234.5, row, k));
}

#[test]
fn compressed_tensors_mxfp4() {
    let Case { quantization, entries, .. } = case_of("mxfp4-pack-quantized");
    let (codes, scales) = (bytes(&entries, "m.weight_packed"), bytes(&entries, "m.weight_scale"));
    check(&quantization, &entries, "mxfp4", &[8, 64], |row, k| {
        e2m1(nibble(codes, row * 64 + k)) * e8m0(scales[row * 2 + k / 32])
    });
}

/// Biases would be -8 times the scale; there are none to be rounded.
#[test]
fn compressed_tensors_integers_are_symmetric() {
    let Case { mut quantization, .. } = case_of("pack-quantized");
    let codes = noise(1024, 15);
    let numbers: Vec<f32> = (0..16).map(|index| 0.013 * (index as f32 + 1.) * [1., -1.][index % 2]).collect();
    let stored: [(&str, Vec<u8>, Vec<f64>); 3] = [
        (
            "F16",
            numbers.iter().flat_map(|number| f16::from_f32(*number).to_le_bytes()).collect(),
            numbers.iter().map(|number| f16::from_f32(*number).to_f64()).collect(),
        ),
        (
            "BF16",
            numbers.iter().flat_map(|number| bf16::from_f32(*number).to_le_bytes()).collect(),
            numbers.iter().map(|number| bf16::from_f32(*number).to_f64()).collect(),
        ),
        (
            "F32",
            numbers.iter().flat_map(|number| number.to_le_bytes()).collect(),
            numbers.iter().map(|number| f64::from(*number)).collect(),
        ),
    ];
    for (group_size, groups) in [(32, 4), (64, 2), (128, 1)] {
        quantization["config_groups"]["group_0"]["weights"]["group_size"] = json!(group_size);
        for (dtype, scales, values) in &stored {
            let (rows, size) = (16 / groups, scales.len() / 16);
            let entries = [
                entry("m.weight_packed", "I32", &[rows, 16], &codes[..rows * 64]),
                entry("m.weight_scale", dtype, &[rows, groups], &scales[..rows * groups * size]),
            ];
            let format = format!("symmetric 4-bit g{group_size}");
            check(&quantization, &entries, &format, &[rows, 128], |row, k| {
                (f64::from(nibble(&codes, row * 128 + k)) - 8.) * values[row * groups + k / group_size]
            });
        }
    }
}

/// Tiles of 3 x 64 on 8 x 160: the last ones are cut off on both sides, and hold one group of 32.
#[test]
fn fp8_scales_are_repeated_for_the_groups_of_a_tile() {
    let Case { quantization, entries, .. } = case_of("fp8 groups");
    let codes = bytes(&entries, "m.weight");
    let scales = [0.1f32, -0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9];
    check(&quantization, &entries, "fp8 g32", &[8, 160], |row, k| {
        e4m3(codes[row * 160 + k]) * f64::from(scales[row / 3 * 3 + k / 64])
    });
    // 16-bit scales stay so; of rows of whole tiles, and wherever all of K has one scale, groups are as large as they can be.
    for (size, dims, format) in [
        (json!([3, 32]), [3, 5], "fp8 g32"),
        (json!([3, 256]), [3, 1], "fp8 g32"),
        (json!(null), [8, 1], "fp8 g32"),
    ] {
        let count = dims[0] * dims[1];
        let scales: Vec<bf16> = (0..count).map(|i| bf16::from_f32(0.1 + i as f32 / 10.)).collect();
        let halves: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        let entries =
            with(&without(&entries, "m.weight_scale_inv"), &[entry("m.weight_scale", "BF16", &dims, halves)]);
        let quantization = json!({"quant_method": "fp8", "weight_block_size": size});
        let (rows, columns) = (8usize.div_ceil(dims[0]), 160usize.div_ceil(dims[1]));
        check(&quantization, &entries, format, &[8, 160], |row, k| {
            e4m3(codes[row * 160 + k]) * scales[row / rows * dims[1] + k / columns].to_f64()
        });
    }
}

/// Rows, the tensor, or blocks, as the config says.
#[test]
fn compressed_tensors_may_be_fp8() {
    let Case { quantization, entries, .. } = case_of("float-quantized");
    let codes = bytes(&entries, "m.weight");
    check(&quantization, &entries, "fp8 g64", &[8, 64], |row, k| e4m3(codes[row * 64 + k]) * 2f64.powi(-7));
    for (strategy, block, dims) in [("tensor", json!(null), &[1][..]), ("block", json!([4, 32]), &[2, 2])] {
        let weights = json!({"num_bits": 8, "type": "float", "strategy": strategy, "block_structure": block});
        let quantization = compressed("naive-quantized", weights);
        let scales = &[0.1f32, 0.2, 0.3, 0.4][..dims.iter().product()];
        let entries = with(&entries, &[f32s("m.weight_scale", dims, scales)]);
        let format = if dims.len() == 1 { "fp8 g64" } else { "fp8 g32" };
        check(&quantization, &entries, format, &[8, 64], |row, k| {
            let scale = if dims.len() == 1 { scales[0] } else { scales[row / 4 * 2 + k / 32] };
            e4m3(codes[row * 64 + k]) * f64::from(scale)
        });
    }
}

/// Tiles of 3 x 48 on 8 x 64: the last ones are cut off on both sides.
#[test]
fn fp8_tiles_of_no_whole_groups_are_filled_up() {
    let Case { quantization, entries, .. } = case_of("fp8 floats");
    let codes = bytes(&entries, "m.weight");
    let scales = [0.1f32, 0.2, 0.3, 0.4, 0.5, 0.6];
    check(&quantization, &entries, "fp8 g32, filled", &[8, 64], |row, k| {
        e4m3(codes[row * 64 + k]) * f64::from(scales[row / 3 * 2 + k / 48])
    });
    let halves: Vec<u8> = scales.iter().flat_map(|scale| bf16::from_f32(*scale).to_le_bytes()).collect();
    for name in ["m.weight_scale", "m.scale", "m.qscale_weight"] {
        let renamed =
            with(&without(&entries, "m.weight_scale_inv"), &[entry(name, "BF16", &[3, 2], halves.clone())]);
        check(&quantization, &renamed, "fp8 g32, filled", &[8, 64], |row, k| {
            e4m3(codes[row * 64 + k]) * bf16::from_f32(scales[row / 3 * 2 + k / 48]).to_f64()
        });
    }
}

#[test]
fn fp8_may_have_one_scale_for_all() {
    let Case { entries, .. } = case_of("fp8 floats");
    let codes = bytes(&entries, "m.weight");
    for (quantization, shape) in [
        (json!({"quant_method": "fp8", "weight_block_size": null}), &[][..]),
        (json!({"quant_method": "fp8", "weight_block_size": [3, 48]}), &[1]),
    ] {
        let entries = with(&entries, &[f32s("m.weight_scale_inv", shape, &[0.7])]);
        check(&quantization, &entries, "fp8 g64", &[8, 64], |row, k| {
            e4m3(codes[row * 64 + k]) * f64::from(0.7f32)
        });
    }
}

#[test]
fn exponents_of_tiles_are_repeated() {
    let Case { mut quantization, entries, .. } = case_of("fp8 exponents");
    let (codes, scales) = (bytes(&entries, "m.weight"), bytes(&entries, "m.weight_scale_inv"));
    let expected = |row: usize, k: usize| e4m3(codes[row * 64 + k]) * e8m0(scales[row / 3 * 2 + k / 32]);
    check(&quantization, &entries, "mxfp8", &[8, 64], expected);
    let bytes = with(&entries, &[entry("m.weight_scale_inv", "U8", &[3, 2], scales)]);
    check(&quantization, &bytes, "mxfp8", &[8, 64], expected);
    // Wider tiles than groups, the last cut off.
    quantization["weight_block_size"] = json!([128, 128]);
    let wide = with(&entries, &[entry("m.weight_scale_inv", "F8_E8M0", &[1, 1], [120])]);
    check(&quantization, &wide, "mxfp8", &[8, 64], |row, k| e4m3(codes[row * 64 + k]) * e8m0(120));
}

/// Column `8 j + c` of row k of `qweight` is nibble `place[c]` of word j.
#[test]
fn awq_columns_are_in_another_order() {
    let Case { quantization, .. } = case_of("awq");
    let (k, n) = (64, 24);
    let scales: Vec<f16> = (0..2 * n).map(|index| f16::from_f32(0.01 + 0.001 * index as f32)).collect();
    let entries = [
        entry("m.qweight", "I32", &[k, n / 8], noise(k * n / 2, 18)),
        entry("m.qzeros", "I32", &[2, n / 8], noise(n, 19)),
        entry(
            "m.scales",
            "F16",
            &[2, n],
            scales.iter().flat_map(|scale| scale.to_le_bytes()).collect::<Vec<_>>(),
        ),
    ];
    let code = |words: &[u8], row: usize, column: usize| {
        let place = [0, 4, 1, 5, 2, 6, 3, 7][column % 8];
        f64::from(nibble(words, row * n + column / 8 * 8 + place))
    };
    check(&quantization, &entries, "affine 4-bit g32", &[n, k], |row, k| {
        (code(&entries[0].3, k, row) - code(&entries[1].3, k / 32, row)) * scales[k / 32 * n + row].to_f64()
    });
    // Without zeros 8 stands for nothing.
    let symmetric = json!({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": false});
    check(&symmetric, &without(&entries, "m.qzeros"), "symmetric 4-bit g32", &[n, k], |row, k| {
        (code(&entries[0].3, k, row) - 8.) * scales[k / 32 * n + row].to_f64()
    });
}

/// More columns than are transposed at once.
#[test]
fn awq_matrices_may_be_wide() {
    let Case { quantization, .. } = case_of("awq");
    let (k, n) = (32, 8 * 37);
    let one = f16::ONE.to_le_bytes();
    let entries = [
        entry("m.qweight", "I32", &[k, n / 8], noise(k * n / 2, 18)),
        entry("m.qzeros", "I32", &[1, n / 8], vec![0; n / 2]),
        entry("m.scales", "F16", &[1, n], one.repeat(n)),
    ];
    check(&quantization, &entries, "affine 4-bit g32", &[n, k], |row, k| {
        let place = [0, 4, 1, 5, 2, 6, 3, 7][row % 8];
        f64::from(nibble(&entries[0].3, k * n + row / 8 * 8 + place))
    });
}

#[test]
fn a_mixed_checkpoint_has_one_format_for_each_group() {
    let scheme = |format: &str, size: usize, kind: &str| {
        let weights = json!({"num_bits": 4, "group_size": size, "type": kind});
        json!({"format": format, "weights": weights})
    };
    let quantization = json!({
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {
            "group_0": scheme("pack-quantized", 64, "int"),
            "group_1": scheme("nvfp4-pack-quantized", 16, "float"),
            "group_2": {"weights": null, "input_activations": {"num_bits": 8}},
        },
    });
    for (name, format) in [("pack-quantized", "symmetric 4-bit g64"), ("nvfp4-pack-quantized", "nvfp4")] {
        assert_eq!(weight(&quantization, &case_of(name).entries).unwrap().format_name(), format);
    }
}

/// Nothing but the weight has a name, and a module without scales is dense.
#[test]
fn parts_have_no_names() {
    for case in crate::hf::cases() {
        let plain = entry("n.weight", "BF16", &[2, 2], [0; 8]);
        let bias = entry("n.bias", "BF16", &[2], [0; 4]);
        let checkpoint = open(&case.quantization, &with(&case.entries, &[plain, bias])).unwrap();
        let names: Vec<_> = checkpoint.tensor_names().collect();
        let expected: &[&str] = match case.name {
            "gpt-oss" => &[
                "e.gate_proj.bias",
                "e.gate_proj.weight",
                "e.up_proj.bias",
                "e.up_proj.weight",
                "m.bias",
                "m.weight",
                "n.bias",
                "n.weight",
            ],
            _ => &["m.weight", "n.bias", "n.weight"],
        };
        assert_eq!(names, expected, "{}", case.name);
        assert_eq!(checkpoint.weight("n", None).unwrap().format_name(), "BF16");
        assert_eq!(checkpoint.dense("n.bias").unwrap().dims(), [2]);
        assert!(checkpoint.tensor("m.weight", None).is_ok());
    }
}
