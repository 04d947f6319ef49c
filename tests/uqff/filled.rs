//! Rows that are no whole groups, and groups across rows: against their definitions, in whole and in parts.

use crate::uqff::{entry, f32s, layer, u32, u32s, u8, weight_of, with, Entry};
use candle_core::{DType, Device, Module, Tensor};
use candle_quant::checkpoint::Weight;
use candle_quant::Linear;

fn bytes(count: usize) -> Vec<u8> {
    (0..count).map(|at| (at * 89 + at / 7) as u8).collect()
}

fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match exponent {
        0 => mantissa * 2f32.powi(-9),
        _ => (1. + mantissa / 8.) * 2f32.powi(exponent - 7),
    };
    if code & 128 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

/// Entries, what the weight is called, its shape, and its numbers.
struct Case(Vec<Entry>, &'static str, [usize; 2], Vec<f32>);

/// Blocks of 32 of `[4, 48]`, each a scale and signed codes.
fn f8q8() -> Case {
    let mut blocks = bytes(6 * 33);
    blocks.chunks_mut(33).zip(0x20..).for_each(|(block, scale)| block[0] = scale);
    let of_block = |block: &[u8]| {
        let scale = e4m3(block[0]) / 416.;
        block[1..].iter().map(|code| f32::from(code.cast_signed()) * scale).collect::<Vec<_>>()
    };
    let numbers = blocks.chunks(33).flat_map(of_block).collect();
    let changes = [
        entry("m.weight", "U8", &[6 * 33], blocks),
        u32("m.weight.num_blocks", 6),
        u32s("m.weight.shape", &[4, 48]),
    ];
    Case(with(&layer("F8Q8"), &changes), "symmetric 8-bit g32, filled", [4, 48], numbers)
}

fn fp8(k: usize, scale: f32, format: &'static str) -> Case {
    let codes: Vec<u8> =
        bytes(6 * k).into_iter().map(|code| if code & 127 == 127 { 1 } else { code }).collect();
    let numbers = codes.iter().map(|code| e4m3(*code) * scale).collect();
    let changes =
        [entry("m.weight", "F8_E4M3", &[6, k], codes), f32s("m.weight.dequant_w_scale", &[], &[scale])];
    Case(with(&layer("FP8"), &changes), format, [6, k], numbers)
}

/// Element `i` belongs to group `i mod G`; the highest bits of all bytes, or of all words of ten 3-bit codes, are the first part.
/// As `HqqBits::bitpack_type` of mistral.rs packs them (mistralrs-quant/src/hqq/mod.rs), and its `Dequant3Bit` and others unpack them.
fn hqq([n, k]: [usize; 2], bits: u8, group: usize, format: &'static str) -> Case {
    let groups = n * k / group;
    let (dtype, rows, size) = match bits {
        3 => ("I32", group.div_ceil(10), 4),
        _ => ("U8", group * usize::from(bits) / 8, 1),
    };
    let stored = bytes(rows * groups * size);
    // Words of 3-bit codes have two bits more, and the last ones have codes that are none.
    let (words, parts) = match bits {
        3 => (stored.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect(), 10),
        _ => (stored.iter().map(|byte| u32::from(*byte)).collect::<Vec<_>>(), 8 / bits),
    };
    let part = |part: u8| words.iter().map(move |word| (word >> (bits * part) & ((1 << bits) - 1)) as u8);
    let codes: Vec<u8> = (0..parts).rev().flat_map(part).take(n * k).collect();
    let scales: Vec<f32> = (0..groups).map(|at| 0.01 + (at % 5) as f32 / 64.).collect();
    let zeros: Vec<f32> = (0..groups).map(|at| 0.5 + (at % 11) as f32).collect();
    let number = |(at, code): (usize, &u8)| (f32::from(*code) - zeros[at % groups]) * scales[at % groups];
    let numbers = codes.iter().enumerate().map(number).collect();
    let changes = [
        entry("m.weight", dtype, &[rows, groups], stored),
        f32s("m.weight.scales", &[1, groups], &scales),
        f32s("m.weight.zeros", &[1, groups], &zeros),
        u32s("m.weight.shape", &[n as u32, k as u32]),
        u8("m.weight.bits", bits),
        u32("m.weight.group_size", group as u32),
    ];
    Case(with(&layer("HQQ"), &changes), format, [n, k], numbers)
}

fn cases() -> Vec<Case> {
    vec![
        f8q8(),
        fp8(40, 0.3, "fp8 g64, filled"),
        fp8(40, -0.3, "fp8 g64, filled"),
        fp8(64, -0.3, "fp8 g64"),
        hqq([24, 40], 4, 8, "affine 4-bit g8, across rows"),
        hqq([24, 40], 8, 6, "affine 8-bit g6, across rows"),
        hqq([24, 40], 1, 8, "affine 1-bit g8, across rows"),
        hqq([24, 40], 2, 12, "affine 2-bit g12, across rows"),
        hqq([24, 40], 3, 20, "affine 3-bit g20, across rows"),
        hqq([24, 64], 3, 64, "affine 3-bit g64, across rows"),
        // Two rows of groups for each row, and two rows for three of groups.
        hqq([8, 64], 4, 16, "affine 4-bit g16, across rows"),
        hqq([8, 64], 8, 64, "affine 8-bit g64, across rows"),
        hqq([24, 80], 4, 60, "affine 4-bit g60, across rows"),
    ]
}

fn numbers(weight: &Weight) -> Vec<f32> {
    weight.to_dense(DType::F32, &Device::Cpu).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn numbers_and_their_parts_are_those_of_the_definition() {
    for Case(entries, format, [n, k], expected) in cases() {
        let whole = weight_of(&entries);
        assert_eq!((whole.format_name().as_str(), whole.dims()), (format, &[n, k][..]));
        assert_eq!(numbers(&whole), expected, "{format}");
        let unit = whole.granularity();
        let columns = [0..k, 0..unit.max(k / 3 / unit * unit), k / 2 / unit * unit..k];
        for (columns, rows) in columns.into_iter().zip([1..n, 0..n / 2, n / 2 - 1..n - 1]) {
            let part = whole.narrow(0, rows.clone()).unwrap().narrow(1, columns.clone()).unwrap();
            let expected: Vec<f32> =
                rows.clone().flat_map(|row| expected[row * k..][columns.clone()].to_vec()).collect();
            assert_eq!(numbers(&part), expected, "{format} {rows:?} {columns:?}");
            let loaded = part.load(&Device::Cpu).unwrap();
            assert_eq!(part.loaded_bytes(), loaded.size_in_bytes() as u64, "{format} {rows:?} {columns:?}");
        }
    }
}

#[test]
fn layers_multiply_by_the_numbers() {
    for Case(entries, format, [n, k], numbers) in cases() {
        let layer = Linear::new(weight_of(&entries).load(&Device::Cpu).unwrap(), None);
        assert!(layer.weight().dense().is_none(), "{format}");
        let x = |at: usize| ((at * 29 % 83) as f32 / 41.) - 1.;
        for rows in [1, 2, 40] {
            let input = Tensor::from_iter((0..rows * k).map(x), &Device::Cpu).unwrap();
            let y = layer.forward(&input.reshape((rows, k)).unwrap()).unwrap();
            let y: Vec<f32> = y.flatten_all().unwrap().to_vec1().unwrap();
            let product = |at: usize| -> f64 {
                let (row, output) = (at / n, at % n);
                let of =
                    |column: usize| f64::from(x(row * k + column)) * f64::from(numbers[output * k + column]);
                (0..k).map(of).sum()
            };
            let expected: Vec<_> = (0..rows * n).map(product).collect();
            let largest = expected.iter().fold(0f64, |largest, number| largest.max(number.abs()));
            for (found, expected) in y.iter().zip(&expected) {
                assert!(
                    (f64::from(*found) - expected).abs() <= 1e-5 * largest,
                    "{format}: {found} {expected}"
                );
            }
        }
    }
}
