//! Columns that are not in the order of their groups, against definitions computed in f64 from the bytes of the file.

use crate::checkpoint::rejected;
use crate::hf::{case_of, compressed, entry, fixture, noise, weight, with, without, Entry};
use crate::layouts::{bytes, check};
use crate::rules::{changed, weight_with, FILE};
use candle_core::{DType, Device, Module, Tensor, Var, D};
use candle_quant::checkpoint::Weight;
use candle_quant::nn::{forward_add, forward_all, swiglu, LayerWeight};
use candle_quant::{Checkpoint, Linear, VarBuilder};
use half::f16;
use serde_json::{json, Value};

const K: usize = 128;

/// Groups of columns as bytes.
fn indices(groups: &[i32]) -> Vec<u8> {
    groups.iter().flat_map(|group| group.to_le_bytes()).collect()
}

/// 128 columns in two groups: of as many columns each, or of whatever falls into them.
fn orders() -> [Vec<i32>; 3] {
    let shuffled = |column: i32| column * 53 % 128;
    [
        (0..128).map(|column| shuffled(column) / 64).collect(),
        (0..128).map(|column| i32::from(shuffled(column) % 5 == 0)).collect(),
        (0..128).map(|column| i32::from(column < 3)).collect(),
    ]
}

fn halves(entries: &[Entry], name: &str) -> Vec<f64> {
    let bytes = bytes(entries, name).as_chunks::<2>().0;
    bytes.iter().map(|bytes| f16::from_le_bytes(*bytes).to_f64()).collect()
}

/// Code `index` of a stream of bits.
fn code(bytes: &[u8], bits: usize, index: usize) -> f64 {
    let bit = |at: usize| u32::from(bytes[at / 8] >> (at % 8) & 1);
    f64::from((0..bits).map(|at| bit(index * bits + at) << at).sum::<u32>())
}

/// The words of column `column` of `columns`, as one stream.
fn column(words: &[u8], columns: usize, column: usize) -> Vec<u8> {
    words.chunks_exact(4).skip(column).step_by(columns).flatten().copied().collect()
}

fn gptq(bits: usize, groups: &[i32], n: usize) -> (Value, Vec<Entry>) {
    let scales: Vec<u8> =
        (0..2 * n).flat_map(|index| f16::from_f32(0.01 * (1. + (index % 13) as f32)).to_le_bytes()).collect();
    let entries = vec![
        entry("m.qweight", "I32", &[K * bits / 32, n], noise(K * n * bits / 8, 40)),
        entry("m.qzeros", "I32", &[2, n * bits / 32], noise(2 * n * bits / 8, 41)),
        entry("m.scales", "F16", &[2, n], scales),
        entry("m.g_idx", "I32", &[K], indices(groups)),
    ];
    let quantization = json!({
        "quant_method": "gptq", "bits": bits, "group_size": 64, "sym": false, "desc_act": true,
        "checkpoint_format": "gptq_v2",
    });
    (quantization, entries)
}

/// The number at a row and a column of a GPTQ file, by its definition.
fn gptq_number(bits: usize, groups: &[i32], n: usize, entries: &[Entry]) -> impl Fn(usize, usize) -> f64 {
    let columns: Vec<_> = (0..n).map(|row| column(bytes(entries, "m.qweight"), n, row)).collect();
    let (zeros, scales) = (bytes(entries, "m.qzeros").to_vec(), halves(entries, "m.scales"));
    let groups = groups.to_vec();
    move |row, k| {
        let group = groups[k] as usize;
        let zero = code(&zeros[group * n * bits / 8..], bits, row);
        (code(&columns[row], bits, k) - zero) * scales[group * n + row]
    }
}

#[test]
fn gptq_codes_have_the_group_that_the_file_tells() {
    for bits in [2, 3, 4, 8] {
        for (groups, size) in orders().iter().zip([64, 32, 32]) {
            let (quantization, entries) = gptq(bits, groups, 32);
            let format = format!("affine {bits}-bit g{size}, act-order");
            check(&quantization, &entries, &format, &[32, K], gptq_number(bits, groups, 32, &entries));
        }
    }
}

#[test]
fn compressed_tensors_codes_have_the_group_that_the_file_tells() {
    for (groups, size) in orders().iter().zip([64, 32, 32]) {
        let order = entry("m.weight_g_idx", "I32", &[K], indices(groups));
        let case = case_of("pack-quantized");
        let entries = with(&case.entries, std::slice::from_ref(&order));
        let (codes, scales) = (bytes(&entries, "m.weight_packed"), halves(&entries, "m.weight_scale"));
        let format = format!("symmetric 4-bit g{size}, act-order");
        check(&case.quantization, &entries, &format, &[8, K], |row, k| {
            (code(codes, 4, row * K + k) - 8.) * scales[row * 2 + groups[k] as usize]
        });

        let case = case_of("pack-quantized zeros");
        let entries = with(&case.entries, &[order]);
        let (codes, scales) = (bytes(&entries, "m.weight_packed"), halves(&entries, "m.weight_scale"));
        let zeros: Vec<_> =
            (0..2).map(|group| column(bytes(&entries, "m.weight_zero_point"), 2, group)).collect();
        let format = format!("affine 8-bit g{size}, act-order");
        check(&case.quantization, &entries, &format, &[8, K], |row, k| {
            let group = groups[k] as usize;
            (f64::from(codes[row * K + k]) - code(&zeros[group], 8, row)) * scales[row * 2 + group]
        });
    }
}

fn dense(weight: &Weight) -> Tensor {
    weight.to_dense(DType::F32, &Device::Cpu).unwrap()
}

fn rows(tensor: &Tensor) -> Vec<Vec<f32>> {
    tensor.to_dtype(DType::F32).unwrap().to_vec2().unwrap()
}

/// Parts of columns have as much of each group as fell into them; of codes no others are read.
#[test]
fn parts_are_parts_of_the_numbers() {
    for groups in orders() {
        let (quantization, entries) = gptq(4, &groups, 32);
        let whole = weight(&quantization, &entries).unwrap();
        assert_eq!(whole.granularity(), 32);
        let numbers = dense(&whole);
        for (columns, of_rows) in [(32..96, 0..32), (96..128, 3..17), (0..128, 31..32), (0..32, 8..16)] {
            let part = whole.narrow(1, columns.clone()).unwrap().narrow(0, of_rows.clone()).unwrap();
            let expected = numbers.narrow(1, columns.start, columns.len()).unwrap();
            let expected = expected.narrow(0, of_rows.start, of_rows.len()).unwrap();
            assert_eq!(rows(&dense(&part)), rows(&expected), "{columns:?} {of_rows:?}");
            let other_way = whole.narrow(0, of_rows.clone()).unwrap().narrow(1, columns.clone()).unwrap();
            assert_eq!(rows(&dense(&other_way)), rows(&expected), "{columns:?} {of_rows:?}");
            // Of scales and zeros all groups of these rows.
            let words = (of_rows.end).div_ceil(8) - of_rows.start / 8;
            let bytes = columns.len() * of_rows.len() / 2 + 2 * 2 * of_rows.len() + 2 * 4 * words;
            assert_eq!(part.size_in_bytes(), bytes, "{columns:?} {of_rows:?}");
            let loaded = part.load(&Device::Cpu).unwrap();
            // Biases are F32 here, and counted as such.
            assert_eq!(part.loaded_bytes(), loaded.size_in_bytes() as u64, "{columns:?} {of_rows:?}");
        }
        rejected(whole.narrow(1, 16..48).map(|_| ()), &["multiples of 32", "16..48"]);
    }
}

pub fn x(dims: &[usize], seed: usize, dtype: DType) -> Tensor {
    let count = dims.iter().product::<usize>();
    let numbers = (0..count).map(|at| ((at * 37 + seed * 11) % 101) as f32 / 50. - 1.);
    Tensor::from_iter(numbers, &Device::Cpu).unwrap().reshape(dims).unwrap().to_dtype(dtype).unwrap()
}

/// `x w^T` in f64.
pub fn product(x: &Tensor, weight: &Tensor) -> Vec<f64> {
    let wide = |tensor: &Tensor| tensor.to_dtype(DType::F64).unwrap();
    let flat = wide(x).reshape(((), weight.dim(1).unwrap())).unwrap();
    flat.matmul(&wide(weight).t().unwrap()).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

#[track_caller]
pub fn near(found: &Tensor, expected: &[f64], bound: f64) {
    let found: Vec<f64> = found.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap();
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0f64, |largest, number| largest.max(number.abs()));
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() <= bound * largest, "{found} instead of {expected}");
    }
}

#[test]
fn layers_multiply_by_the_numbers() {
    for (index, groups) in orders().iter().enumerate() {
        let (quantization, entries) = gptq(4, groups, 32);
        let stored = weight(&quantization, &entries).unwrap();
        let numbers = dense(&stored);
        let layer = Linear::new(stored.load(&Device::Cpu).unwrap(), None);
        assert!(matches!(layer.weight(), LayerWeight::Reordered(_)));
        assert_eq!(layer.weight().dims(), [32, K]);
        // One row, several, more than one thread gathers, and a view.
        for dims in [vec![1, K], vec![3, K], vec![2, 20, K], vec![600, K]] {
            for (dtype, bound) in [(DType::F32, 1e-5), (DType::F16, 2e-3), (DType::BF16, 1e-2)] {
                let x = x(&dims, index, dtype);
                let y = layer.forward(&x).unwrap();
                assert_eq!((y.dtype(), y.dim(D::Minus1).unwrap()), (dtype, 32));
                near(&y, &product(&x, &numbers), bound);
            }
        }
        let view = x(&[K, 5], 3, DType::F32).t().unwrap();
        near(&layer.forward(&view).unwrap(), &product(&view, &numbers), 1e-5);
        let error = layer.forward(&x(&[1, 64], 0, DType::F32)).unwrap_err().to_string();
        assert!(error.contains("last dimension 128"), "{error}");
        // With gradients of x, that of the dense layer.
        let x = Var::from_tensor(&x(&[4, K], 9, DType::F32)).unwrap();
        let gradient =
            |y: Tensor| y.sqr().unwrap().sum_all().unwrap().backward().unwrap().get(&x).unwrap().clone();
        let expected = gradient(x.matmul(&numbers.t().unwrap()).unwrap());
        let expected: Vec<f32> = expected.flatten_all().unwrap().to_vec1().unwrap();
        let expected: Vec<f64> = expected.into_iter().map(f64::from).collect();
        near(&gradient(layer.forward(&x).unwrap()), &expected, 1e-5);
    }
}

/// Layers of one order share it; others stand by themselves.
#[test]
fn layers_together_are_each_by_itself() {
    let layer = |groups: &[i32], bits| {
        let (quantization, entries) = gptq(bits, groups, 32);
        Linear::new(weight(&quantization, &entries).unwrap().load(&Device::Cpu).unwrap(), None)
    };
    let [a, b, _] = orders();
    let in_order = Linear::new(weight_with("pack-quantized", &[]).unwrap().load(&Device::Cpu).unwrap(), None);
    let x = x(&[2, K], 5, DType::F32);
    let bits = |tensor: &Tensor| -> Vec<u32> {
        let numbers: Vec<f32> = tensor.flatten_all().unwrap().to_vec1().unwrap();
        numbers.into_iter().map(f32::to_bits).collect()
    };
    for layers in [[layer(&a, 4), layer(&a, 8)], [layer(&a, 4), layer(&b, 4)]] {
        let [first, second] = &layers;
        for others in [[first, second, &in_order], [&in_order, first, second], [first, second, first]] {
            let found = forward_all(others, &x).unwrap();
            for (layer, found) in others.iter().zip(&found) {
                assert_eq!(bits(found), bits(&layer.forward(&x).unwrap()));
            }
        }
        let (gate, up) = (first.forward(&x).unwrap(), second.forward(&x).unwrap());
        let expected = (gate.silu().unwrap() * &up).unwrap();
        let found: Vec<f32> = swiglu(first, second, &x).unwrap().flatten_all().unwrap().to_vec1().unwrap();
        let expected: Vec<f32> = expected.flatten_all().unwrap().to_vec1().unwrap();
        assert!(found.iter().zip(&expected).all(|(found, expected)| (found - expected).abs() <= 1e-5));
        let sum = forward_add(first, &x, &up).unwrap();
        assert_eq!(bits(&sum), bits(&(up + first.forward(&x).unwrap()).unwrap()));
    }
}

#[test]
fn rows_of_a_table_are_in_the_order_of_x() {
    let (quantization, entries) = gptq(4, &orders()[1], 32);
    let stored = weight(&quantization, &entries).unwrap();
    let LayerWeight::Reordered(table) = stored.load(&Device::Cpu).unwrap() else { panic!() };
    let ids = Tensor::new(&[3u32, 31, 0], &Device::Cpu).unwrap();
    let expected = dense(&stored).index_select(&ids, 0).unwrap();
    assert_eq!(rows(&table.embed(&ids, DType::F32).unwrap()), rows(&expected));
}

/// Layers that see the same activations have one order in the files of the tools.
#[test]
fn layers_of_one_input_have_one_order() {
    for name in ["gptq-act-order-b4-g32", "gptq-act-order-v2-b3-g64", "ct-act-order-int4-g32"] {
        let checkpoint = Checkpoint::open(fixture(name)).unwrap();
        let vb = VarBuilder::from_checkpoint(&checkpoint, DType::F32, &Device::Cpu).pp("model.layers.0");
        let order = |module: &str, n, k| match vb.pp(module).weight(n, k, candle_nn::Init::Const(0.)).unwrap()
        {
            LayerWeight::Reordered(weight) => weight,
            other => panic!("{}", other.format_name()),
        };
        let [q, k] = [("self_attn.q_proj", 128), ("self_attn.k_proj", 32)].map(|(name, n)| order(name, n, K));
        let [gate, up] = ["mlp.gate_proj", "mlp.up_proj"].map(|name| order(name, 256, K));
        assert!(q.has_order_of(&k) && gate.has_order_of(&up) && !q.has_order_of(&gate), "{name}");
    }
}

#[test]
fn orders_name_groups_of_the_file() {
    let mut beyond = orders()[0].clone();
    beyond[70] = 2;
    let mut negative = orders()[0].clone();
    negative[5] = -1;
    let unset = vec![-1; K];
    for (case, name) in [
        ("gptq", "m.g_idx"),
        ("pack-quantized", "m.weight_g_idx"),
        ("pack-quantized zeros", "m.weight_g_idx"),
    ] {
        let with_order =
            |dims: &[usize], groups: &[i32]| weight_with(case, &[entry(name, "I32", dims, indices(groups))]);
        let named = format!("`{name}`");
        let parts = [FILE, &named, "groups 0 to 1 of 64 columns each", "group 2 for column 70"];
        rejected(with_order(&[K], &beyond), &parts);
        rejected(with_order(&[K], &negative), &[FILE, &named, "group -1 for column 5"]);
        rejected(with_order(&[64], &beyond[..64]), &[FILE, &named, "shape [128]", "[64]"]);
        let dtype = entry(name, "U32", &[K], indices(&orders()[0]));
        rejected(weight_with(case, &[dtype]), &[FILE, &named, "I32", "U32"]);
        // What compressed-tensors writes for a weight that it has not ordered.
        match case {
            "gptq" => rejected(with_order(&[K], &unset), &[FILE, &named, "group -1 for column 0"]),
            _ => assert!(matches!(with_order(&[K], &unset), Ok(Weight::Packed(_)))),
        }
        let trivial = entry(name, "I32", &[K], crate::hf::order(128, 64));
        assert!(matches!(weight_with(case, &[trivial]), Ok(Weight::Packed(_))));
    }
}

/// Without the tensor nobody knows the groups of a file whose config says that columns are ordered.
#[test]
fn an_order_that_the_config_names_is_there() {
    let case = case_of("gptq");
    let entries = without(&case.entries, "m.g_idx");
    assert!(weight(&case.quantization, &entries).is_ok());
    let ordered = changed("gptq", &json!({"desc_act": true}));
    rejected(weight(&ordered, &entries), &[FILE, "`m.g_idx`", "this tensor beside `m.qweight`"]);
    for (actorder, is_needed) in [("group", true), ("dynamic", true), ("weight", false), ("static", false)] {
        let weights =
            json!({"num_bits": 4, "type": "int", "symmetric": true, "group_size": 64, "actorder": actorder});
        let result = weight(&compressed("pack-quantized", weights), &case_of("pack-quantized").entries);
        match is_needed {
            true => rejected(result, &[FILE, "`m.weight_g_idx`", "this tensor beside `m.weight_packed`"]),
            false => assert!(result.is_ok(), "{actorder}"),
        }
    }
}
