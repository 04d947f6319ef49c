//! Rows whose groups are filled up, and groups across rows: numbers of parts, products, and the memory that is told of them.

use crate::checkpoint::warned;
use crate::column_order::{near, product, x};
use crate::hf::{entry, f32s, noise, open, weight, Entry};
use candle_core::{DType, Device, Module, Tensor, Var};
use candle_quant::checkpoint::Weight;
use candle_quant::nn::LayerWeight;
use candle_quant::Linear;
use half::f16;
use serde_json::{json, Value};

const N: usize = 24;

/// Codes without NaN, and scales of either sign.
fn fp8(k: usize, tile: Option<[usize; 2]>, exponents: bool) -> (Value, Vec<Entry>) {
    let codes: Vec<u8> =
        noise(N * k, 7).into_iter().map(|code| if code & 127 == 127 { 3 } else { code }).collect();
    let [rows, columns] = tile.unwrap_or([N, k]);
    let dims = if tile.is_none() { vec![] } else { vec![N.div_ceil(rows), k.div_ceil(columns)] };
    let count = dims.iter().product::<usize>();
    let scales = match exponents {
        true => entry(
            "m.weight_scale_inv",
            "F8_E8M0",
            &dims,
            (0..count).map(|at| 118 + (at % 5) as u8).collect::<Vec<_>>(),
        ),
        false => {
            let numbers: Vec<f32> =
                (0..count).map(|at| 0.01 * (1. + at as f32) * [1., -1.][at % 2]).collect();
            f32s("m.weight_scale_inv", &dims, &numbers)
        }
    };
    let quantization = json!({"quant_method": "fp8", "weight_block_size": tile});
    (quantization, vec![entry("m.weight", "F8_E4M3", &[N, k], codes), scales])
}

/// HQQ with groups along K, or across rows.
fn hqq(k: usize, bits: usize, group: usize, axis: i32) -> (Value, Vec<Entry>) {
    let groups = N * k / group;
    let halves = |step: f32| -> Vec<u8> {
        (0..groups).flat_map(|at| f16::from_f32(0.1 + step * (at % 7) as f32).to_le_bytes()).collect()
    };
    let dims = if axis == 1 { [groups, 1] } else { [1, groups] };
    let packing = format!("{bits}bit_u8");
    let entries = vec![
        entry("m.W_q", "U8", &[N * k * bits / 8], noise(N * k * bits / 8, 9)),
        entry("m.scale", "F16", &dims, halves(0.01)),
        entry("m.zero", "F16", &dims, halves(0.9)),
        entry("m.shape", "I64", &[2], [N as u64, k as u64].map(u64::to_le_bytes).concat()),
        entry("m.axis", "I32", &[], axis.to_le_bytes()),
        entry("m.group_size", "I32", &[], (group as i32).to_le_bytes()),
        entry("m.packing", "U8", &[packing.len()], packing.as_bytes()),
    ];
    (json!({"quant_method": "hqq"}), entries)
}

fn cases() -> Vec<(Value, Vec<Entry>, &'static str)> {
    let fp8 = |k, tile, exponents, format| {
        let (quantization, entries) = fp8(k, tile, exponents);
        (quantization, entries, format)
    };
    let hqq = |k, bits, group, axis, format| {
        let (quantization, entries) = hqq(k, bits, group, axis);
        (quantization, entries, format)
    };
    vec![
        fp8(50, None, false, "fp8 g64, filled"),
        fp8(200, None, false, "fp8 g32, filled"),
        fp8(200, Some([16, 128]), false, "fp8 g32, filled"),
        fp8(250, Some([16, 128]), false, "fp8 g128, filled"),
        fp8(192, Some([5, 48]), false, "fp8 g64, filled"),
        fp8(200, Some([16, 128]), true, "mxfp8, filled"),
        hqq(96, 4, 16, 1, "affine 4-bit g32, filled"),
        hqq(96, 2, 48, 1, "affine 2-bit g64, filled"),
        hqq(96, 4, 8, 0, "affine 4-bit g8, across rows"),
        hqq(128, 8, 24, 0, "affine 8-bit g24, across rows"),
        hqq(80, 4, 60, 0, "affine 4-bit g60, across rows"),
        hqq(70, 2, 4, 0, "affine 2-bit g4, across rows"),
        hqq(50, 1, 8, 0, "affine 1-bit g8, across rows"),
    ]
}

fn dense(weight: &Weight) -> Tensor {
    weight.to_dense(DType::F32, &Device::Cpu).unwrap()
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

/// Columns may be cut anywhere: a part is filled up by itself.
#[test]
fn parts_are_parts_of_the_numbers() {
    for (quantization, entries, format) in cases() {
        let whole = weight(&quantization, &entries).unwrap();
        assert_eq!((whole.format_name().as_str(), whole.granularity()), (format, 1));
        let (numbers, k) = (dense(&whole), whole.dims()[1]);
        for (columns, rows) in
            [(0..k, 3..9), (1..k, 0..N), (47..49, 23..24), (k / 3..k / 2, 0..N / 2), (0..k, 0..N)]
        {
            let expected = numbers.narrow(1, columns.start, columns.len()).unwrap();
            let expected = bits(&expected.narrow(0, rows.start, rows.len()).unwrap());
            let part = whole.narrow(1, columns.clone()).unwrap().narrow(0, rows.clone()).unwrap();
            assert_eq!(bits(&dense(&part)), expected, "{format} {columns:?} {rows:?}");
            let part = whole.narrow(0, rows.clone()).unwrap().narrow(1, columns.clone()).unwrap();
            assert_eq!(bits(&dense(&part)), expected, "{format} {columns:?} {rows:?}");
            let loaded = part.load(&Device::Cpu).unwrap();
            assert_eq!(part.loaded_bytes(), loaded.size_in_bytes() as u64, "{format} {columns:?} {rows:?}");
            assert_eq!(part.format_name(), loaded.format_name());
        }
    }
}

#[test]
fn layers_multiply_by_the_numbers() {
    for (index, (quantization, entries, format)) in cases().into_iter().enumerate() {
        let stored = weight(&quantization, &entries).unwrap();
        let (numbers, k) = (dense(&stored), stored.dims()[1]);
        let layer = Linear::new(stored.load(&Device::Cpu).unwrap(), None);
        let is_packed = matches!(layer.weight(), LayerWeight::Reordered(_) | LayerWeight::ColumnScaled(_));
        assert!(is_packed, "{format}");
        for rows in [1, 2, 7, 33, 70, 200] {
            let x = x(&[rows, k], index, DType::F32);
            near(&layer.forward(&x).unwrap(), &product(&x, &numbers), 1e-5);
        }
    }
}

/// Where few rows share scales, these took as much memory as numbers do.
#[test]
fn groups_of_few_rows_are_dequantized_and_that_is_said() {
    let (quantization, entries) = hqq(96, 8, 2, 0);
    let checkpoint = open(&quantization, &entries).unwrap();
    assert_eq!(checkpoint.weight("m", None).unwrap().format_name(), "F32");
    warned(&checkpoint, &["model.safetensors", "`m`", "HQQ", "dequantized"]);
}

/// Biases, dtypes of x, rows of a table, and the gradient of x.
#[test]
fn groups_across_rows_are_a_layer_like_others() {
    for (quantization, entries, format) in cases().into_iter().filter(|case| case.2.ends_with("across rows"))
    {
        let stored = weight(&quantization, &entries).unwrap();
        let (numbers, k) = (dense(&stored), stored.dims()[1]);
        let bias = x(&[1, N], 4, DType::F32).flatten_all().unwrap();
        let layer = Linear::new(stored.load(&Device::Cpu).unwrap(), Some(bias.clone()));
        for (dtype, bound) in [(DType::F32, 1e-5), (DType::F16, 1e-3), (DType::BF16, 8e-3)] {
            let x = x(&[2, 3, k], 3, dtype);
            let y = layer.forward(&x).unwrap();
            assert_eq!((y.dims(), y.dtype()), (&[2, 3, N][..], dtype), "{format}");
            let bias: Vec<f64> = bias.to_dtype(DType::F64).unwrap().to_vec1().unwrap();
            let sums: Vec<_> =
                product(&x, &numbers).iter().zip(bias.iter().cycle()).map(|(sum, bias)| sum + bias).collect();
            near(&y, &sums, bound);
        }
        let refused = layer.forward(&x(&[1, k + 1], 0, DType::F32)).unwrap_err().to_string();
        assert!(refused.contains(&format!("last dimension {k}")), "{refused}");

        let LayerWeight::ColumnScaled(table) = layer.weight() else { panic!("{format}") };
        let ids = Tensor::new(&[[3u32, 23], [0, 11]], &Device::Cpu).unwrap();
        let rows = table.embed(&ids, DType::F32).unwrap();
        assert_eq!(rows.dims(), [2, 2, k]);
        let expected = numbers.index_select(&ids.flatten_all().unwrap(), 0).unwrap();
        assert_eq!(bits(&rows), bits(&expected), "{format}");
        assert!(table.embed(&Tensor::new(&[N as u32], &Device::Cpu).unwrap(), DType::F32).is_err());

        for rows in [2, 40] {
            let x = Var::from_tensor(&x(&[rows, k], 9, DType::F32)).unwrap();
            let gradient =
                |y: Tensor| y.sqr().unwrap().sum_all().unwrap().backward().unwrap().get(&x).unwrap().clone();
            let sum = x.matmul(&numbers.t().unwrap()).unwrap().broadcast_add(&bias).unwrap();
            let expected: Vec<f64> =
                gradient(sum).to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap();
            near(&gradient(layer.forward(&x).unwrap()), &expected, 1e-5);
        }
    }
}
