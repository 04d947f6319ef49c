//! Layouts of integers with zeros, and of bitsandbytes, against their definitions, computed in f64 from the bytes of the file.

use crate::checkpoint::rejected;
use crate::hf::{
    case_of, compressed, dequantized, entry, f32s, noise, state, values, weight, with, without, Case, Entry,
    NF4,
};
use crate::layouts::{bytes, check, nibble};
use candle_core::{DType, Device};
use half::f16;
use serde_json::{json, Value};

/// Code `index` of a stream of bits.
fn code(bytes: &[u8], bits: usize, index: usize) -> u32 {
    let bit = |at: usize| u32::from(bytes[at / 8] >> (at % 8) & 1);
    (0..bits).map(|at| bit(index * bits + at) << at).sum()
}

/// The words of column `column` of `columns`, as one stream.
fn column(words: &[u8], columns: usize, column: usize) -> Vec<u8> {
    words.chunks_exact(4).skip(column).step_by(columns).flatten().copied().collect()
}

fn f16s(count: usize) -> (Vec<u8>, Vec<f64>) {
    let scales: Vec<f16> = (0..count).map(|index| f16::from_f32(0.011 * (1. + index as f32 % 13.))).collect();
    let bytes = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
    (bytes, scales.into_iter().map(f16::to_f64).collect())
}

/// Every width, groups in the file and here, and both meanings of zeros; all numbers are exact.
#[test]
fn gptq_columns_and_zeros_are_streams() {
    let (n, k) = (64, 256);
    for (bits, stored, group_size) in
        [(2, 64, 64), (3, 32, 32), (4, 128, 128), (8, 256, 128), (4, 64, 64), (3, 256, 128)]
    {
        let (groups, row) = (k / stored, n * bits / 8);
        let (bytes, scales) = f16s(groups * n);
        // Of a v1 file no zero is the largest code: counting it up would run over.
        let zero = |index: usize| (index * 7 + 3) as u32 % ((1 << bits) - 1);
        let mut zeros = vec![0u8; groups * row];
        for (index, at) in (0..groups * n * bits).map(|at| (at / bits, at)) {
            zeros[at / 8] |= (zero(index) >> (at % bits) & 1) as u8 * (1 << (at % 8));
        }
        let entries = [
            entry("m.qweight", "I32", &[k * bits / 32, n], noise(k * n * bits / 8, 20)),
            entry("m.qzeros", "I32", &[groups, row / 4], zeros),
            entry("m.scales", "F16", &[groups, n], bytes),
        ];
        let format = format!("affine {bits}-bit g{group_size}");
        for (checkpoint_format, one) in [("gptq", 1.), ("gptq_v2", 0.)] {
            for symmetric in [true, false] {
                let quantization = json!({
                    "quant_method": "gptq", "bits": bits, "group_size": stored, "sym": symmetric,
                    "checkpoint_format": checkpoint_format,
                });
                let columns: Vec<_> = (0..n).map(|row| column(&entries[0].3, n, row)).collect();
                check(&quantization, &entries, &format, &[n, k], |row, k| {
                    let group = k / stored * n + row;
                    let zero = f64::from(zero(group)) + one;
                    (f64::from(code(&columns[row], bits, k)) - zero) * scales[group]
                });
            }
        }
    }
}

/// GPTQModel counts whole words down, so that a zero of 0 borrows from its neighbour.
#[test]
fn zeros_of_gptq_are_counted_up_word_by_word() {
    let quantization = json!({"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": false});
    let zeros = 0x7650_4310u32.wrapping_sub(0x1111_1111);
    let entries = [
        entry("m.qweight", "I32", &[4, 8], vec![0; 128]),
        entry("m.qzeros", "I32", &[1, 1], zeros.to_le_bytes()),
        entry("m.scales", "F16", &[1, 8], f16::ONE.to_le_bytes().repeat(8)),
    ];
    let expected = [0., 1., 3., 4., 0., 5., 6., 7.];
    check(&quantization, &entries, "affine 4-bit g32", &[8, 32], |row, _| -expected[row]);
}

/// Zero points are a stream along N; scales of groups larger than those here are repeated.
#[test]
fn compressed_tensors_zero_points_are_streams() {
    let (n, k) = (40usize, 256usize);
    for (bits, stored, strategy, group_size) in [
        (4, 64, "group", 64),
        (8, 32, "group", 32),
        (8, 256, "channel", 128),
        (4, 256, "group", 128),
        (2, 32, "group", 32),
        (3, 64, "group", 64),
        (5, 128, "group", 128),
        (6, 256, "channel", 128),
    ] {
        let (groups, words) = (k / stored, (n * bits).div_ceil(32));
        let (scale_bytes, scales) = f16s(n * groups);
        let size = if strategy == "channel" { json!(null) } else { json!(stored) };
        let weights = json!({
            "num_bits": bits, "type": "int", "symmetric": false, "strategy": strategy, "group_size": size,
        });
        let entries = [
            entry("m.weight_packed", "I32", &[n, k * bits / 32], noise(n * k * bits / 8, 25)),
            entry("m.weight_scale", "F16", &[n, groups], scale_bytes),
            entry("m.weight_zero_point", "I32", &[words, groups], noise(words * groups * 4, 26)),
        ];
        let zeros: Vec<_> = (0..groups).map(|group| column(&entries[2].3, groups, group)).collect();
        let format = format!("affine {bits}-bit g{group_size}");
        check(&compressed("pack-quantized", weights), &entries, &format, &[n, k], |row, column| {
            let zero = f64::from(code(&zeros[column / stored], bits, row));
            (f64::from(code(&entries[0].3, bits, row * k + column)) - zero)
                * scales[row * groups + column / stored]
        });
    }
}

/// Symmetric codes have half their range added.
#[test]
fn compressed_tensors_codes_have_two_to_eight_bits() {
    let (n, k) = (8usize, 128usize);
    for bits in [2, 3, 4, 5, 6, 8] {
        let weights = json!({"num_bits": bits, "type": "int", "strategy": "group", "group_size": 64});
        let (scale_bytes, scales) = f16s(n * 2);
        let entries = [
            entry("m.weight_packed", "I32", &[n, k * bits / 32], noise(n * k * bits / 8, 28)),
            entry("m.weight_scale", "F16", &[n, 2], scale_bytes),
        ];
        let format = format!("symmetric {bits}-bit g64");
        check(&compressed("pack-quantized", weights), &entries, &format, &[n, k], |row, column| {
            let code = f64::from(code(&entries[0].3, bits, row * k + column));
            (code - f64::from(1 << (bits - 1))) * scales[row * 2 + column / 64]
        });
    }
}

/// Codes of fewer bits are bytes, too.
#[test]
fn compressed_tensors_bytes_are_signed_whatever_their_bits() {
    let Case { entries, .. } = case_of("int-quantized");
    let codes: Vec<u8> = (0..1024).map(|index| (index % 16 - 8) as u8).collect();
    let (scale_bytes, scales) = f16s(16);
    let entries = with(
        &entries,
        &[
            entry("m.weight", "I8", &[8, 128], codes.clone()),
            entry("m.weight_scale", "F16", &[8, 2], scale_bytes),
        ],
    );
    let weights = json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64});
    check(&compressed("int-quantized", weights), &entries, "symmetric 8-bit g64", &[8, 128], |row, k| {
        f64::from(codes[row * 128 + k] as i8) * scales[row * 2 + k / 64]
    });
}

#[test]
fn compressed_tensors_bytes_are_signed() {
    let Case { quantization, entries, .. } = case_of("int-quantized");
    let codes = bytes(&entries, "m.weight");
    let (scale_bytes, scales) = f16s(8);
    let scale = entry("m.weight_scale", "F16", &[8, 1], scale_bytes);
    let entries = with(&entries, &[scale]);
    check(&quantization, &entries, "symmetric 8-bit g128", &[8, 128], |row, k| {
        f64::from(codes[row * 128 + k] as i8) * scales[row]
    });
    let weights = json!({"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": false});
    let zeros = noise(8, 27);
    let entries = with(&entries, &[entry("m.weight_zero_point", "I8", &[8, 1], zeros.clone())]);
    check(
        &compressed("int-quantized", weights.clone()),
        &entries,
        "affine 8-bit g128",
        &[8, 128],
        |row, k| (f64::from(codes[row * 128 + k] as i8) - f64::from(zeros[row] as i8)) * scales[row],
    );

    // Beside F32 scales product and zero point are rounded, each once, and so is their sum.
    let scales: Vec<f32> = (0..8).map(|row| 0.0123 * (row as f32 + 1.)).collect();
    let entries = with(&entries, &[f32s("m.weight_scale", &[8, 1], &scales)]);
    let (_, _, values) = dequantized(&compressed("int-quantized", weights), &entries);
    for (index, value) in values.iter().enumerate() {
        let (row, k) = (index / 128, index % 128);
        let (code, zero) = (f64::from(codes[row * 128 + k] as i8), f64::from(zeros[row] as i8));
        let exact = (code - zero) * f64::from(scales[row]);
        let bound = f64::from(scales[row]) * 3. * 255. * 2f64.powi(-24);
        assert!((f64::from(*value) - exact).abs() <= bound, "{index}: {value} instead of {exact}");
    }
}

/// Blocks of the flattened matrix, in rows and across them; magnitudes as numbers and as codes.
#[test]
fn bitsandbytes_blocks_are_of_all_elements() {
    let Case { quantization, entries, .. } = case_of("bitsandbytes 4");
    let (codes, nested) = (bytes(&entries, "m.weight"), bytes(&entries, "m.weight.absmax"));
    // The first of two is in the high bits.
    let element = |index: usize| f64::from(NF4[usize::from(codes[index / 2] >> (4 - index % 2 * 4) & 15)]);
    check(&quantization, &entries, "nf4", &[8, 128], |row, k| {
        let scale = [0.1f32, 0.2, 0.3, 0.4][row / 2];
        let magnitude = (f32::from(nested[row]) / 64. - 1.) * scale + 0.015625;
        element(row * 128 + k) * f64::from(magnitude)
    });
    for (block, n, k) in
        [(64, 8, 128), (256, 8, 128), (128, 16, 64), (192, 8, 128), (1024, 4, 256), (2048, 2, 512)]
    {
        let blocks = usize::div_ceil(n * k, block);
        let magnitudes: Vec<f32> = (0..blocks).map(|block| 0.3 + 0.1 * block as f32).collect();
        let plain = [
            entry("m.weight", "BF16", &[256, 1], codes),
            f32s("m.weight.absmax", &[blocks], &magnitudes),
            f32s("m.weight.quant_map", &[16], &NF4),
            state(&json!({"quant_type": "nf4", "blocksize": block, "dtype": "float16", "shape": [n, k]})),
        ];
        check(&quantization, &plain, "nf4", &[n, k], |row, column| {
            let index = row * k + column;
            element(index) * f64::from(magnitudes[index / block])
        });
    }
}

/// One rounding of the scale and one of the product.
#[test]
fn bitsandbytes_rows_have_magnitudes() {
    let Case { quantization, entries, .. } = case_of("bitsandbytes 8");
    let codes = bytes(&entries, "m.weight");
    let largest = [0.1f32, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8];
    check(&quantization, &entries, "symmetric 8-bit g128", &[8, 128], |row, k| {
        f64::from(codes[row * 128 + k] as i8) * f64::from(largest[row] * (1. / 127.))
    });
}

/// Codes and zeros are in order, behind the zeros and scales of each row is room for more.
#[test]
fn awq_gemv_has_rows() {
    for (size, group_size, n, k, room) in
        [(64, 64, 5, 128, 16), (32, 32, 3, 1056, 64), (128, 128, 2, 128, 8), (-1, 128, 2, 256, 8)]
    {
        let stored = usize::try_from(size).unwrap_or(k);
        let quantization = json!({"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemv"});
        let (scale_bytes, scales) = f16s(n * room);
        let entries = [
            entry("m.qweight", "I32", &[n, k / 8], noise(n * k / 2, 31)),
            entry("m.qzeros", "I32", &[n, room / 8], noise(n * room / 2, 32)),
            entry("m.scales", "F16", &[n, room], scale_bytes),
        ];
        let format = format!("affine 4-bit g{group_size}");
        check(&quantization, &entries, &format, &[n, k], |row, column| {
            let group = row * room + column / stored;
            let code = f64::from(nibble(&entries[0].3, row * k + column));
            (code - f64::from(nibble(&entries[1].3, group))) * scales[group]
        });
    }
}

/// A "gemm" checkpoint of AutoAWQ, and its scales; a size of -1 is one group for a row of the weight.
fn awq_gemm(size: i32, n: usize, k: usize) -> (Value, [Entry; 3], Vec<f64>) {
    let groups = k / usize::try_from(size).unwrap_or(k);
    let quantization = json!({"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm"});
    let (scale_bytes, scales) = f16s(groups * n);
    let entries = [
        entry("m.qweight", "I32", &[k, n / 8], noise(k * n / 2, 35)),
        entry("m.qzeros", "I32", &[groups, n / 8], noise(groups * n / 2, 36)),
        entry("m.scales", "F16", &[groups, n], scale_bytes),
    ];
    (quantization, entries, scales)
}

/// Sizes of groups in the file, with K and the size of groups here.
const AWQ_GEMM: [(i32, usize, usize); 8] = [
    (32, 256, 32),
    (128, 256, 128),
    (256, 256, 128),
    (-1, 256, 128),
    (-1, 192, 64),
    (-1, 96, 32),
    (96, 288, 32),
    (256, 768, 128),
];

/// Groups larger than those here are repeated, with zeros and without.
#[test]
fn awq_gemm_has_groups_of_any_size() {
    let n = 24;
    for (size, k, group_size) in AWQ_GEMM {
        let (mut quantization, entries, scales) = awq_gemm(size, n, k);
        let stored = usize::try_from(size).unwrap_or(k);
        let code = |words: &[u8], row: usize, column: usize| {
            let place = [0, 4, 1, 5, 2, 6, 3, 7][column % 8];
            f64::from(nibble(words, row * n + column / 8 * 8 + place))
        };
        let format = format!("affine 4-bit g{group_size}");
        check(&quantization, &entries, &format, &[n, k], |row, k| {
            (code(&entries[0].3, k, row) - code(&entries[1].3, k / stored, row))
                * scales[k / stored * n + row]
        });
        quantization["zero_point"] = json!(false);
        let format = format!("symmetric 4-bit g{group_size}");
        check(&quantization, &without(&entries, "m.qzeros"), &format, &[n, k], |row, k| {
            (code(&entries[0].3, k, row) - 8.) * scales[k / stored * n + row]
        });
    }
}

/// Parts of K have the groups that they touch, and rows the words that they are in.
#[test]
fn parts_of_awq_gemm_are_parts_of_the_numbers() {
    let n = 24;
    for ((size, k, unit), zero_point) in AWQ_GEMM.into_iter().flat_map(|of| [(of, true), (of, false)]) {
        let (mut quantization, entries, _) = awq_gemm(size, n, k);
        let stored = usize::try_from(size).unwrap_or(k);
        quantization["zero_point"] = json!(zero_point);
        let entries = if zero_point { entries.to_vec() } else { without(&entries, "m.qzeros") };
        let whole = weight(&quantization, &entries).unwrap();
        assert_eq!(whole.granularity(), unit, "{size} of {k}");
        let numbers = whole.to_dense(DType::F32, &Device::Cpu).unwrap();
        let ranges = (0..k).step_by(unit).flat_map(|from| [from..from + unit, from..k, 0..from + unit]);
        for (columns, rows) in
            ranges.flat_map(|of_k| [0..n, 8..16, 3..9, 23..24].map(|of| (of_k.clone(), of)))
        {
            let at = format!("{size} of {k}, zeros {zero_point}: {columns:?} of {rows:?}");
            let expected = numbers.narrow(1, columns.start, columns.len()).unwrap();
            let expected = values(&expected.narrow(0, rows.start, rows.len()).unwrap());
            let columns_first = whole.narrow(1, columns.clone()).unwrap().narrow(0, rows.clone()).unwrap();
            let rows_first = whole.narrow(0, rows.clone()).unwrap().narrow(1, columns.clone()).unwrap();
            // A part of a part, whose first group may have begun before both.
            let twice = whole.narrow(1, columns.start..k).unwrap().narrow(1, 0..columns.len()).unwrap();
            for part in [columns_first, rows_first, twice.narrow(0, rows.clone()).unwrap()] {
                assert_eq!(part.dims(), [rows.len(), columns.len()], "{at}");
                assert!(values(&part.to_dense(DType::F32, &Device::Cpu).unwrap()) == expected, "{at}");
                let eights = rows.end.div_ceil(8) - rows.start / 8;
                let groups = columns.end.div_ceil(stored) - columns.start / stored;
                let zeros = if zero_point { groups * eights * 4 } else { 0 };
                let bytes = columns.len() * eights * 4 + groups * eights * 8 * 2 + zeros;
                assert_eq!(part.size_in_bytes(), bytes, "{at}");
                let loaded = part.load(&Device::Cpu).unwrap();
                assert_eq!(part.loaded_bytes(), loaded.size_in_bytes() as u64, "{at}");
            }
        }
        let half = unit / 2;
        let units = format!("multiples of {unit}");
        rejected(whole.narrow(1, 0..half).map(|_| ()), &["`m`", &units, &format!("0..{half}")]);
    }
}

/// Beside F32 scales symmetric codes have no biases, and others have F32 ones.
#[test]
fn awq_gemm_tells_the_memory_of_f32_scales() {
    let (mut quantization, entries, scales) = awq_gemm(-1, 24, 256);
    let scales: Vec<f32> = scales.into_iter().map(|scale| scale as f32).collect();
    let entries = with(&entries, &[f32s("m.scales", &[1, 24], &scales)]);
    for (zero_point, of_group) in [(true, 8), (false, 4)] {
        quantization["zero_point"] = json!(zero_point);
        let entries = if zero_point { entries.clone() } else { without(&entries, "m.qzeros") };
        let part = weight(&quantization, &entries).unwrap().narrow(0, 3..9).unwrap();
        let bytes = part.load(&Device::Cpu).unwrap().size_in_bytes();
        assert_eq!((part.loaded_bytes(), bytes), (bytes as u64, 6 * 256 / 2 + 6 * 2 * of_group));
    }
}

/// By the steps of AutoAWQ's `pack_intweight`.
#[test]
fn awq_gemv_fast_has_four_rows_beside_each_other() {
    let (n, k, room) = (12, 192, 16);
    let quantization = json!({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv_fast"});
    let ((scale_bytes, scales), biases) = (f16s(room * n), noise(room * n, 34));
    let biases: Vec<f16> = biases.iter().map(|byte| f16::from_f32(f32::from(*byte) / -64.)).collect();
    let codes: Vec<u8> = noise(n * k, 33).iter().map(|byte| byte & 15).collect();
    let mut packed = vec![0u8; n * k / 2];
    for (index, code) in codes.iter().enumerate() {
        let (row, column) = (index / k, index % k);
        // 32 columns as [4, 4, 2] to [1, 0, 2]; then eights as [4, 2] transposed.
        let (a, b, c) = (column % 32 / 8, column % 8 / 2, column % 2);
        let within = b * 8 + c * 4 + a;
        // [N/4, 4, K/64, 64] to [0, 2, 1, 3].
        let place = ((row / 4 * (k / 64) + column / 64) * 4 + row % 4) * 64 + column % 64 / 32 * 32 + within;
        packed[place / 2] |= code << (place % 2 * 4);
    }
    let entries = [
        entry("m.qweight", "I16", &[n / 4, k], packed),
        entry("m.scales", "F16", &[room, n], scale_bytes),
        entry(
            "m.qzeros",
            "F16",
            &[room, n],
            biases.iter().flat_map(|bias| bias.to_le_bytes()).collect::<Vec<_>>(),
        ),
    ];
    check(&quantization, &entries, "affine 4-bit g64", &[n, k], |row, column| {
        let group = column / 64 * n + row;
        f64::from((f64::from(codes[row * k + column]) * scales[group]) as f32) + biases[group].to_f64()
    });
}
