//! What a module of an MLX checkpoint may look like: one test for each rule on its tensors and its
//! config entries. Rules on files are in `files.rs`, on the config in `config.rs`.

use crate::checkpoint::{folder, packed, rejected, warned, weight, Tensor};
use candle_quant::checkpoint::{Checkpoint, Weight};
use candle_quant::QuantFormat;
use serde_json::{json, Value};

const FILE: &str = "model.safetensors";

/// 4-bit, group size 64, K = 128.
const AFFINE: [Tensor; 3] =
    [("m.weight", "U32", &[8, 16]), ("m.scales", "BF16", &[8, 2]), ("m.biases", "BF16", &[8, 2])];
const MXFP4: [Tensor; 2] = [("m.weight", "U32", &[8, 16]), ("m.scales", "U8", &[8, 4])];
const NVFP4: [Tensor; 2] = [("m.weight", "U32", &[8, 16]), ("m.scales", "U8", &[8, 8])];
const MXFP8: [Tensor; 2] = [("m.weight", "U32", &[8, 32]), ("m.scales", "U8", &[8, 4])];

fn top(bits: usize, group_size: usize) -> Value {
    json!({"quantization": {"bits": bits, "group_size": group_size}})
}

fn affine(bits: usize, group_size: usize) -> QuantFormat {
    QuantFormat::affine(bits, group_size).unwrap()
}

#[test]
fn words_are_u32() {
    for dtype in ["I32", "U8", "BF16"] {
        let tensors = [("m.weight", dtype, &[8usize, 16][..]), AFFINE[1], AFFINE[2]];
        rejected(weight(&top(4, 64), &tensors, None), &[FILE, "`m.weight`", "expected U32", dtype]);
    }
}

#[test]
fn words_need_scales() {
    let dir = folder(&top(4, 64), &AFFINE[..1]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let parts = [FILE, "`m.weight`", "U32 words without scales"];
    rejected(checkpoint.weight("m", None), &parts);
    rejected(checkpoint.dense("m.weight"), &parts);
}

#[test]
fn scales_need_words() {
    rejected(weight(&top(4, 64), &AFFINE[1..], None), &[FILE, "`m.scales`", "no weight"]);
}

#[test]
fn packed_weights_are_not_dense() {
    let dir = folder(&top(4, 64), &AFFINE);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    rejected(checkpoint.dense("m.weight"), &[FILE, "`m.weight`", "found a packed weight"]);
}

#[test]
fn other_tools_integer_weights_are_refused() {
    let tensors = [("m.weight", "U8", &[8usize, 64][..]), ("m.weight_scale", "F8_E4M3", &[8, 8])];
    rejected(weight(&json!({}), &tensors, None), &[FILE, "`m.weight`", "expected a float weight", "U8"]);
}

#[test]
fn float_scales_need_biases() {
    for config in [top(4, 64), json!(null)] {
        rejected(
            weight(&config, &AFFINE[..2], Some(128)),
            &[FILE, "`m.scales`", "biases beside BF16", "none"],
        );
    }
}

#[test]
fn byte_scales_exclude_biases() {
    for dtype in ["U8", "F8_E4M3", "F8_E8M0"] {
        let tensors = [AFFINE[0], ("m.scales", dtype, &[8usize, 4][..]), ("m.biases", dtype, &[8, 4])];
        rejected(weight(&json!({}), &tensors, Some(128)), &[FILE, "`m.biases`", "no biases beside", dtype]);
    }
}

#[test]
fn shapes_of_scales_and_biases_agree() {
    let tensors = [AFFINE[0], AFFINE[1], ("m.biases", "BF16", &[8usize, 4][..])];
    rejected(weight(&top(4, 64), &tensors, Some(128)), &[FILE, "`m.biases`", "[8, 2]", "[8, 4]"]);
}

#[test]
fn leading_dimensions_agree() {
    for shape in [&[7usize, 2][..], &[1, 8, 2], &[2]] {
        let tensors = [AFFINE[0], ("m.scales", "BF16", shape), ("m.biases", "BF16", shape)];
        rejected(weight(&top(4, 64), &tensors, Some(128)), &[FILE, "`m.scales`", "leading dimensions [8]"]);
    }
}

#[test]
fn dimensions_are_positive() {
    for (words, scales) in [
        (&[0usize, 16][..], &[0usize, 2][..]),
        (&[0, 8, 16], &[0, 8, 2]),
        (&[8, 0], &[8, 2]),
        (&[8, 16], &[8, 0]),
        (&[16], &[2]),
        (&[], &[]),
    ] {
        let tensors = [("m.weight", "U32", words), ("m.scales", "F16", scales), ("m.biases", "F16", scales)];
        rejected(weight(&top(4, 64), &tensors, None), &[FILE, "`m.weight`", "two or more dimensions"]);
    }
}

#[test]
fn scales_have_a_dtype_of_some_format() {
    for dtype in ["F64", "I8", "I32", "U32"] {
        let tensors = [AFFINE[0], ("m.scales", dtype, &[8usize, 2][..]), ("m.biases", dtype, &[8, 2])];
        rejected(weight(&top(4, 64), &tensors, Some(128)), &[FILE, "`m.scales`", "F16, BF16 or F32", dtype]);
    }
    let tensors = [AFFINE[0], AFFINE[1], ("m.biases", "F64", &[8usize, 2][..])];
    rejected(weight(&top(4, 64), &tensors, Some(128)), &[FILE, "`m.biases`", "F16, BF16 or F32", "F64"]);
}

#[test]
fn scales_and_biases_may_differ_in_dtype() {
    for (scales, biases) in [("F16", "BF16"), ("BF16", "F32"), ("F32", "F16")] {
        let tensors = [AFFINE[0], ("m.scales", scales, &[8usize, 2][..]), ("m.biases", biases, &[8, 2])];
        let (checkpoint, packed) = packed(&top(4, 64), &tensors, None).unwrap();
        assert_eq!(packed.format(), affine(4, 64));
        assert!(checkpoint.warnings().is_empty());
    }
}

#[test]
fn eight_bit_float_dtypes_are_scale_bytes() {
    let with_scales = |tensors: [Tensor<'static>; 2], dtype| [tensors[0], ("m.scales", dtype, tensors[1].2)];
    for (tensors, dtype, wrong, format) in [
        (MXFP4, "F8_E8M0", "F8_E4M3", QuantFormat::MXFP4),
        (NVFP4, "F8_E4M3", "F8_E8M0", QuantFormat::NVFP4),
        (MXFP8, "F8_E8M0", "F8_E4M3", QuantFormat::MXFP8),
    ] {
        let (_, packed) = packed(&json!({}), &with_scales(tensors, dtype), None).unwrap();
        assert_eq!(packed.format(), format);
        rejected(
            weight(&json!({}), &with_scales(tensors, wrong), None),
            &[FILE, "`m.scales`", wrong, format.mode()],
        );
    }
}

#[test]
fn global_scales_belong_to_nvfp4() {
    let stacked: [Tensor; 2] = [("m.weight", "U32", &[3, 8, 16]), ("m.scales", "U8", &[3, 8, 8])];
    for (tensors, dims) in [(NVFP4, &[][..]), (NVFP4, &[1]), (stacked, &[]), (stacked, &[1]), (stacked, &[3])]
    {
        let tensors = [tensors[0], tensors[1], ("m.global_scale", "F32", dims)];
        let (_, packed) = packed(&json!({}), &tensors, None).unwrap();
        assert_eq!(packed.format(), QuantFormat::NVFP4);
    }
    for (tensors, dtype, dims) in [
        (NVFP4, "F32", &[8usize][..]),
        (NVFP4, "F32", &[1, 1]),
        (NVFP4, "BF16", &[1]),
        (stacked, "F32", &[8]),
        (MXFP4, "F32", &[1]),
    ] {
        let tensors = [tensors[0], tensors[1], ("m.global_scale", dtype, dims)];
        rejected(
            weight(&json!({}), &tensors, None),
            &[FILE, "`m.global_scale`", "F32, one value or one for each expert, on an nvfp4 weight", dtype],
        );
    }
}

#[test]
fn an_override_is_complete_by_itself() {
    let mxfp4_top =
        |entry: Value| json!({"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4", "m": entry}});
    // Missing numbers come from the defaults of the entry's own mode.
    for (entry, tensors, format) in [
        (json!({"bits": 8}), [("m.weight", "U32", &[8usize, 32][..]), AFFINE[1], AFFINE[2]], affine(8, 64)),
        (json!({}), AFFINE, affine(4, 64)),
        (json!({"bits": null, "group_size": 64.0}), AFFINE, affine(4, 64)),
    ] {
        for k in [None, Some(128)] {
            assert_eq!(packed(&mxfp4_top(entry.clone()), &tensors, k).unwrap().1.format(), format);
        }
    }
    for (mode, tensors, format) in [
        ("mxfp4", MXFP4, QuantFormat::MXFP4),
        ("nvfp4", NVFP4, QuantFormat::NVFP4),
        ("mxfp8", MXFP8, QuantFormat::MXFP8),
    ] {
        let config = json!({"quantization": {"bits": 8, "group_size": 128, "m": {"mode": mode}}});
        let (checkpoint, packed) = packed(&config, &tensors, None).unwrap();
        assert_eq!((packed.format(), packed.dims()), (format, &[8, 128][..]));
        assert!(checkpoint.warnings().is_empty());
    }
}

#[test]
fn an_override_that_contradicts_the_shapes_is_refused() {
    let with = |entry: Value| json!({"quantization": {"bits": 4, "group_size": 64, "m": entry}});
    // Of the right ratio, so that only K tells.
    rejected(
        weight(&with(json!({"bits": 8, "group_size": 32})), &AFFINE, Some(128)),
        &[FILE, "`m`", "affine 8-bit g32", "K = 128", "the shapes fit", "affine 4-bit g64 (K = 128)"],
    );
    // Of a wrong ratio: refused without K, too.
    for k in [None, Some(128)] {
        rejected(weight(&with(json!({"bits": 5})), &AFFINE, k), &[FILE, "`m`", "affine 5-bit g64"]);
    }
    // Without a mode it says affine.
    rejected(
        weight(&with(json!({"bits": 4, "group_size": 32})), &MXFP4, Some(128)),
        &[FILE, "`m`", "float scales and biases", "no mode means affine", "scales U8"],
    );
    rejected(
        weight(&with(json!({"mode": "mxfp4"})), &AFFINE, Some(128)),
        &[FILE, "`m`", "U8 scales", "BF16"],
    );
    rejected(weight(&with(json!({"mode": "nvfp4"})), &MXFP4, None), &[FILE, "`m`", "nvfp4"]);
    // NF4 has float scales, too, but no biases.
    rejected(
        weight(&with(json!({"mode": "nf4"})), &AFFINE, Some(128)),
        &[FILE, "`m.biases`", "no biases", "nf4 of its entry in the config"],
    );
    rejected(
        weight(&with(json!({"mode": "nf4"})), &MXFP4, Some(128)),
        &[FILE, "`m`", "expected float scales for the nf4"],
    );
}

#[test]
fn false_means_dense() {
    let config = json!({"quantization": {"bits": 4, "group_size": 64, "m": false}});
    rejected(weight(&config, &AFFINE, Some(128)), &[FILE, "`m`", "not quantized (`false`)"]);
    let (checkpoint, dense) = weight(&config, &[("m.weight", "F16", &[8, 128])], Some(128)).unwrap();
    assert!(matches!(dense, Weight::Dense(_)), "{dense:?}");
    assert!(checkpoint.warnings().is_empty());
}

#[test]
fn shapes_win_against_the_top_level() {
    for (config, tensors, format) in [
        (top(8, 32), &AFFINE[..], affine(4, 64)),
        (top(4, 32), &MXFP4, QuantFormat::MXFP4),
        (json!({"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}}), &AFFINE, affine(4, 64)),
    ] {
        let (checkpoint, packed) = packed(&config, tensors, Some(128)).unwrap();
        assert_eq!(packed.format(), format);
        warned(&checkpoint, &["`m`", &format.to_string(), "the shapes win"]);
    }
}

#[test]
fn shapes_that_fit_nothing_are_refused_with_candidates() {
    rejected(
        weight(&top(4, 64), &AFFINE, Some(96)),
        &[
            FILE,
            "`m`",
            "K = 96",
            "[8, 16]",
            "the shapes fit affine 2-bit g128 (K = 256), affine 4-bit g64 (K = 128), affine 8-bit g32 (K = 64)",
        ],
    );
    for k in [None, Some(0), Some(usize::MAX)] {
        let tensors = [("m.weight", "U32", &[8usize, 7][..]), AFFINE[1], AFFINE[2]];
        rejected(weight(&top(4, 64), &tensors, k), &[FILE, "`m`", "[8, 7]", "the shapes fit no format"]);
        let tensors = [MXFP4[0], ("m.scales", "U8", &[8usize, 16][..])];
        rejected(weight(&top(4, 64), &tensors, k), &[FILE, "`m`", "[8, 16]"]);
    }
    // 7 bits and group 16 by shape: neither exists.
    let tensors = [("m.weight", "U32", &[8usize, 28][..]), AFFINE[1], AFFINE[2]];
    rejected(weight(&top(4, 64), &tensors, Some(128)), &[FILE, "`m`"]);
    let tensors = [AFFINE[0], ("m.scales", "F16", &[8usize, 8][..]), ("m.biases", "F16", &[8, 8])];
    rejected(weight(&top(4, 64), &tensors, Some(128)), &[FILE, "`m`"]);
}

/// The classes of formats that one ratio of words to scales leaves open.
#[test]
fn ambiguity_is_resolved_by_k_or_the_top_level_only() {
    let classes: [(usize, &[(usize, usize)]); 13] = [
        (1, &[(1, 32)]),
        (2, &[(1, 64), (2, 32)]),
        (3, &[(3, 32)]),
        (4, &[(1, 128), (2, 64), (4, 32)]),
        (5, &[(5, 32)]),
        (6, &[(3, 64), (6, 32)]),
        (8, &[(2, 128), (4, 64), (8, 32)]),
        (10, &[(5, 64)]),
        (12, &[(3, 128), (6, 64)]),
        (16, &[(4, 128), (8, 64)]),
        (20, &[(5, 128)]),
        (24, &[(6, 128)]),
        (32, &[(8, 128)]),
    ];
    for (words_per_scale, class) in classes {
        let words = [2, 4 * words_per_scale];
        let tensors: [Tensor; 3] =
            [("m.weight", "U32", &words), ("m.scales", "F16", &[2, 4]), ("m.biases", "F16", &[2, 4])];
        let names: Vec<_> = class
            .iter()
            .map(|&(bits, group_size)| format!("{} (K = {})", affine(bits, group_size), 4 * group_size))
            .collect();
        let candidates = format!("the shapes fit {}", names.join(", "));
        match class {
            [(bits, group_size)] => {
                let (_, only) = packed(&json!({}), &tensors, None).unwrap();
                assert_eq!(only.format(), affine(*bits, *group_size));
            }
            _ => rejected(weight(&json!({}), &tensors, None), &[FILE, "`m`", &candidates]),
        }
        rejected(weight(&json!({"quantization": {"mode": "mxfp8"}}), &tensors, None), &[&candidates]);
        for format in QuantFormat::all().into_iter().filter(|format| format.has_biases()) {
            let (bits, group_size) = (format.bits(), format.group_size());
            if class.contains(&(bits, group_size)) {
                let (checkpoint, by_top) = packed(&top(bits, group_size), &tensors, None).unwrap();
                assert_eq!((by_top.format(), by_top.dims()), (format, &[2, 4 * group_size][..]));
                assert!(checkpoint.warnings().is_empty());
                let (_, by_k) = packed(&json!({}), &tensors, Some(4 * group_size)).unwrap();
                assert_eq!((by_k.format(), by_k.dims()), (format, &[2, 4 * group_size][..]));
            } else if let Some((bits, _)) = class.iter().find(|(_, of_class)| *of_class == group_size) {
                let (_, by_groups) = packed(&top(format.bits(), group_size), &tensors, None).unwrap();
                assert_eq!(by_groups.format(), affine(*bits, group_size));
            } else {
                rejected(weight(&top(bits, group_size), &tensors, None), &[&format.to_string(), &candidates]);
            }
        }
    }
}

#[test]
fn byte_scales_name_their_format() {
    for (tensors, format) in
        [(MXFP4, QuantFormat::MXFP4), (NVFP4, QuantFormat::NVFP4), (MXFP8, QuantFormat::MXFP8)]
    {
        let config = json!({"quantization": {"mode": format.mode()}});
        for k in [None, Some(128)] {
            let (checkpoint, packed) = packed(&config, &tensors, k).unwrap();
            assert_eq!((packed.format(), packed.dims()), (format, &[8, 128][..]));
            assert!(checkpoint.warnings().is_empty());
        }
        rejected(weight(&config, &tensors, Some(64)), &[FILE, "`m`", "K = 64", format.mode()]);
    }
}

#[test]
fn stacked_experts_are_packed_weights() {
    let tensors: [Tensor; 3] = [
        ("m.weight", "U32", &[3, 8, 16]),
        ("m.scales", "BF16", &[3, 8, 2]),
        ("m.biases", "BF16", &[3, 8, 2]),
    ];
    let (_, packed) = packed(&top(4, 64), &tensors, Some(128)).unwrap();
    assert_eq!((packed.format(), packed.dims()), (affine(4, 64), &[3, 8, 128][..]));
    assert_eq!(packed.size_in_bytes(), 3 * 8 * (16 * 4 + 2 * 2 + 2 * 2));
}
