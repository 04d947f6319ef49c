//! Blocks of GGML's types mean what llama.cpp's own package says (tests/peers/ggml_blocks.py): as numbers, in slices, and
//! in products, which round no activations.

use crate::packed::{flat, numbers, relative_error};
use crate::writer::{tensor, File};
use candle_core::{DType, Device, Module, Tensor};
use candle_quant::checkpoint::{GgmlKernels, OpenOptions, PackedWeight, Weight};
use candle_quant::{linear_no_bias, Checkpoint, LayerWeight, VarBuilder};
use std::collections::HashMap;

/// Names and numbers of the types, and the formats that they become.
const TYPES: [(&str, u32, &str); 24] = [
    ("q4_0", 2, "affine 4-bit g32"),
    ("q4_1", 3, "affine 4-bit g32"),
    ("q5_0", 6, "affine 5-bit g32"),
    ("q5_1", 7, "affine 5-bit g32"),
    ("q8_0", 8, "affine 8-bit g32"),
    ("q8_1", 9, "affine 8-bit g32"),
    ("q2_k", 10, "q2_k"),
    ("q3_k", 11, "q3_k"),
    ("q4_k", 12, "q4_k"),
    ("q5_k", 13, "q5_k"),
    ("q6_k", 14, "q6_k"),
    ("q8_k", 15, "symmetric 8-bit g128"),
    ("iq4_nl", 20, "iq4_nl"),
    ("iq4_xs", 23, "iq4_xs"),
    ("tq1_0", 34, "affine 2-bit g128"),
    ("tq2_0", 35, "affine 2-bit g128"),
    ("iq1_s", 19, "iq1_s"),
    ("iq1_m", 29, "iq1_m"),
    ("iq2_xxs", 16, "iq2_xxs"),
    ("iq2_xs", 17, "iq2_xs"),
    ("iq2_s", 22, "iq2_xs"),
    ("iq3_xxs", 18, "iq3_xxs"),
    ("iq3_s", 21, "iq3_s"),
    ("q1_0", 41, "affine 1-bit g128"),
];

const DOWN: &str = "model.layers.0.mlp.down_proj";

fn fixture() -> HashMap<String, Tensor> {
    read("blocks")
}

fn read(name: &str) -> HashMap<String, Tensor> {
    let path = format!("{}/tests/fixtures/gguf/{name}.safetensors", env!("CANDLE_QUANT_REPOSITORY"));
    candle_core::safetensors::load(path, &Device::Cpu).unwrap()
}

/// A file with a weight of `[N, 512]`, and what its elements are.
fn file(name: &str, type_id: u32) -> (File, Tensor) {
    let tensors = fixture();
    let blocks = tensors[&format!("{name}.blocks")].flatten_all().unwrap().to_vec1::<u8>().unwrap();
    let values = tensors[&format!("{name}.values")].clone();
    let stack = [blocks.clone(), blocks.clone()].concat();
    let file = File::of("qwen3moe")
        .u32("qwen3moe.attention.head_count", 2)
        .tensor(tensor("blk.0.ffn_down.weight", &[2, 512], type_id, blocks))
        .tensor(tensor("blk.0.ffn_gate_exps.weight", &[2, 2, 512], type_id, stack));
    (file, values)
}

/// The weight in a format of this crate.
pub fn packed(weight: Weight) -> PackedWeight {
    match weight {
        Weight::Packed(packed) => packed,
        Weight::Ggml(blocks) => blocks.packed().unwrap(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_type_is_what_its_tool_says() {
    for (name, type_id, format) in TYPES {
        let (file, values) = file(name, type_id);
        let checkpoint = file.open().unwrap();
        assert!(checkpoint.warnings().is_empty(), "{:?}", checkpoint.warnings());
        let weight = packed(checkpoint.weight(DOWN, Some(512)).unwrap());
        let loaded = weight.load(&Device::Cpu).unwrap();
        assert_eq!((loaded.format().to_string(), loaded.dims()), (format.to_owned(), vec![2, 512]), "{name}");
        assert_eq!(flat(&loaded.dequantize(DType::F32).unwrap()), flat(&values), "{name}");
        assert_eq!(crate::packed::reference(&loaded), flat(&values), "{name}");
        // Rows, and whole blocks of K.
        let (rows, columns) = (values.narrow(0, 1, 1).unwrap(), values.narrow(1, 256, 256).unwrap());
        for (dim, range, expected) in [(0, 1..2, rows), (1, 256..512, columns)] {
            let before = packed(checkpoint.weight(DOWN, None).unwrap().narrow(dim, range.clone()).unwrap());
            let part = before.load(&Device::Cpu).unwrap();
            assert_eq!(flat(&part.dequantize(DType::F32).unwrap()), flat(&expected), "{name} {dim}");
            let after = loaded.narrow(dim, range.start, range.len()).unwrap();
            assert_eq!(flat(&after.dequantize(DType::F32).unwrap()), flat(&expected), "{name} {dim}");
        }
        // Experts.
        let stack = packed(checkpoint.weight("model.layers.0.mlp.experts.gate_proj", None).unwrap());
        let stack = stack.load(&Device::Cpu).unwrap();
        assert_eq!(stack.dims(), [2, 2, 512]);
        for expert in 0..2 {
            let expert = stack.matrix(expert).unwrap().dequantize(DType::F32).unwrap();
            assert_eq!(flat(&expert), flat(&values), "{name}");
        }
    }
}

/// Every place of every grid, by tests/peers/ggml_grids.py.
#[test]
fn grids_are_those_of_their_tool() {
    let tensors = read("grids");
    let places = [("iq1_s", 64), ("iq2_xxs", 8), ("iq2_xs", 16), ("iq2_s", 32), ("iq3_xxs", 4), ("iq3_s", 8)];
    assert_eq!(tensors.len(), 2 * places.len());
    for (name, blocks) in places {
        let (_, type_id, _) = TYPES.into_iter().find(|(of, ..)| *of == name).unwrap();
        let bytes = tensors[&format!("{name}.blocks")].flatten_all().unwrap().to_vec1::<u8>().unwrap();
        let file = File::of("qwen3").u32("qwen3.attention.head_count", 2).tensor(tensor(
            "blk.0.ffn_down.weight",
            &[blocks, 256],
            type_id,
            bytes,
        ));
        let weight = packed(file.open().unwrap().weight(DOWN, Some(256)).unwrap());
        let weight = weight.load(&Device::Cpu).unwrap().dequantize(DType::F32).unwrap();
        let eighths = flat(&tensors[&format!("{name}.eighths")]);
        let wrong =
            flat(&weight).iter().zip(&eighths).position(|(value, eighths)| value * 8. + 128. != *eighths);
        assert_eq!((wrong, weight.elem_count()), (None, eighths.len()), "{name}");
    }
}

/// A scale of Q1_0 is twice the number of its block, also where F16 has no such number.
#[test]
fn the_largest_numbers_of_one_bit_stay_finite() {
    let block = |number: f32| [&half::f16::from_f32(number).to_le_bytes()[..], &[0b1010_1010; 16]].concat();
    let file = File::of("qwen3").u32("qwen3.attention.head_count", 2).tensor(tensor(
        "blk.0.ffn_down.weight",
        &[2, 128],
        41,
        [block(65504.), block(-0.5)].concat(),
    ));
    let weight = packed(file.open().unwrap().weight(DOWN, Some(128)).unwrap());
    let weight = flat(&weight.load(&Device::Cpu).unwrap().dequantize(DType::F32).unwrap());
    assert_eq!([weight[0], weight[1], weight[128], weight[129]], [-65504., 65504., 0.5, -0.5]);
}

#[test]
fn products_round_no_activations_unless_candle_is_asked_for() {
    for (name, type_id, _) in TYPES {
        let (file, values) = file(name, type_id);
        let dir = crate::writer::write(&file.bytes());
        let path = crate::writer::path(&dir);
        let weights: Vec<_> = flat(&values).into_iter().map(f64::from).collect();
        for (m, dtype) in [(1, DType::F32), (3, DType::F32), (40, DType::F32), (1, DType::BF16)] {
            let x = Tensor::from_vec(numbers(m * 512, 3), (m, 512), &Device::Cpu)
                .unwrap()
                .to_dtype(dtype)
                .unwrap();
            let products = |x: &[f32]| {
                weights
                    .chunks(512)
                    .map(|w| w.iter().zip(x).map(|(w, x)| w * f64::from(*x)).sum())
                    .collect::<Vec<f64>>()
            };
            let expected: Vec<f64> = flat(&x).chunks(512).flat_map(products).collect();
            let rounding = if dtype == DType::F32 { 1e-6 } else { 3e-3 };
            for (ggml, bound) in [(GgmlKernels::Own, rounding), (GgmlKernels::Candle, 3e-2)] {
                let options = OpenOptions { ggml, ..OpenOptions::default() };
                let checkpoint = Checkpoint::open_with(&path, options).unwrap();
                let vb = VarBuilder::from_checkpoint(&checkpoint, dtype, &Device::Cpu).pp(DOWN);
                let layer = linear_no_bias(512, 2, vb).unwrap();
                let known_to_candle = !name.starts_with("iq") && !matches!(name, "tq1_0" | "tq2_0" | "q1_0");
                let own = matches!(layer.weight(), LayerWeight::Quantized(_));
                assert_eq!(own, ggml == GgmlKernels::Own || !known_to_candle, "{name}");
                let error = relative_error(&flat(&layer.forward(&x).unwrap()), &expected);
                assert!(error <= bound, "{name} M={m} {ggml:?}: {error:e}");
            }
        }
    }
}

/// What a tool states of a row that is no whole block is an error, and so is a byte less than the blocks have.
#[test]
fn rows_of_other_than_whole_blocks_are_refused() {
    for (name, type_id, _) in TYPES {
        let bytes = fixture()[&format!("{name}.blocks")].elem_count();
        let blocks = vec![0; bytes / 2];
        let file = |dims: &[u64]| {
            File::of("qwen3").u32("qwen3.attention.head_count", 2).tensor(tensor(
                "blk.0.ffn_down.weight",
                dims,
                type_id,
                blocks.clone(),
            ))
        };
        assert!(file(&[1, 512]).open().is_ok(), "{name}");
        for dims in [&[1, 511][..], &[2, 512]] {
            let error = file(dims).open().map(drop).unwrap_err().to_string();
            assert!(error.contains("blk.0.ffn_down.weight"), "{name}: {error}");
        }
    }
}
