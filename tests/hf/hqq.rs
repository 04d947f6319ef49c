//! HQQ's packings, against their definitions, computed in f64 from the bytes of the file.

use crate::checkpoint::rejected;
use crate::hf::{case_of, entry, f32s, noise, open, weight, with, without, Entry};
use crate::layouts::check;
use crate::rules::{weight_with, FILE};
use half::f16;
use serde_json::json;

const N: usize = 16;
const K: usize = 320;

/// Scales and zeros of so many groups, and their bytes.
fn halves(groups: usize, step: f32, shift: f32) -> (Vec<u8>, Vec<f64>) {
    let numbers: Vec<f16> =
        (0..groups).map(|group| f16::from_f32(shift + step * (group % 17) as f32)).collect();
    let bytes = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    (bytes, numbers.into_iter().map(f16::to_f64).collect())
}

/// A file, and the scales and zeros of its groups.
fn file(packing: &str, axis: i32, group: usize, codes: &[u8]) -> (Vec<Entry>, Vec<f64>, Vec<f64>) {
    let groups = N * K / group;
    let dims = if axis == 1 { [groups, 1] } else { [1, groups] };
    let (scale_bytes, scales) = halves(groups, 0.03125, 0.0117);
    let (zero_bytes, zeros) = halves(groups, 0.37, 0.81);
    let dtype = if packing == "3bit_32" { "I32" } else { "U8" };
    let size = if dtype == "I32" { codes.len() / 4 } else { codes.len() };
    let entries = vec![
        entry("m.W_q", dtype, &[size], codes),
        entry("m.scale", "F16", &dims, scale_bytes),
        entry("m.zero", "F16", &dims, zero_bytes),
        entry("m.shape", "I64", &[2], [N as u64, K as u64].map(u64::to_le_bytes).concat()),
        entry("m.axis", "I32", &[], axis.to_le_bytes()),
        entry("m.group_size", "I32", &[], (group as i32).to_le_bytes()),
        entry("m.packing", "U8", &[packing.len()], packing.as_bytes()),
    ];
    (entries, scales, zeros)
}

/// Element `index` of all: which part of a byte or word it is in, and in which.
fn code(packing: &str, codes: &[u8], (rows, columns): (usize, usize), index: usize) -> f64 {
    let (row, column) = (index / columns, index % columns);
    match packing {
        "3bit_32" => {
            let stored = rows.div_ceil(10);
            let at = 4 * (row % stored * columns + column);
            let word = u32::from_le_bytes(codes[at..at + 4].try_into().unwrap());
            f64::from(word >> (27 - 3 * (row / stored)) & 7)
        }
        _ => {
            let bits = usize::from(packing.as_bytes()[0] - b'0');
            let stored = rows * bits / 8;
            let byte = codes[row % stored * columns + column];
            f64::from(byte >> (8 - bits * (row / stored + 1)) & (u8::MAX >> (8 - bits)))
        }
    }
}

#[test]
fn codes_of_far_rows_share_a_byte_or_a_word() {
    for packing in ["8bit_u8", "4bit_u8", "3bit_32", "2bit_u8", "1bit_u8"] {
        for (axis, group, format) in [
            (1, 64, Some("g64")),
            (1, 32, Some("g32")),
            (1, 160, Some("g32")),
            (1, 16, Some("g32, filled")),
            (1, 8, Some("g32, filled")),
            (1, 80, Some("g32, filled")),
            (1, 128, None),
            (0, 64, Some("g64, across rows")),
            (0, 40, Some("g40, across rows")),
            (0, 16, Some("g16, across rows")),
            (0, 8, Some("g8, across rows")),
        ] {
            let groups = N * K / group;
            let (rows, columns) = if axis == 1 { (groups, group) } else { (group, groups) };
            let bits = usize::from(packing.as_bytes()[0] - b'0');
            let size = match packing {
                "3bit_32" => rows.div_ceil(10) * columns * 4,
                _ => rows * columns * bits / 8,
            };
            let codes = noise(size, 50 + bits as u32);
            let (entries, scales, zeros) = file(packing, axis, group, &codes);
            // Of 8 bits, 8 to a group, numbers take less memory.
            let format = format.filter(|_| (bits, axis, group) != (8, 1, 8));
            let format = format.map_or("F32".to_owned(), |group| format!("affine {bits}-bit {group}"));
            check(&json!({"quant_method": "hqq"}), &entries, &format, &[N, K], |row, k| {
                let index = row * K + k;
                let of = if axis == 1 { index / group } else { index % groups };
                (code(packing, &codes, (rows, columns), index) - zeros[of]) * scales[of]
            });
        }
    }
}

/// Whatever tensors of floats the bytes are seen as.
#[test]
fn codes_may_be_viewed_as_floats() {
    let case = case_of("hqq");
    let codes = noise(512, 37);
    let viewed = with(&case.entries, &[entry("m.W_q", "F16", &[8, 32], codes)]);
    let numbers = |entries: &[Entry]| crate::hf::dequantized(&case.quantization, entries).2;
    assert_eq!(numbers(&viewed), numbers(&case.entries));
}

#[test]
fn settings_fit_the_codes() {
    let scalar = |name: &str, number: i32| entry(name, "I32", &[], number.to_le_bytes());
    let packing = |name: &str| entry("m.packing", "U8", &[name.len()], name.as_bytes());
    let shape = |n: i64, k: i64| entry("m.shape", "I64", &[2], [n, k].map(i64::to_le_bytes).concat());
    for (change, parts) in [
        (scalar("m.axis", 2), ["`m.axis`", "0 or 1", "2"]),
        (scalar("m.axis", 0), ["`m.scale`", "shape [1, 16]", "[16, 1]"]),
        (scalar("m.group_size", 0), ["`m.group_size`", "whole groups of [8, 128]", "groups of 0"]),
        (scalar("m.group_size", -64), ["`m.group_size`", "whole groups", "groups of -64"]),
        (scalar("m.group_size", 48), ["`m.group_size`", "whole groups", "groups of 48"]),
        (scalar("m.group_size", 32), ["`m.scale`", "shape [32, 1]", "[16, 1]"]),
        (packing("5bit_u8"), ["`m.packing`", "1bit_u8", "5bit_u8"]),
        (packing("a name that is longer"), ["`m.packing`", "1bit_u8", "found"]),
        (packing("2bit_u8"), ["`m.W_q`", "256 bytes", "512 bytes"]),
        (shape(16, 128), ["`m.W_q`", "1024 bytes", "512 bytes"]),
        (shape(-8, 128), ["`m.shape`", "[N, K]", "-8"]),
        (shape(i64::MAX, i64::MAX), ["`m.shape`", "[N, K]", "found"]),
        (entry("m.shape", "I64", &[3], [0; 24]), ["`m.shape`", "shape [2]", "[3]"]),
        (entry("m.axis", "I32", &[2], [0; 8]), ["`m.axis`", "one number", "2 numbers"]),
        (entry("m.W_q", "I8", &[512], [0; 512]), ["`m.W_q`", "U8", "I8"]),
        (f32s("m.zero", &[16], &[0.; 16]), ["`m.zero`", "shape [16, 1]", "[16]"]),
    ] {
        rejected(weight_with("hqq", &[change]), &[&[FILE][..], &parts].concat());
    }
    let case = case_of("hqq");
    for part in ["scale", "zero", "shape", "axis", "group_size", "packing"] {
        let name = format!("m.{part}");
        let entries = without(&case.entries, &name);
        rejected(weight(&case.quantization, &entries), &[FILE, &format!("`{name}`"), "beside `m.W_q`"]);
    }
    // What stands beside the codes are no tensors of the model.
    let checkpoint = open(&case.quantization, &case.entries).unwrap();
    assert!(checkpoint.tensor_names().eq(["m.weight"]));
}
