//! Linear attention, whose heads and numbers converters put in ways of their own.

use crate::architectures::{dense, number, with};
use crate::checkpoint::rejected;
use crate::writer::{f32_tensor, tensor, File};
use candle_core::{DType, Device};
use candle_quant::checkpoint::Checkpoint;

/// Linear attention: two heads of keys, each with three of values.
pub fn linear(file: File, name: &str) -> File {
    let sizes = [
        ("ssm.group_count", 2),
        ("ssm.time_step_rank", 6),
        ("ssm.state_size", 8),
        ("ssm.inner_size", 24),
        ("ssm.conv_kernel", 4),
        ("expert_shared_feed_forward_length", 32),
    ];
    sizes.into_iter().fold(file, |file, (key, size)| file.u32(&format!("{name}.{key}"), size))
}

/// The rates of heads are stored as what they are in a formula, of which no number above zero is one.
#[test]
fn numbers_that_the_converter_computes_are_those_of_models() {
    let open = |rates: &[f32]| {
        let file = linear(dense("qwen35"), "qwen35").tensor(f32_tensor("blk.0.ssm_a", &[6], rates));
        let file = file.tensor(f32_tensor("blk.0.attn_norm.weight", &[3], &[1.5, 1., 0.25]));
        file.tensor(f32_tensor("blk.0.ssm_norm.weight", &[2], &[1.5, 1.])).open().unwrap()
    };
    let numbers = |checkpoint: &Checkpoint, name: &str| {
        let tensor = checkpoint.dense(&format!("model.layers.0.{name}")).unwrap();
        tensor.load(DType::F32, &Device::Cpu).map(|tensor| tensor.to_vec1::<f32>().unwrap())
    };
    let model = open(&[-1., -2., -3., -4., -5., -6.]);
    let logarithms = [1f32, 3., 5., 2., 4., 6.].map(|rate| f64::from(rate).ln() as f32);
    assert_eq!(numbers(&model, "linear_attn.A_log").unwrap(), logarithms);
    assert_eq!(numbers(&model, "input_layernorm.weight").unwrap(), [0.5, 0., -0.75]);
    assert_eq!(numbers(&model, "linear_attn.norm.weight").unwrap(), [1.5, 1.]);
    let wrong = open(&[-1., -2., -3., 4., -5., -6.]);
    rejected(numbers(&wrong, "linear_attn.A_log"), &["A_log", "rates below zero", "4"]);
}

const OUTPUT: &str = "model.layers.0.linear_attn.out_proj";

/// Blocks of Q8_0 of two rows, each of six heads of values of `size` columns: all codes of a head are its number.
fn output_of(size: usize) -> File {
    let columns = 6 * size;
    let codes = |row: usize, block: usize| (0..32).map(move |at| (10 * row + (32 * block + at) / size) as u8);
    let blocks = (0..2).flat_map(|row| (0..columns / 32).map(move |block| (row, block)));
    // The scale 1 in f16.
    let bytes = blocks.flat_map(|(row, block)| [0x00, 0x3C].into_iter().chain(codes(row, block)));
    let inner = number(columns as u32);
    let file = with(linear(dense("qwen35"), "qwen35"), "qwen35.ssm.inner_size", inner);
    file.tensor(tensor("blk.0.ssm_out.weight", &[2, columns as u64], 8, bytes.collect()))
}

/// The first column of each head.
fn heads(checkpoint: &Checkpoint, size: usize) -> Vec<Vec<f32>> {
    let weight = checkpoint.weight(OUTPUT, None).unwrap();
    let rows = weight.to_dense(DType::F32, &Device::Cpu).unwrap().to_vec2::<f32>().unwrap();
    let of_row = |row: &Vec<f32>| {
        let heads = row.chunks(size);
        assert!(heads.clone().all(|head| head.iter().all(|column| *column == head[0])));
        heads.map(|head| head[0]).collect()
    };
    rows.iter().map(of_row).collect()
}

/// Blocks of whole heads are put in the order of models; of blocks across heads the config says which one it is.
#[test]
fn columns_are_moved_with_their_blocks() {
    let moved = output_of(64).open().unwrap();
    assert!(moved.config().get("linear_out_proj_is_tiled").is_none());
    // The file has the first head of both heads of keys, then the second ones, and the third ones.
    let in_order = [[0., 2., 4., 1., 3., 5.], [10., 12., 14., 11., 13., 15.]];
    assert_eq!(heads(&moved, 64), in_order);
    // A part of the columns, that begins and ends within heads.
    let part = moved.weight(OUTPUT, None).unwrap().narrow(1, 32..160).unwrap();
    let part = part.to_dense(DType::F32, &Device::Cpu).unwrap().to_vec2::<f32>().unwrap();
    assert_eq!(part[1].chunks(32).map(|block| block[0]).collect::<Vec<_>>(), [10., 12., 12., 14.]);

    let tiled = output_of(16).open().unwrap();
    assert_eq!(tiled.config()["linear_out_proj_is_tiled"], true);
    assert_eq!(heads(&tiled, 16)[0], [0., 1., 2., 3., 4., 5.]);

    // A layer whose blocks are larger leaves all layers as they are.
    let other_type = crate::writer::Tensor {
        name: "blk.1.ssm_out.weight".into(),
        ..tensor("", &[2, 256], 12, vec![0; 288])
    };
    let mixed = output_of(64).tensor(other_type).open().unwrap();
    assert_eq!(mixed.config()["linear_out_proj_is_tiled"], true);
    assert_eq!(heads(&mixed, 64)[0], [0., 1., 2., 3., 4., 5.]);

    let wrong = with(output_of(64), "qwen35.ssm.inner_size", number(192));
    rejected(wrong.open(), &["linear_attn.out_proj.weight", "192 columns, as the heads", "[2, 384]"]);
}
