//! Values of all types: those of candle, and the definitions of those that candle does not have.

use crate::checkpoint::{rejected, warned};
use crate::packed::numbers;
use crate::writer::{f32_tensor, path, tensor, write, File};
use candle_core::quantized::{gguf_file, GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use candle_quant::checkpoint::{Checkpoint, CheckpointKind, Weight};
use candle_quant::QuantFormat;
use std::io::Cursor;

const E2M1: [f32; 8] = [0., 0.5, 1., 1.5, 2., 3., 4., 6.];
const DOWN: &str = "model.layers.0.mlp.down_proj";

fn e2m1(code: u8) -> f32 {
    let magnitude = E2M1[usize::from(code & 7)];
    if code & 8 != 0 {
        -magnitude
    } else {
        magnitude
    }
}

/// Four bits of exponent with bias 7, three of mantissa; no sign.
fn ue4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3), f64::from(code & 7));
    let value = match exponent {
        0 => mantissa * 2f64.powi(-9),
        _ => (1. + mantissa / 8.) * 2f64.powi(exponent - 7),
    };
    value as f32
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    let values = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    values.into_iter().map(f32::to_bits).collect()
}

fn dequantized(checkpoint: &Checkpoint, module: &str) -> Vec<u32> {
    let weight = checkpoint.weight(module, None).unwrap();
    bits(&weight.to_dense(DType::F32, &Device::Cpu).unwrap())
}

fn bytes(count: usize, seed: u64) -> Vec<u8> {
    numbers(count, seed).into_iter().map(|x| (x * 1000.) as i64 as u8).collect()
}

#[test]
fn every_type_of_candle_decodes_as_in_candle() {
    use GgmlDType::*;
    let types = [F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q8_1, Q2K, Q3K, Q4K, Q5K, Q6K, Q8K];
    let source = Tensor::from_vec(numbers(8 * 512, 1), (8, 512), &Device::Cpu).unwrap();
    let tensors: Vec<_> = types.iter().map(|dtype| QTensor::quantize(&source, *dtype).unwrap()).collect();
    let names: Vec<_> = (0..types.len()).map(|layer| format!("blk.{layer}.ffn_down.weight")).collect();
    let named: Vec<_> = names.iter().map(String::as_str).zip(&tensors).collect();
    let mut file = Cursor::new(Vec::new());
    let architecture = gguf_file::Value::String("qwen3".into());
    let heads = gguf_file::Value::U32(4);
    let metadata = [("general.architecture", &architecture), ("qwen3.attention.head_count", &heads)];
    gguf_file::write(&mut file, &metadata, &named).unwrap();
    let dir = write(file.get_ref());
    let checkpoint = Checkpoint::open(path(&dir)).unwrap();
    assert_eq!((checkpoint.kind(), checkpoint.kind().to_string()), (CheckpointKind::Gguf, "GGUF".into()));
    assert!(checkpoint.warnings().is_empty());
    for (layer, (dtype, tensor)) in types.iter().zip(&tensors).enumerate() {
        let module = format!("model.layers.{layer}.mlp.down_proj");
        let weight = checkpoint.weight(&module, Some(512)).unwrap();
        assert_eq!(weight.dims(), [8, 512]);
        assert_eq!(weight.size_in_bytes(), tensor.storage_size_in_bytes(), "{dtype:?}");
        match (dtype, &weight) {
            (F32 | F16 | BF16, Weight::Dense(dense)) => {
                assert_eq!(format!("{:?}", dense.dtype()), format!("{dtype:?}"));
            }
            (_, Weight::Ggml(blocks)) => assert_eq!((blocks.dtype(), blocks.name()), (*dtype, &module[..])),
            (_, other) => panic!("{dtype:?}: {other:?}"),
        }
        assert_eq!(
            dequantized(&checkpoint, &module),
            bits(&tensor.dequantize(&Device::Cpu).unwrap()),
            "{dtype:?}"
        );
    }
    assert!(checkpoint.warnings().is_empty());
}

/// Blocks of MXFP4 and their values; `adjacent` says which elements share a byte.
fn mxfp4(blocks: usize, adjacent: bool) -> (Vec<u8>, Vec<u32>) {
    let (mut data, mut values) = (Vec::new(), Vec::new());
    for (block, codes) in bytes(16 * blocks, 7).chunks(16).enumerate() {
        // Of all magnitudes, the least and the largest among them.
        let scale = (block * 37 % 255) as u8;
        data.push(scale);
        data.extend(codes);
        values.extend((0..32).map(|i| {
            let code = match adjacent {
                true => codes[i / 2] >> (4 * (i % 2)),
                false => codes[i % 16] >> (4 * (i / 16)),
            };
            (e2m1(code & 15) * 2f64.powi(i32::from(scale) - 127) as f32).to_bits()
        }));
    }
    (data, values)
}

#[test]
fn mxfp4_keeps_codes_and_scales() {
    let (data, values) = mxfp4(2 * 3 * 4, false);
    let file = File::of("qwen3moe")
        .u32("qwen3moe.attention.head_count", 2)
        .tensor(tensor("blk.0.ffn_down.weight", &[6, 128], 39, data.clone()))
        .tensor(tensor("blk.0.ffn_gate_exps.weight", &[2, 3, 128], 39, data));
    let checkpoint = file.open().unwrap();
    for (module, dims) in [(DOWN, &[6, 128][..]), ("model.layers.0.mlp.experts.gate_proj", &[2, 3, 128])] {
        let Weight::Packed(packed) = checkpoint.weight(module, Some(128)).unwrap() else { panic!() };
        assert_eq!((packed.format(), packed.dims()), (QuantFormat::MXFP4, dims));
        assert_eq!(packed.size_in_bytes(), 24 * 17);
        assert_eq!(dequantized(&checkpoint, module), values);
    }
    assert!(checkpoint.warnings().is_empty());
}

/// Before there was a number for MXFP4 it was 4, and neighbours shared a byte.
#[test]
fn type_4_is_early_mxfp4_in_gpt_oss_and_nowhere_else() {
    let (data, values) = mxfp4(4, true);
    let file = |architecture: &str| {
        File::of(architecture).u32(&format!("{architecture}.attention.head_count"), 2).tensor(tensor(
            "blk.0.ffn_down_exps.weight",
            &[2, 1, 64],
            4,
            data.clone(),
        ))
    };
    let module = "model.layers.0.mlp.experts.down_proj";
    for architecture in ["gptoss", "gpt-oss"] {
        let checkpoint = file(architecture).open().unwrap();
        assert_eq!(dequantized(&checkpoint, module), values);
        warned(&checkpoint, &["model.gguf", &format!("`{module}.weight`"), "type 4", "MXFP4"]);
    }
    let checkpoint = file("qwen3moe").open().unwrap();
    rejected(checkpoint.weight(module, None), &["model.gguf", module, "of type 4", "not supported"]);
}

#[test]
fn nvfp4_keeps_codes_and_scales() {
    let codes = bytes(32 * 12, 9);
    // Every byte that is a scale, NaN's place among them, which counts as zero.
    let scale = |group: usize| ((127 + 11 * group) % 128) as u8;
    let mut data = Vec::new();
    let mut groups = Vec::new();
    for (block, codes) in codes.chunks(32).enumerate() {
        let scales: Vec<u8> = (0..4).map(|group| scale(4 * block + group)).collect();
        data.extend(&scales);
        data.extend(codes);
        for (scale, codes) in scales.iter().zip(codes.chunks(8)) {
            let scale = if *scale == 0x7F { 0. } else { ue4m3(*scale) };
            groups.push((scale, codes.to_vec()));
        }
    }
    assert!((0..48).any(|group| scale(group) == 0x7F), "no group has the scale 0x7f");
    let expected = |global: &dyn Fn(usize) -> f32| -> Vec<u32> {
        let elements = groups.iter().enumerate().flat_map(|(group, (scale, codes))| {
            let scale = scale * global(group);
            (0..16).map(move |i| (e2m1(codes[i % 8] >> (4 * (i / 8)) & 15) * scale).to_bits())
        });
        elements.collect()
    };
    let file = File::of("qwen3moe")
        .u32("qwen3moe.attention.head_count", 2)
        .tensor(tensor("blk.0.ffn_down.weight", &[6, 128], 40, data.clone()))
        .tensor(tensor("blk.1.ffn_down.weight", &[6, 128], 40, data.clone()))
        .tensor(f32_tensor("blk.1.ffn_down.scale", &[1], &[0.37]))
        .tensor(f32_tensor("blk.1.ffn_down.input_scale", &[1], &[0.5]))
        .tensor(tensor("blk.0.ffn_up_exps.weight", &[3, 2, 128], 40, data.clone()))
        .tensor(f32_tensor("blk.0.ffn_up_exps.scale", &[3], &[0.37, 1.5, 0.001]));
    let checkpoint = file.open().unwrap();
    assert_eq!(checkpoint.tensor_names().count(), 3, "{:?}", checkpoint.tensor_names().collect::<Vec<_>>());
    assert_eq!(dequantized(&checkpoint, DOWN), expected(&|_| 1.));
    assert_eq!(dequantized(&checkpoint, "model.layers.1.mlp.down_proj"), expected(&|_| 0.37));
    let each = [0.37, 1.5, 0.001];
    assert_eq!(
        dequantized(&checkpoint, "model.layers.0.mlp.experts.up_proj"),
        expected(&|group| each[group / 16])
    );

    let mut negative = data;
    negative[1] = 0x80;
    let file = File::of("qwen3").u32("qwen3.attention.head_count", 2).tensor(tensor(
        "blk.0.ffn_down.weight",
        &[6, 128],
        40,
        negative,
    ));
    let weight = file.open().unwrap().weight(DOWN, None).unwrap();
    rejected(weight.to_dense(DType::F32, &Device::Cpu), &["model.gguf", DOWN, "unsigned E4M3", "0x80"]);
}

#[test]
fn global_scales_are_checked() {
    let nvfp4 = || tensor("blk.0.ffn_down.weight", &[6, 64], 40, vec![0; 6 * 36]);
    let base = || File::of("qwen3").u32("qwen3.attention.head_count", 2);
    let open = |file: File| file.open().unwrap();
    for (dims, values) in [(&[6u64][..], &[1f32; 6][..]), (&[1, 1], &[1.])] {
        let file = base().tensor(nvfp4()).tensor(f32_tensor("blk.0.ffn_down.scale", dims, values));
        rejected(open(file).weight(DOWN, None), &["`model.layers.0.mlp.down_proj.scale`", "one value"]);
    }
    let half = tensor("blk.0.ffn_down.scale", &[1], 1, vec![0; 2]);
    rejected(open(base().tensor(nvfp4()).tensor(half)).weight(DOWN, None), &["expected F32", "found F16"]);
    for value in [-1., f32::NAN] {
        let file = base().tensor(nvfp4()).tensor(f32_tensor("blk.0.ffn_down.scale", &[1], &[value]));
        let weight = open(file).weight(DOWN, None).unwrap();
        rejected(weight.to_dense(DType::F32, &Device::Cpu), &["finite magnitude", &value.to_string()]);
    }
    let q8_0 = tensor("blk.0.ffn_down.weight", &[6, 64], 8, vec![0; 6 * 2 * 34]);
    let file = base().tensor(q8_0).tensor(f32_tensor("blk.0.ffn_down.scale", &[1], &[1.]));
    rejected(open(file).weight(DOWN, None), &["down_proj.weight` with a global scale", "not supported"]);
}

#[test]
fn a_tensor_of_another_type_does_not_spoil_the_file() {
    // Q4_0_4_4, which was dropped, and one that there is not.
    for (type_id, name) in [(31, "type 31"), (99, "type 99")] {
        let file = File::of("qwen3")
            .u32("qwen3.attention.head_count", 2)
            .tensor(tensor("blk.0.ffn_down.weight", &[2, 1], type_id, Vec::new()))
            .tensor(f32_tensor("output_norm.weight", &[3], &[1., 2., 3.]));
        let checkpoint = file.open().unwrap();
        let parts = ["model.gguf", "`model.layers.0.mlp.down_proj.weight` of", name, "is not supported"];
        rejected(checkpoint.weight(DOWN, None), &parts);
        rejected(checkpoint.dense(&format!("{DOWN}.weight")), &parts);
        let norm = checkpoint.dense("model.norm.weight").unwrap().load(DType::F32, &Device::Cpu).unwrap();
        assert_eq!(norm.to_vec1::<f32>().unwrap(), [1., 2., 3.]);
    }
}

/// The order of rows that converters write for the architecture llama, as they say it: `reshape(heads, 2,
/// head_dim / 2, ..).swapaxes(1, 2)`.
fn permuted(rows: &[u32], heads: usize) -> Vec<u32> {
    let half = rows.len() / heads / 2;
    let at = |head: usize, part: usize, i: usize| rows[(head * 2 + part) * half + i];
    let index = (0..heads).flat_map(|head| (0..half).flat_map(move |i| [(head, 0, i), (head, 1, i)]));
    index.map(|(head, part, i)| at(head, part, i)).collect()
}

#[test]
fn rows_of_queries_and_keys_of_llama_are_put_back() {
    // 4 query heads, 2 key heads of 6 elements; every row is told by its number.
    let q_rows: Vec<u32> = (0..24).collect();
    let k_rows: Vec<u32> = (0..12).collect();
    let dense = |rows: &[u32]| rows.iter().flat_map(|row| [*row as f32, -(*row as f32)]).collect::<Vec<_>>();
    let q8_0 =
        |rows: &[u32]| rows.iter().flat_map(|row| [&[0, 0x3C][..], &[*row as u8; 32]].concat()).collect();
    let mxfp4 =
        |rows: &[u32]| rows.iter().flat_map(|row| [&[127 + *row as u8][..], &[0x22; 16]].concat()).collect();
    let (q, k) = (permuted(&q_rows, 4), permuted(&k_rows, 2));
    assert_eq!(q[..6], [0, 3, 1, 4, 2, 5]);
    let floats = |rows: &[u32]| rows.iter().map(|row| *row as f32).collect::<Vec<_>>();
    let file = |architecture: &str, q: &[u32], k: &[u32]| {
        File::of(architecture)
            .u32(&format!("{architecture}.attention.head_count"), 4)
            .u32(&format!("{architecture}.attention.head_count_kv"), 2)
            .tensor(f32_tensor("blk.0.attn_q.weight", &[24, 2], &dense(q)))
            .tensor(f32_tensor("blk.0.attn_q.bias", &[24], &floats(q)))
            .tensor(f32_tensor("blk.0.attn_k.bias", &[12], &floats(k)))
            .tensor(f32_tensor("blk.0.attn_v.bias", &[12], &floats(k)))
            .tensor(tensor("blk.0.attn_k.weight", &[12, 32], 8, q8_0(k)))
            .tensor(tensor("blk.1.attn_k.weight", &[12, 32], 39, mxfp4(k)))
            .open()
            .unwrap()
    };
    let llama = file("llama", &q, &k);
    let firsts = |checkpoint: &Checkpoint, name: &str| -> Vec<f32> {
        let tensor = checkpoint.tensor(name, None).unwrap().to_dense(DType::F32, &Device::Cpu).unwrap();
        let rows = tensor.dims()[0];
        tensor.reshape((rows, ())).unwrap().narrow(1, 0, 1).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    };
    let attention = |name: &str| format!("model.layers.0.self_attn.{name}");
    assert_eq!(firsts(&llama, &attention("q_proj.weight")), floats(&q_rows));
    assert_eq!(firsts(&llama, &attention("q_proj.bias")), floats(&q_rows));
    assert_eq!(firsts(&llama, &attention("k_proj.bias")), floats(&k_rows));
    assert_eq!(firsts(&llama, &attention("v_proj.bias")), floats(&k));
    assert_eq!(firsts(&llama, &attention("k_proj.weight")), floats(&k_rows));
    let powers: Vec<f32> = k_rows.iter().map(|row| 2f32.powi(*row as i32)).collect();
    assert_eq!(firsts(&llama, "model.layers.1.self_attn.k_proj.weight"), powers);
    // Other architectures rotate halves, and their rows are as they were.
    let qwen2 = file("qwen2", &q_rows, &k_rows);
    assert_eq!(firsts(&qwen2, &attention("q_proj.weight")), floats(&q_rows));
    assert_eq!(firsts(&qwen2, &attention("k_proj.weight")), floats(&k_rows));
}

/// Parts have the bits of the whole's parts; along K, a block of NVFP4 has four groups that lie together.
#[test]
fn parts_of_fp4_and_of_reordered_rows_are_those_of_the_whole() {
    let nvfp4: Vec<u8> =
        (0..24).flat_map(|block| [vec![40, 50, 60, 70], bytes(32, block)].concat()).collect();
    let rows = || numbers(24 * 128, 5);
    let q8_0 = |seed: u64| {
        (0..24 * 4u64).flat_map(|block| [vec![0, 0x3C], bytes(32, seed + block)].concat()).collect()
    };
    let checkpoint = File::of("llama")
        .u32("llama.attention.head_count", 4)
        .u32("llama.attention.head_count_kv", 4)
        .tensor(f32_tensor("blk.0.attn_q.weight", &[24, 128], &rows()))
        .tensor(f32_tensor("blk.0.attn_q.bias", &[24], &rows()[..24]))
        .tensor(tensor("blk.0.attn_k.weight", &[24, 128], 8, q8_0(7)))
        .tensor(tensor("blk.1.attn_k.weight", &[24, 128], 39, mxfp4(24 * 4, false).0))
        .tensor(tensor("blk.0.ffn_down.weight", &[12, 128], 40, nvfp4.clone()))
        .tensor(f32_tensor("blk.0.ffn_down.scale", &[1], &[0.37]))
        .tensor(tensor("blk.0.ffn_up_exps.weight", &[3, 4, 128], 40, nvfp4))
        .tensor(f32_tensor("blk.0.ffn_up_exps.scale", &[3], &[0.37, 1.5, 0.001]))
        .open()
        .unwrap();
    assert_eq!(checkpoint.tensor_names().count(), 6);
    for name in checkpoint.tensor_names() {
        let weight = checkpoint.tensor(name, None).unwrap();
        let dequantize = |weight: &Weight| weight.to_dense(DType::F32, &Device::Cpu).unwrap();
        let whole = dequantize(&weight);
        for (dim, &len) in weight.dims().iter().enumerate() {
            let unit = if dim + 1 == weight.dims().len() { weight.granularity() } else { 1 };
            for range in [0..unit, unit..len, len - unit..len].into_iter().filter(|range| !range.is_empty()) {
                let part = weight.narrow(dim, range.clone()).unwrap();
                let expected = whole.narrow(dim, range.start, range.len()).unwrap();
                assert_eq!(bits(&dequantize(&part)), bits(&expected), "{name} {dim} {range:?}");
                let global = 4 * 3;
                let share = weight.size_in_bytes() * range.len() / len;
                assert!(part.size_in_bytes() <= share + global, "{name} {dim} {range:?}");
            }
        }
    }
    let down = checkpoint.weight(DOWN, Some(128)).unwrap();
    assert_eq!(down.granularity(), 64);
    rejected(down.narrow(1, 0..16), &[DOWN, "multiples of 64", "0..16"]);
}
