//! The numbered rules of the format for whole files: what has to be accepted (A) and what refused (R).

use crate::checkpoint::{raw_file, rejected, warned};
use crate::uqff::{
    entry, f32s, file, layer, open_entries, shards, u8, values, version, versioned, with, without, Entry,
    FAMILIES,
};
use candle_quant::checkpoint::Checkpoint;

/// Asserts that one shard of these entries is refused with a message of these parts.
#[track_caller]
fn refused(entries: &[Entry], parts: &[&str]) {
    rejected(open_entries(entries), &[&["x-0.uqff"], parts].concat());
}

/// Asserts that several files are refused.
#[track_caller]
fn refused_shards(files: &[Vec<u8>], parts: &[&str]) {
    rejected(Checkpoint::open(shards(files).path()), parts);
}

#[test]
fn the_small_layers_are_right() {
    for family in FAMILIES {
        let checkpoint = open_entries(&layer(family)).unwrap_or_else(|error| panic!("{family}: {error}"));
        assert!(checkpoint.tensor_names().eq(["m.weight"]), "{family}");
        assert!(values(&checkpoint, "m.weight").iter().all(|value| value.is_finite() && *value != 0.));
    }
}

#[test]
fn a1_versions_1_0_to_1_2_of_any_patch_are_read() {
    for numbers in [[1, 0, 0], [1, 1, 0], [1, 2, 0], [1, 0, 7], [1, 2, u32::MAX]] {
        let file = file(&[version(numbers), layer("AFQ")].concat());
        Checkpoint::open(shards(&[file]).path()).unwrap();
    }
}

#[test]
fn a2_one_shard_with_the_version_is_enough() {
    let (afq, other) = (layer("AFQ"), vec![entry("x", "U8", &[1], [0])]);
    for (first, second) in [
        (versioned(&afq), file(&other)),
        (file(&afq), versioned(&other)),
        (versioned(&afq), versioned(&other)),
    ] {
        let checkpoint = Checkpoint::open(shards(&[first, second]).path()).unwrap();
        assert_eq!(checkpoint.weight("m", Some(64)).unwrap().dims(), [2, 64]);
    }
}

#[test]
fn a3_unknown_entries_are_ignored_and_listed() {
    let extra = [
        entry("foo.bar", "U8", &[1], [0]),
        entry("m.weight.shades", "F32", &[0], []),
        entry("n.bias", "F32", &[1], [0; 4]),
    ];
    for family in FAMILIES {
        let checkpoint = open_entries(&[layer(family), extra.to_vec()].concat()).unwrap();
        assert!(checkpoint.tensor_names().eq(["m.weight"]));
        let warnings: Vec<_> =
            checkpoint.warnings().into_iter().filter(|text| text.contains("belong to no layer")).collect();
        assert_eq!(warnings.len(), 1);
        assert!(warnings[0].contains("3 entries") && warnings[0].contains("`foo.bar`"), "{warnings:?}");
    }
    // What begins with a dot is nobody's, not even the root's.
    let nobodys = [entry(".weight", "U8", &[1], [0]), u8(".weight.format", 9), u8("weight.format.x", 9)];
    let checkpoint = open_entries(&[layer("AFQ"), nobodys.to_vec()].concat()).unwrap();
    warned(&checkpoint, &["3 entries", "`.weight`"]);
    let root = layer("AFQ")
        .into_iter()
        .map(|(name, dtype, shape, bytes)| (name[2..].to_owned(), dtype, shape, bytes));
    let checkpoint = open_entries(&root.collect::<Vec<_>>()).unwrap();
    assert_eq!(checkpoint.weight("", Some(64)).unwrap().dims(), [2, 64]);
    // Entries of another family decide nothing.
    let checkpoint = open_entries(&with(&layer("MXFP4"), &[u8("m.weight.bits", 77)])).unwrap();
    assert!(checkpoint.warnings().is_empty());
}

#[test]
fn a4_scales_and_biases_have_any_float_dtype() {
    // 1.5 and -2 in the three dtypes.
    let encodings: [(&'static str, [&[u8]; 2]); 3] = [
        ("BF16", [&[0xc0, 0x3f], &[0x00, 0xc0]]),
        ("F16", [&[0x00, 0x3e], &[0x00, 0xc0]]),
        ("F32", [&[0, 0, 0xc0, 0x3f], &[0, 0, 0, 0xc0]]),
    ];
    for (scale_dtype, [scale, _]) in encodings {
        for (bias_dtype, [_, bias]) in encodings {
            let entries = with(
                &layer("AFQ"),
                &[
                    entry("m.weight.scales", scale_dtype, &[2, 1], scale.repeat(2)),
                    entry("m.weight.biases", bias_dtype, &[2, 1], bias.repeat(2)),
                    entry("m.bias", bias_dtype, &[2], bias.repeat(2)),
                ],
            );
            let checkpoint = open_entries(&entries).unwrap();
            // All codes are 1.
            assert_eq!(values(&checkpoint, "m.weight"), [-0.5; 128], "{scale_dtype} {bias_dtype}");
            assert_eq!(values(&checkpoint, "m.bias"), [-2.; 2]);
        }
        let scales = entry("m.weight.scales", scale_dtype, &[1, 4], scale.repeat(4));
        let checkpoint = open_entries(&with(&layer("HQQ"), &[scales])).unwrap();
        // (1 - 0.5) * 1.5
        assert_eq!(values(&checkpoint, "m.weight"), [0.75; 128]);
    }
    for family in FAMILIES {
        // E4M3 0xb8 is -1, 0x40 is 2.
        let entries = with(&layer(family), &[entry("m.bias", "F8_E4M3", &[2], [0xb8, 0x40])]);
        assert_eq!(values(&open_entries(&entries).unwrap(), "m.bias"), [-1., 2.]);
        let entries = with(&layer(family), &[entry("m.bias", "U8", &[2], [0; 2])]);
        refused(&entries, &["`m.bias`", "F32 or F16 or BF16 or F8_E4M3", family, "found U8"]);
    }
}

#[test]
fn a5_scales_may_be_negative_zero_or_denormal() {
    let scales = [-0.5, 0., f32::from_bits(1), -1e-40];
    let scaled = |entries: &[Entry]| values(&open_entries(entries).unwrap(), "m.weight");
    let afq = with(
        &layer("AFQ"),
        &[
            entry("m.weight", "U32", &[4, 8], [0x33; 128]),
            f32s("m.weight.scales", &[4, 1], &scales),
            f32s("m.weight.biases", &[4, 1], &[0.; 4]),
        ],
    );
    let expected: Vec<f32> = scales.iter().flat_map(|scale| [3. * scale; 64]).collect();
    assert_eq!(scaled(&afq), expected);
    let hqq = with(&layer("HQQ"), &[f32s("m.weight.scales", &[1, 4], &scales)]);
    let expected: Vec<f32> = (0..128).map(|i| (1. - 0.5) * scales[i % 4]).collect();
    assert_eq!(scaled(&hqq), expected);
    // E4M3 0x11 is 0.03515625.
    for scale in scales {
        let fp8 = with(&layer("FP8"), &[f32s("m.weight.dequant_w_scale", &[], &[scale])]);
        assert_eq!(scaled(&fp8), [0.03515625 * scale; 64], "{scale}");
    }
    // Number of a block: -1, 0 and the smallest, 2^-9.
    for (code, scale) in [(0xb8, -1f32), (0, 0.), (1, 0.001953125)] {
        let block = [&[code][..], &[0x11; 32]].concat();
        let f8q8 = with(&layer("F8Q8"), &[entry("m.weight", "U8", &[66], block.repeat(2))]);
        assert_eq!(scaled(&f8q8), [17. * (scale / 416.); 64]);
    }
}

#[test]
fn a6_a_layer_may_lie_in_several_shards() {
    for family in FAMILIES {
        let whole = layer(family);
        let expected = values(&open_entries(&whole).unwrap(), "m.weight");
        for cut in 1..whole.len() {
            let dir = shards(&[file(&whole[..cut]), versioned(&whole[cut..])]);
            assert_eq!(
                values(&Checkpoint::open(dir.path()).unwrap(), "m.weight"),
                expected,
                "{family} {cut}"
            );
        }
    }
}

#[test]
fn r1_keys_that_are_numbers_mean_an_old_file() {
    let old = [entry("0", "U8", &[2], [0; 2]), entry("17", "U8", &[1], [0])];
    let parts = ["x-0.uqff", "UQFF of a version before 1.0", "regenerate", "mistral.rs"];
    refused_shards(&[file(&old)], &parts);
    refused_shards(&[file(&old[..1]), file(&old[1..])], &parts);
}

#[test]
fn r2_a_version_is_required() {
    let parts = ["x-0.uqff", "`uqff.version.major`", "the version of the format", "found none"];
    refused_shards(&[file(&layer("AFQ"))], &parts);
    refused_shards(&[file(&layer("AFQ")), file(&[entry("0", "U8", &[1], [0])])], &parts);
    refused_shards(&[file(&[])], &parts);
}

#[test]
fn r3_a_version_is_complete() {
    for part in ["uqff.version.major", "uqff.version.minor", "uqff.version.patch"] {
        let incomplete = file(&without(&[version([1, 2, 0]), layer("AFQ")].concat(), part));
        refused_shards(
            std::slice::from_ref(&incomplete),
            &["x-0.uqff", &format!("`{part}`"), "found no such entry"],
        );
        let other = versioned(&[]);
        refused_shards(&[other, incomplete], &["x-1.uqff", &format!("`{part}`"), "found no such entry"]);
    }
}

#[test]
fn r4_r5_other_versions_are_refused() {
    for (numbers, parts) in [
        ([2, 0, 0], ["found 2.0.0, incompatible", "version 1 of the format"]),
        ([0, 2, 0], ["found 0.2.0, written by an early mistral.rs", "mistral.rs 0.8.4 or later"]),
        ([u32::MAX, 0, 0], ["found 4294967295.0.0, incompatible", "version 1 of the format"]),
        ([1, 3, 0], ["found 1.3.0, written by a newer version", "upgrade this crate"]),
        ([1, u32::MAX, 9], ["1.4294967295.9, written by a newer version", "upgrade this crate"]),
    ] {
        let file = file(&[version(numbers), layer("AFQ")].concat());
        refused_shards(&[file], &["x-0.uqff", "`uqff.version`", "expected 1.0 to 1.2", parts[0], parts[1]]);
    }
}

#[test]
fn r6_shards_have_one_version() {
    let [first, second] = [[1, 2, 0], [1, 2, 1]].map(|numbers| file(&version(numbers)));
    let parts = ["x-1.uqff", "expected 1.2.0, as in ", "x-0.uqff", "found 1.2.1", "two models"];
    refused_shards(&[first, second], &parts);
}

#[test]
fn r7_versions_are_scalars_of_u32() {
    let name = "uqff.version.minor";
    for (wrong, found) in [
        (entry(name, "U32", &[1], [2, 0, 0, 0]), "U32 [1]"),
        (entry(name, "I32", &[], [2, 0, 0, 0]), "I32 []"),
        (u8(name, 2), "U8 []"),
        (entry(name, "I64", &[], [2, 0, 0, 0, 0, 0, 0, 0]), "I64 []"),
    ] {
        let file = file(&with(&version([1, 2, 0]), &[wrong]));
        refused_shards(&[file], &["x-0.uqff", "`uqff.version.minor`", "U32 of shape []", found]);
    }
}

#[test]
fn r8_entries_are_in_one_file() {
    let twice = versioned(&layer("AFQ")[..1]);
    let parts = ["x-1.uqff", "`m.weight`", "each entry in one file", "the same entry in", "x-0.uqff"];
    refused_shards(&[versioned(&layer("AFQ")), twice], &parts);
}

/// The checks of headers are those of every safetensors file; here for `.uqff` files.
#[test]
fn r19_headers_are_checked() {
    let open = |bytes: Vec<u8>| Checkpoint::open(shards(&[bytes]).path());
    let mut long = 100_000_001u64.to_le_bytes().to_vec();
    long.extend([b'{'; 16]);
    rejected(open(long), &["x-0.uqff", "100000001 bytes"]);
    rejected(open(1000u64.to_le_bytes().to_vec()), &["x-0.uqff", "the header claims 1000 bytes"]);
    let two = |a: [usize; 2], b: [usize; 2]| {
        let header = serde_json::json!({
            "a": {"dtype": "U8", "shape": [2], "data_offsets": a},
            "b": {"dtype": "U8", "shape": [2], "data_offsets": b},
        });
        open(raw_file(&header.to_string(), &[0; 4]))
    };
    rejected(two([0, 2], [2, 4]), &["x-0.uqff", "`uqff.version.major`"]);
    rejected(two([0, 2], [4, 6]), &["x-0.uqff", "`b`", "within the 4 bytes"]);
    rejected(two([2, 0], [2, 4]), &["x-0.uqff", "`a`", "span 2 bytes", "[2, 0]"]);
    rejected(two([0, 2], [1, 3]), &["x-0.uqff", "`b`", "overlaps"]);
    rejected(two([0, 3], [3, 4]), &["x-0.uqff", "span 2 bytes"]);
    let mut truncated = versioned(&layer("AFQ"));
    truncated.pop();
    rejected(open(truncated), &["x-0.uqff", "`m.weight.group_size`", "data_offsets within"]);
}

#[test]
fn one_warning_for_all_decoded_weights() {
    warned(&open_entries(&layer("HQQ")).unwrap(), &["x-0.uqff", "1 weights", "`m.weight`", "HQQ"]);
}
