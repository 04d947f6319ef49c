//! gpt-oss: one layer with rows of gate and up projections in turn becomes two.

use crate::checkpoint::{folder_of, rejected};
use crate::uqff::{entry, f32s, layer, u32, u32s, u8, values, versioned, with, Entry};
use candle_core::{DType, Device};
use candle_quant::checkpoint::Checkpoint;
use half::f16;

const KEY: &str = "b.experts.gate_up_proj";
const EXPERTS: usize = 2;
const ROWS: usize = 4;

fn open(entries: &[Entry], model_type: &str) -> candle_quant::Result<Checkpoint> {
    let config = serde_json::json!({"model_type": model_type}).to_string();
    Checkpoint::open(
        folder_of(&[("x-0.uqff", &versioned(entries)), ("config.json", config.as_bytes())]).path(),
    )
}

/// What all numbers of a row are, counted over both experts.
fn number(row: usize) -> f32 {
    (1 << row) as f32
}

/// The layer in a family, and its K.
fn stack(family: &str) -> (Vec<Entry>, usize) {
    let part = |name: &str| format!("{KEY}.{name}");
    let all = EXPERTS * ROWS;
    let numbers: Vec<f32> = (0..all).map(number).collect();
    let (entries, k) = match family {
        "Unquant" => {
            let of_rows: Vec<f32> = numbers.iter().flat_map(|number| [*number; 3]).collect();
            (vec![f32s(&part("weight"), &[EXPERTS, ROWS, 3], &of_rows), u8(&part("weight.format"), 1)], 3)
        }
        "GGML" => {
            let block = |number: &f32| [&f16::from_f32(*number).to_le_bytes()[..], &[1; 32]].concat();
            let blocks: Vec<u8> = numbers.iter().flat_map(block).collect();
            let shape = u32s(&part("weight.shape"), &[EXPERTS as u32, ROWS as u32, 32]);
            let kind = [u8(&part("weight.format"), 0), u32(&part("weight.dtype"), 8)];
            ([vec![entry(&part("weight"), "U8", &[blocks.len()], blocks), shape], kind.to_vec()].concat(), 32)
        }
        "AFQ" => {
            let codes = entry(&part("weight"), "U32", &[EXPERTS, ROWS, 8], vec![0x11; all * 32]);
            let scales = f32s(&part("weight.scales"), &[EXPERTS, ROWS, 1], &numbers);
            let biases = f32s(&part("weight.biases"), &[EXPERTS, ROWS, 1], &[0.; EXPERTS * ROWS]);
            let format = [u8(&part("weight.format"), 4), u8(&part("weight.bits"), 4)];
            let format = [format.to_vec(), vec![u8(&part("weight.group_size"), 64)]].concat();
            ([vec![codes, scales, biases], format].concat(), 64)
        }
        "MXFP4" => {
            // Two codes of 1.
            let codes = entry(&part("weight"), "U8", &[EXPERTS, ROWS, 16], vec![0x22; all * 16]);
            let exponents: Vec<u8> = (0..all).map(|row| 127 + row as u8).collect();
            let scales = entry(&part("weight.scales"), "U8", &[EXPERTS, ROWS, 1], exponents);
            (vec![codes, scales, u8(&part("weight.format"), 6)], 32)
        }
        other => panic!("{other}"),
    };
    (with(&entries, &[f32s(&part("bias"), &[EXPERTS, ROWS], &numbers)]), k)
}

#[test]
fn rows_in_turn_are_two_projections() {
    for family in ["GGML", "Unquant", "AFQ", "MXFP4"] {
        let (entries, k) = stack(family);
        let checkpoint = open(&entries, "gpt_oss").unwrap();
        let names = ["b.experts.gate_proj.bias", "b.experts.gate_proj.weight"];
        let names = [names, ["b.experts.up_proj.bias", "b.experts.up_proj.weight"]].concat();
        assert!(checkpoint.tensor_names().eq(names), "{family}");
        assert!(checkpoint.warnings().is_empty(), "{family}: {:?}", checkpoint.warnings());
        for (first, projection) in ["gate_proj", "up_proj"].into_iter().enumerate() {
            let module = format!("b.experts.{projection}");
            let rows: Vec<f32> = (first..EXPERTS * ROWS).step_by(2).map(number).collect();
            assert_eq!(values(&checkpoint, &format!("{module}.bias")), rows, "{family} {projection}");
            let expected: Vec<f32> = rows.iter().flat_map(|row| vec![*row; k]).collect();
            assert_eq!(values(&checkpoint, &format!("{module}.weight")), expected, "{family} {projection}");
            // The second row of the second expert.
            let weight = checkpoint.weight(&module, Some(k)).unwrap();
            assert_eq!(weight.dims(), [EXPERTS, ROWS / 2, k]);
            let part = weight.narrow(0, 1..2).unwrap().narrow(1, 1..2).unwrap();
            let part = part.to_dense(DType::F32, &Device::Cpu).unwrap();
            assert_eq!(part.flatten_all().unwrap().to_vec1::<f32>().unwrap(), expected[3 * k..], "{family}");
        }
        // Of other models nothing is known.
        let other = open(&entries, "qwen3_moe").unwrap();
        let dims = [EXPERTS, ROWS, k];
        assert_eq!(other.weight(KEY, Some(k)).unwrap().dims(), dims, "{family}");
    }
}

#[test]
fn what_can_not_be_told_apart_is_refused() {
    let weight = format!("{KEY}.weight");
    let numbers = |shape: &[usize]| f32s(&weight, shape, &vec![1.; shape.iter().product()]);
    let (entries, _) = stack("Unquant");
    let entries: Vec<_> = entries.into_iter().filter(|(name, ..)| !name.ends_with(".bias")).collect();
    for shape in [&[2, 3, 3][..], &[4, 3]] {
        let parts = ["x-0.uqff", &weight, "gate and up rows in turn", &format!("{shape:?}")];
        rejected(open(&with(&entries, &[numbers(shape)]), "gpt_oss"), &parts);
    }
    // Families that have no stacks.
    for family in ["HQQ", "FP8", "F8Q8"] {
        let renamed = layer(family)
            .into_iter()
            .map(|(name, dtype, shape, bytes)| (name.replacen('m', KEY, 1), dtype, shape, bytes));
        rejected(
            open(&renamed.collect::<Vec<_>>(), "gpt_oss"),
            &[&weight, "gate and up rows in turn", family],
        );
    }
    // The fused layer is checked by its own name.
    let (afq, _) = stack("AFQ");
    let scales = f32s(&format!("{KEY}.weight.scales"), &[2, 2, 1], &[1.; 4]);
    rejected(open(&with(&afq, &[scales]), "gpt_oss"), &[&format!("`{KEY}.weight.scales`"), "[2, 4]"]);
    let bias = f32s(&format!("{KEY}.bias"), &[2, 3], &[1.; 6]);
    rejected(open(&with(&afq, &[bias]), "gpt_oss"), &[&format!("`{KEY}.bias`"), "[2, 4]"]);
    // Both, and one of them.
    let beside =
        [f32s("b.experts.up_proj.weight", &[2, 2, 3], &[1.; 12]), u8("b.experts.up_proj.weight.format", 1)];
    let parts = [&format!("`{KEY}.weight"), "`b.experts.up_proj.weight", "both projections here"];
    rejected(open(&with(&entries, &beside), "gpt_oss"), &parts);
}
