//! Rows of bitsandbytes and of compressed-tensors that are no whole groups, against their definitions, bit for bit.

use crate::checkpoint::{rejected, warned};
use crate::column_order::{near, product, x};
use crate::hf::{compressed, entry, f32s, noise, open, weight, with, Entry, NF4};
use crate::rules::FILE;
use candle_core::{DType, Device, Module};
use candle_quant::checkpoint::Weight;
use candle_quant::nn::LayerWeight;
use candle_quant::Linear;
use half::f16;
use serde_json::{json, Value};

/// bitsandbytes' values of FP4: of each sign, in the order of their codes.
const FP4: [f32; 8] = [0., 1. / 192., 2. / 3., 1., 1. / 3., 0.5, 1. / 6., 0.25];

fn values(quant_type: &str) -> [f32; 16] {
    match quant_type {
        "nf4" => NF4,
        // Zero has no sign.
        _ => std::array::from_fn(|code| if code > 8 { -FP4[code % 8] } else { FP4[code % 8] }),
    }
}

/// A weight of 4 bits and its numbers: element `i` of the flattened matrix has the magnitude of block `i / block`.
fn four_bits(quant_type: &str, [n, k]: [usize; 2], block: usize, nested: bool) -> (Vec<Entry>, Vec<f32>) {
    let elements = n * k;
    let (bytes, blocks) = (noise(elements.div_ceil(2), n as u32), elements.div_ceil(block));
    let state = json!({
        "quant_type": quant_type, "blocksize": block, "dtype": "float16", "shape": [n, k],
        "nested_blocksize": 3, "nested_offset": 0.37,
    });
    let state = state.to_string().into_bytes();
    let mut entries = vec![
        entry("m.weight", "U8", &[bytes.len(), 1], bytes.clone()),
        f32s("m.weight.quant_map", &[16], &values(quant_type)),
        entry(&format!("m.weight.quant_state.bitsandbytes__{quant_type}"), "U8", &[state.len()], state),
    ];
    let magnitudes: Vec<f32> = match nested {
        false => {
            let magnitudes: Vec<f32> = (0..blocks).map(|block| 0.3 + 0.013 * block as f32).collect();
            entries.push(f32s("m.weight.absmax", &[blocks], &magnitudes));
            magnitudes
        }
        true => {
            let codes = noise(blocks, 77);
            let map: Vec<f32> = (0..256).map(|code| code as f32 / 128. - 1.).collect();
            let scales: Vec<f32> = (0..blocks.div_ceil(3)).map(|at| 0.2 + 0.01 * at as f32).collect();
            entries.push(entry("m.weight.absmax", "U8", &[blocks], codes.clone()));
            entries.push(f32s("m.weight.nested_absmax", &[scales.len()], &scales));
            entries.push(f32s("m.weight.nested_quant_map", &[256], &map));
            let magnitude = |(at, code): (usize, &u8)| map[usize::from(*code)] * scales[at / 3] + 0.37;
            codes.iter().enumerate().map(magnitude).collect()
        }
    };
    let code = |at: usize| usize::from(bytes[at / 2] >> (4 - at % 2 * 4) & 15);
    let numbers = (0..elements).map(|at| values(quant_type)[code(at)] * magnitudes[at / block]).collect();
    (entries, numbers)
}

fn bitsandbytes() -> Value {
    json!({"quant_method": "bitsandbytes"})
}

/// bitsandbytes' rows of bytes, of which each has the largest magnitude.
fn eight_bits(n: usize, k: usize) -> (Value, Vec<Entry>, Vec<f32>) {
    let codes = noise(n * k, 5);
    let largest: Vec<f32> = (0..n).map(|row| 0.2 + 0.1 * row as f32).collect();
    let entries = vec![entry("m.weight", "I8", &[n, k], codes.clone()), f32s("m.SCB", &[n], &largest)];
    let number = |at: usize| f32::from(codes[at] as i8) * (largest[at / k] * (1. / 127.));
    (bitsandbytes(), entries, (0..n * k).map(number).collect())
}

/// Integers of compressed-tensors in bytes, with a scale for each row or one for all, and zero points.
fn integers(n: usize, k: usize, strategy: &str, zeros: bool) -> (Value, Vec<Entry>, Vec<f32>) {
    let codes = noise(n * k, 6);
    let (count, dims) = if strategy == "tensor" { (1, vec![1]) } else { (n, vec![n, 1]) };
    let scales: Vec<f16> = (0..count).map(|row| f16::from_f32(0.01 + 0.003 * row as f32)).collect();
    let points: Vec<u8> = (0..count).map(|row| if zeros { (row * 37 + 250) as u8 } else { 0 }).collect();
    let bytes: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
    let mut entries =
        vec![entry("m.weight", "I8", &[n, k], codes.clone()), entry("m.weight_scale", "F16", &dims, bytes)];
    if zeros {
        entries.push(entry("m.weight_zero_point", "I8", &dims, points.clone()));
    }
    let weights = json!({"num_bits": 8, "type": "int", "strategy": strategy, "symmetric": !zeros});
    let number = |at: usize| {
        let row = at / k % count;
        let code = i32::from(codes[at] as i8) - i32::from(points[row] as i8);
        code as f32 * scales[row].to_f32()
    };
    (compressed("int-quantized", weights), entries, (0..n * k).map(number).collect())
}

/// Settings, tensors, the numbers that they are, the format, and the shape.
type Stored = (Value, Vec<Entry>, Vec<f32>, &'static str, [usize; 2]);

/// The same in words, with half the range added.
fn packed(
    (mut quantization, mut entries, numbers): (Value, Vec<Entry>, Vec<f32>),
) -> (Value, Vec<Entry>, Vec<f32>) {
    quantization["format"] = json!("pack-quantized");
    let (dims, codes) =
        (entries[0].2.clone(), entries[0].3.iter().map(|code| code ^ 0x80).collect::<Vec<_>>());
    entries[0] = entry("m.weight_packed", "I32", &[dims[0], dims[1] / 4], codes);
    (quantization, entries, numbers)
}

fn cases() -> Vec<Stored> {
    let of_blocks = |kind: &str, dims, block, nested, format| {
        let (entries, numbers) = four_bits(kind, dims, block, nested);
        (bitsandbytes(), entries, numbers, format, dims)
    };
    let of_rows =
        |(quantization, entries, numbers), format, dims| (quantization, entries, numbers, format, dims);
    vec![
        of_blocks("nf4", [24, 128], 32, false, "nf4, filled"),
        of_blocks("nf4", [24, 96], 64, true, "nf4, filled"),
        of_blocks("fp4", [24, 32], 64, false, "fp4, filled"),
        of_blocks("nf4", [24, 48], 64, false, "nf4, filled"),
        of_blocks("fp4", [24, 4304 / 16], 4304 / 16 * 2, true, "fp4, filled"),
        of_blocks("nf4", [25, 75], 25, true, "nf4, filled"),
        of_blocks("nf4", [24, 50], 4096, false, "F32"),
        of_blocks("nf4", [25, 35], 64, true, "F32"),
        of_blocks("fp4", [3, 1], 64, false, "F32"),
        of_rows(eight_bits(24, 80), "symmetric 8-bit g32, filled", [24, 80]),
        of_rows(eight_bits(25, 250), "symmetric 8-bit g128, filled", [25, 250]),
        of_rows(eight_bits(7, 9), "symmetric 8-bit g32, filled", [7, 9]),
        of_rows(integers(24, 80, "channel", false), "symmetric 8-bit g32, filled", [24, 80]),
        of_rows(packed(integers(24, 80, "channel", false)), "symmetric 8-bit g32, filled", [24, 80]),
        of_rows(packed(integers(25, 52, "channel", false)), "symmetric 8-bit g64, filled", [25, 52]),
        of_rows(packed(integers(24, 96, "tensor", false)), "symmetric 8-bit g32", [24, 96]),
        of_rows(integers(25, 49, "channel", true), "affine 8-bit g64, filled", [25, 49]),
        of_rows(integers(25, 49, "tensor", true), "affine 8-bit g64, filled", [25, 49]),
        of_rows(integers(24, 49, "tensor", false), "symmetric 8-bit g64, filled", [24, 49]),
        of_rows(integers(24, 192, "tensor", false), "symmetric 8-bit g64", [24, 192]),
        of_rows(integers(24, 192, "tensor", true), "affine 8-bit g64", [24, 192]),
        of_rows(integers(1, 192, "tensor", true), "affine 8-bit g64", [1, 192]),
    ]
}

fn bits(weight: &Weight) -> Vec<u32> {
    let tensor = weight.to_dense(DType::F32, &Device::Cpu).unwrap();
    assert_eq!(tensor.dims(), weight.dims());
    tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

#[test]
fn numbers_are_those_of_the_definition() {
    for (quantization, entries, numbers, format, dims) in cases() {
        let found = weight(&quantization, &entries).unwrap();
        assert_eq!((found.format_name().as_str(), found.dims()), (format, &dims[..]));
        let expected: Vec<_> = numbers.iter().map(|number| number.to_bits()).collect();
        assert!(bits(&found) == expected, "{format} {dims:?}");
    }
}

/// A part begins and ends anywhere, also within a byte, unless rows are whole groups.
#[test]
fn parts_are_parts_of_the_numbers() {
    for (quantization, entries, numbers, format, [n, k]) in cases() {
        let whole = weight(&quantization, &entries).unwrap();
        let unit = whole.granularity();
        assert!(unit == 1 || k % unit == 0, "{format}");
        for (columns, rows) in
            [(0..k, 1..n / 2), (k / 3..k, 0..n), (k / 3..k / 2 + 1, n / 3..n), (0..k, n - 1..n)]
        {
            let columns = columns.start / unit * unit..columns.end.next_multiple_of(unit);
            if rows.is_empty() {
                continue;
            }
            let of_row = |row: usize| numbers[row * k + columns.start..row * k + columns.end].iter();
            let expected: Vec<_> = rows.clone().flat_map(of_row).map(|number| number.to_bits()).collect();
            let part = whole.narrow(1, columns.clone()).unwrap().narrow(0, rows.clone()).unwrap();
            assert!(bits(&part) == expected, "{format} [{n}, {k}] {columns:?} {rows:?}");
            let part = whole.narrow(0, rows.clone()).unwrap().narrow(1, columns.clone()).unwrap();
            assert!(bits(&part) == expected, "{format} [{n}, {k}] {columns:?} {rows:?}");
            if format != "F32" {
                let loaded = part.load(&Device::Cpu).unwrap();
                assert_eq!(
                    part.loaded_bytes(),
                    loaded.size_in_bytes() as u64,
                    "{format} {columns:?} {rows:?}"
                );
                // Beside 16-bit scales symmetric codes are loaded as affine ones.
                let of = |name: &str| {
                    name.trim_start_matches("symmetric ").trim_start_matches("affine ").to_owned()
                };
                assert_eq!(of(&part.format_name()), of(&loaded.format_name()));
            }
            // A part of a part.
            let again = part.narrow(0, rows.len() - 1..rows.len()).unwrap();
            assert!(
                bits(&again) == expected[expected.len() - columns.len()..],
                "{format} {columns:?} {rows:?}"
            );
        }
    }
}

#[test]
fn layers_multiply_by_the_numbers() {
    for (index, (quantization, entries, _, format, [_, k])) in cases().into_iter().enumerate() {
        let stored = weight(&quantization, &entries).unwrap();
        let numbers = stored.to_dense(DType::F32, &Device::Cpu).unwrap();
        let layer = Linear::new(stored.load(&Device::Cpu).unwrap(), None);
        let is_filled = matches!(layer.weight(), LayerWeight::Reordered(_));
        assert_eq!(is_filled, format.ends_with("filled"), "{format}");
        for rows in [1, 7, 40] {
            let x = x(&[rows, k], index, DType::F32);
            near(&layer.forward(&x).unwrap(), &product(&x, &numbers), 1e-5);
        }
    }
}

#[test]
fn what_is_dequantized_is_said() {
    let (entries, _) = four_bits("nf4", [25, 35], 64, false);
    let checkpoint = open(&bitsandbytes(), &entries).unwrap();
    checkpoint.weight("m", None).unwrap();
    warned(&checkpoint, &[FILE, "`m`", "bitsandbytes", "dequantized"]);
    for (quantization, entries, _, format, _) in cases().into_iter().filter(|case| case.3 != "F32") {
        let checkpoint = open(&quantization, &entries).unwrap();
        checkpoint.weight("m", None).unwrap();
        assert_eq!(checkpoint.warnings(), [""; 0], "{format}");
    }
}

/// Zero points that move nothing stand beside symmetric codes in old files; others contradict the config.
#[test]
fn zero_points_of_symmetric_codes_are_zero() {
    for (strategy, k) in [("channel", 128), ("channel", 80), ("tensor", 128)] {
        let (quantization, entries, numbers) = integers(24, k, strategy, false);
        let dims = entries[1].2.clone();
        let mut points = vec![0; dims.iter().product()];
        let zeros = entry("m.weight_zero_point", "I8", &dims, points.clone());
        let expected: Vec<_> = numbers.iter().map(|number| number.to_bits()).collect();
        assert!(
            bits(&weight(&quantization, &with(&entries, &[zeros])).unwrap()) == expected,
            "{strategy} {k}"
        );
        *points.last_mut().unwrap() = 1;
        let others = entry("m.weight_zero_point", "I8", &dims, points);
        let result = weight(&quantization, &with(&entries, &[others]));
        rejected(result, &[FILE, "`m.weight_zero_point`", "no such tensor", "symmetric"]);
    }
}
