//! The numbered rules of the format for single layers: what has to be refused.

use crate::checkpoint::rejected;
use crate::uqff::{entry, f32s, layer, open_entries, u32, u32s, u8, values, with, without, Entry, FAMILIES};

/// Asserts that one shard of these entries is refused with a message of these parts.
#[track_caller]
fn refused(entries: &[Entry], parts: &[&str]) {
    rejected(open_entries(entries), &[&["x-0.uqff"], parts].concat());
}

/// As [`refused`], for the small layer of a family with some entries changed.
#[track_caller]
fn refused_with(family: &str, changes: &[Entry], parts: &[&str]) {
    refused(&with(&layer(family), changes), parts);
}

#[test]
fn r9_the_format_is_a_number_from_0_to_6() {
    let name = "m.weight.format";
    for family in FAMILIES {
        refused(&without(&layer(family), name), &["`m.weight.format`", "no such entry"]);
        for (wrong, found) in [
            (u8(name, 7), "found 7"),
            (u8(name, 255), "found 255"),
            (u32(name, 4), "found U32 []"),
            (entry(name, "U8", &[1], [4]), "found U8 [1]"),
        ] {
            refused_with(family, &[wrong], &["`m.weight.format`", found]);
        }
    }
    refused(&[u8(name, 7)], &["`m.weight.format`", "GGML, Unquant, HQQ, FP8, AFQ, F8Q8, MXFP4"]);
    // A weight needs a format, and so does what only a layer can have.
    refused(&[f32s("m.weight.scales", &[1], &[1.])], &["`m.weight.format`", "no such entry"]);
}

#[test]
fn r10_entries_that_numbers_need_are_required() {
    let not_needed = [
        "m.weight.optimization_steps",
        "m.weight.round_zeros",
        "m.weight.channel_wise",
        "m.weight.dequant_x_scale",
        "m.weight.quant_scale",
    ];
    for family in FAMILIES {
        let whole = layer(family);
        for (name, ..) in whole.iter().filter(|(name, ..)| name != "m.weight.format") {
            let part = without(&whole, name);
            if not_needed.contains(&name.as_str()) || (family, name.as_str()) == ("FP8", "m.weight.dtype") {
                assert!(open_entries(&part).is_ok(), "{family} {name}");
            } else {
                let quoted = format!("`{name}`");
                refused(
                    &part,
                    &[&quoted, &format!("as the layer is {family}"), "found none", "fetch or write"],
                );
            }
        }
    }
}

#[test]
fn r11_afq_widths_and_groups() {
    for bits in [0, 1, 5, 7, 9, 255] {
        let parts = ["`m.weight.bits`", "2, 3, 4, 6 or 8", "AFQ", &format!("found {bits};")];
        refused_with("AFQ", &[u8("m.weight.bits", bits)], &parts);
    }
    for group_size in [0, 16, 63, 255] {
        let parts = ["`m.weight.group_size`", "32, 64 or 128", "AFQ", &format!("found {group_size};")];
        refused_with("AFQ", &[u8("m.weight.group_size", group_size)], &parts);
    }
    let parts = ["`m.weight.group_size`", "U8 of shape []", "found U32 []"];
    refused_with("AFQ", &[u32("m.weight.group_size", 64)], &parts);
    refused_with("AFQ", &[u32("m.weight.bits", 4)], &["`m.weight.bits`", "U8 of shape []", "found U32 []"]);
}

#[test]
fn r12_afq_shapes_agree() {
    let floats = |name: &str, shape: &[usize]| {
        entry(name, "BF16", shape, vec![0; shape.iter().product::<usize>() * 2])
    };
    let scales = "m.weight.scales";
    for (shape, parts) in [
        (&[2, 2][..], ["one column for each 8 columns", "found [2, 2] beside [2, 8]"]),
        (&[3, 1], ["the leading dimensions [2]", "found [3, 1]"]),
        (&[1, 2, 1], ["the leading dimensions [2]", "found [1, 2, 1]"]),
        (&[], ["as many dimensions", "found []"]),
    ] {
        let changes = [floats(scales, shape), floats("m.weight.biases", shape)];
        refused_with("AFQ", &changes, &["`m.weight.scales`", parts[0], parts[1]]);
    }
    for shape in [&[2, 2][..], &[1, 2], &[2], &[2, 1, 1]] {
        let parts = ["`m.weight.biases`", "shape [2, 1], that of the scales", &format!("found {shape:?}")];
        refused_with("AFQ", &[floats("m.weight.biases", shape)], &parts);
    }
    // Bits that do not fit the width, though the group does.
    refused_with("AFQ", &[u8("m.weight.bits", 8)], &["`m.weight.scales`", "each 16 columns"]);
    refused_with("AFQ", &[u8("m.weight.group_size", 128)], &["`m.weight.scales`", "each 16 columns"]);
    refused_with(
        "AFQ",
        &[entry("m.weight", "I32", &[2, 8], [0; 64])],
        &["`m.weight`", "dtype U32", "found I32"],
    );
    let empty =
        [entry("m.weight", "U32", &[0, 8], []), floats(scales, &[0, 1]), floats("m.weight.biases", &[0, 1])];
    refused_with("AFQ", &empty, &["`m.weight`", "no dimension of zero", "[0, 8]"]);
}

#[test]
fn r13_ggml_blocks_fill_the_shape() {
    for id in [4, 5, 16, 29, 31, 39, 40, u32::MAX] {
        let parts = ["`m.weight.dtype`", "GGML type", &format!("found {id};")];
        refused_with("GGML", &[u32("m.weight.dtype", id)], &parts);
    }
    let shape = |dims: &[u32]| [u32s("m.weight.shape", dims)];
    refused_with("GGML", &shape(&[3, 32]), &["`m.weight`", "102 bytes for Q8_0 [3, 32]", "found 68 bytes"]);
    refused_with("GGML", &shape(&[4, 16]), &["`m.weight`", "whole blocks of 32 for Q8_0", "[4, 16]"]);
    refused_with("GGML", &shape(&[u32::MAX; 3]), &["`m.weight`", "whole blocks of 32", "4294967295"]);
    let huge = [4294967264, 4294967264, 4294967264];
    refused_with("GGML", &shape(&huge), &["`m.weight`", "4294967264", "found 68 bytes"]);
    refused_with("GGML", &[u32("m.weight.dtype", 12)], &["`m.weight`", "whole blocks of 256 for Q4K"]);
    refused_with("GGML", &[u32("m.weight.dtype", 0)], &["`m.weight`", "256 bytes for F32 [2, 32]"]);
    refused_with("GGML", &[u32("m.weight.dtype", 9)], &["`m.weight`", "72 bytes for Q8_1 [2, 32]"]);
    let wrong = entry("m.weight", "F32", &[17], [0; 68]);
    refused_with("GGML", &[wrong], &["`m.weight`", "dtype U8", "found F32"]);
}

#[test]
fn r14_f8q8_blocks_fill_the_shape() {
    for count in [0, 1, 3, u32::MAX] {
        let parts = ["`m.weight.num_blocks`", "2 blocks for [2, 32]", "F8Q8", &format!("found {count};")];
        refused_with("F8Q8", &[u32("m.weight.num_blocks", count)], &parts);
    }
    let shape = |dims: &[u32]| u32s("m.weight.shape", dims);
    refused_with("F8Q8", &[shape(&[3, 32])], &["`m.weight.num_blocks`", "3 blocks", "found 2"]);
    let more = [shape(&[3, 32]), u32("m.weight.num_blocks", 3)];
    refused_with("F8Q8", &more, &["`m.weight`", "99 bytes for 3 blocks", "found 66"]);
    refused_with("F8Q8", &[shape(&[u32::MAX; 2])], &["`m.weight.num_blocks`", "blocks for [4294967295"]);
}

#[test]
fn r15_hqq_groups_fill_the_shape() {
    let group_size = "m.weight.group_size";
    refused_with(
        "HQQ",
        &[u32(group_size, 64)],
        &["`m.weight.group_size`", "4 groups", "[2, 64]", "found 64"],
    );
    refused_with("HQQ", &[u8(group_size, 32)], &["`m.weight.group_size`", "U32 of shape []", "found U8"]);
    let shape = u32s("m.weight.shape", &[3, 64]);
    refused_with("HQQ", &[shape], &["`m.weight.group_size`", "4 groups", "[3, 64]", "found 32"]);
    let taller = [u32(group_size, 64), u32s("m.weight.shape", &[4, 64])];
    refused_with("HQQ", &taller, &["`m.weight`", "4-bit codes of 64 elements", "found 16 bytes"]);
    refused_with("HQQ", &[u8("m.weight.bits", 8)], &["`m.weight`", "8-bit codes of 32 elements", "16 bytes"]);
    for part in ["m.weight.scales", "m.weight.zeros"] {
        for shape in [&[4][..], &[4, 1], &[1, 3]] {
            let count = shape.iter().product();
            let changed = f32s(part, shape, &vec![1.; count]);
            refused_with("HQQ", &[changed], &[&format!("`{part}`"), "shape [1, 4]", &format!("{shape:?}")]);
        }
    }
    let remedy = ["hqq4 or hqq8", "is not supported"];
    for bits in [1, 2] {
        let what = format!("{bits}-bit codes of 32 elements a group");
        refused_with("HQQ", &[u8("m.weight.bits", bits)], &["`m.weight`", &what, "found 16 bytes"]);
    }
    refused_with("HQQ", &[u8("m.weight.bits", 3)], &["`m.weight`", "dtype I32", "found U8"]);
    let words = [u8("m.weight.bits", 3), entry("m.weight", "I32", &[3, 4], [0; 48])];
    refused_with("HQQ", &words, &["`m.weight`", "3-bit codes of 32 elements a group", "found 12 bytes"]);
    let parts = ["`m.weight`: HQQ of 4 bits along axis 1", remedy[0], remedy[1]];
    refused_with("HQQ", &[u8("m.weight.axis", 1)], &parts);
    refused_with("HQQ", &[u8("m.weight.axis", 2)], &["`m.weight.axis`", "expected 0", "found 2"]);
    refused_with("HQQ", &[u8("m.weight.bits", 5)], &["`m.weight.bits`", "1, 2, 3, 4 or 8", "found 5"]);
    let rank3 = entry("m.weight", "U8", &[16, 2, 2], [0; 64]);
    refused_with("HQQ", &[rank3], &["`m.weight`", "[bytes of a group, groups]", "[16, 2, 2]"]);
}

#[test]
fn r16_mxfp4_columns_and_fp8_scales() {
    let scales = |shape: &[usize]| entry("m.weight.scales", "U8", shape, vec![127; shape.iter().product()]);
    let parts = ["`m.weight.scales`", "one column for each 16 columns", "MXFP4", "[2, 2] beside [2, 16]"];
    refused_with("MXFP4", &[scales(&[2, 2])], &parts);
    refused_with("MXFP4", &[scales(&[4, 1])], &["`m.weight.scales`", "leading dimensions [2]", "[4, 1]"]);
    for scale in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let changed = f32s("m.weight.dequant_w_scale", &[], &[scale]);
        let parts = ["`m.weight.dequant_w_scale`", "a finite scale", "FP8", &format!("found {scale}")];
        refused_with("FP8", &[changed], &parts);
    }
    let vector = f32s("m.weight.dequant_w_scale", &[1], &[1.]);
    refused_with("FP8", &[vector], &["`m.weight.dequant_w_scale`", "F32 of shape []", "found F32 [1]"]);
    refused_with("FP8", &[u32("m.weight.dtype", 6)], &["`m.weight.dtype`", "F8_E4M3", "found 6"]);
    let bytes = entry("m.weight", "U8", &[2, 32], [0; 64]);
    refused_with("FP8", &[bytes], &["`m.weight`", "dtype F8_E4M3", "found U8"]);
}

#[test]
fn r17_ranks() {
    let no_stacks = ["a matrix: this family has no stacks"];
    let fp8 = entry("m.weight", "F8_E4M3", &[1, 2, 32], [0; 64]);
    refused_with("FP8", &[fp8], &["`m.weight`", no_stacks[0], "FP8", "[1, 2, 32]"]);
    for (family, dims) in [("HQQ", [1, 2, 64]), ("F8Q8", [1, 2, 32])] {
        let parts = ["`m.weight.shape`", no_stacks[0], family, &format!("{dims:?}")];
        refused_with(family, &[u32s("m.weight.shape", &dims)], &parts);
    }
    for family in ["GGML", "HQQ", "F8Q8"] {
        for dims in [&[64][..], &[1, 1, 2, 32], &[1; 9], &[]] {
            refused_with(
                family,
                &[u32s("m.weight.shape", dims)],
                &["`m.weight.shape`", "dimensions", family],
            );
        }
        let scalar = u32("m.weight.shape", 64);
        refused_with(family, &[scalar], &["`m.weight.shape`", "U32 of shape [2] or [3]", "found U32 []"]);
        refused_with(
            family,
            &[u32s("m.weight.shape", &[0, 32])],
            &["`m.weight.shape`", "no dimension of zero"],
        );
    }
    for shape in [&[6][..], &[1, 1, 2, 3]] {
        let unquant = entry("m.weight", "BF16", shape, [0; 12]);
        refused_with(
            "Unquant",
            &[unquant],
            &["`m.weight`", "two or three dimensions", &format!("{shape:?}")],
        );
    }
    let wrong = entry("m.weight", "F64", &[2, 3], [0; 48]);
    refused_with("Unquant", &[wrong], &["`m.weight`", "F32 or F16 or BF16", "found F64"]);
    for shape in [&[64][..], &[1, 1, 2, 32]] {
        let fp8 = entry("m.weight", "F8_E4M3", shape, [0; 64]);
        refused_with("FP8", &[fp8], &["`m.weight`", "two dimensions", &format!("{shape:?}")]);
    }
    for (family, dtype, shape) in [("AFQ", "U32", &[1, 1, 2, 8][..]), ("MXFP4", "U8", &[32])] {
        let bytes = vec![0; shape.iter().product::<usize>() * if dtype == "U32" { 4 } else { 1 }];
        let weight = entry("m.weight", dtype, shape, bytes);
        refused_with(family, &[weight], &["`m.weight`", "two or three dimensions", &format!("{shape:?}")]);
    }
}

#[test]
fn r18_biases_have_an_element_for_each_row() {
    for family in FAMILIES {
        for shape in [&[3][..], &[1], &[1, 2], &[]] {
            let bias = f32s("m.bias", shape, &vec![0.; shape.iter().product()]);
            refused_with(family, &[bias], &["`m.bias`", "shape [2]", family, &format!("found {shape:?}")]);
        }
    }
    let stack = [entry("m.weight", "BF16", &[2, 3, 1], [0; 12]), f32s("m.bias", &[3], &[0.; 3])];
    refused_with("Unquant", &stack, &["`m.bias`", "shape [2, 3]", "found [3]"]);
}

/// With F32 scales the product is rounded before the bias is added: 2^-22 of the largest weight is allowed.
#[test]
fn affine_weights_with_f32_scales_are_close() {
    let numbers = crate::packed::numbers(32, 7);
    let (scales, biases) = numbers.split_at(16);
    let words: Vec<u8> = (0..16 * 8 * 4).map(|i: usize| (i * 151 + i / 7) as u8).collect();
    let checkpoint = open_entries(&with(
        &layer("AFQ"),
        &[
            entry("m.weight", "U32", &[16, 8], words.clone()),
            f32s("m.weight.scales", &[16, 1], scales),
            f32s("m.weight.biases", &[16, 1], biases),
        ],
    ))
    .unwrap();
    let code = |i: usize| f64::from(words[i / 2] >> (i % 2 * 4) & 15);
    let expected: Vec<f64> =
        (0..16 * 64).map(|i| code(i) * f64::from(scales[i / 64]) + f64::from(biases[i / 64])).collect();
    let largest = expected.iter().fold(0f64, |largest, value| largest.max(value.abs()));
    let found = values(&checkpoint, "m.weight");
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(&expected) {
        assert!((f64::from(*found) - expected).abs() <= largest * 2f64.powi(-22), "{found} {expected}");
    }
}
