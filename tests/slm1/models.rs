//! Packed weights bit for bit, and whole models against the same weights as dense elements.

use crate::checkpoint::folder_of;
use crate::common::distance;
use crate::fixtures::{model_name, values_as_stored};
use crate::writer::{File, Kind, Model as Shape};
use crate::{entry, fixture, open, open_with, u32_at, u64_at};
use candle_core::{DType, Device, Tensor};
use candle_nn::rotary_emb::{rope, rope_i};
use candle_quant::checkpoint::slm1::{self, NibbleOrder, Slm1Options as Reading};
use candle_quant::checkpoint::Weight;
use candle_quant::{Checkpoint, QuantFormat};
use candle_quant_models::Model;
use candle_quant_tools::convert::{self, ConvertOptions, ConvertPlan, Recipe, RunOptions, Spec};
use std::collections::HashMap;
use std::fs;

/// 4-bit blocks, or 8-bit rows, of `hidden` elements and their format, if there is one.
const CASES: [(u32, Kind, Option<usize>); 14] = [
    (256, Kind::Q8, Some(128)),
    (192, Kind::Q8, Some(64)),
    (96, Kind::Q8, Some(32)),
    (40, Kind::Q8, None),
    (256, Kind::Q4(32, NibbleOrder::Pairs), Some(32)),
    (256, Kind::Q4(64, NibbleOrder::Pairs), Some(64)),
    (256, Kind::Q4(128, NibbleOrder::Pairs), Some(128)),
    (256, Kind::Q4(256, NibbleOrder::Pairs), Some(128)),
    (96, Kind::Q4(96, NibbleOrder::Pairs), Some(32)),
    (96, Kind::Q4(48, NibbleOrder::Pairs), None),
    (64, Kind::Q4(16, NibbleOrder::Pairs), None),
    (256, Kind::Q4(64, NibbleOrder::HalfBlock), Some(64)),
    (96, Kind::Q4(96, NibbleOrder::HalfBlock), Some(32)),
    (64, Kind::Q4(16, NibbleOrder::HalfBlock), None),
];

/// All rows as long as the hidden size.
fn shape(hidden: u32) -> Shape {
    Shape { hidden, layers: 1, heads: 4, kv_heads: 2, head_dim: hidden / 4, ffn: hidden, tied: false }
}

fn reading(kind: Kind) -> Reading {
    let nibbles = match kind {
        Kind::Q4(_, nibbles) => nibbles,
        _ => NibbleOrder::default(),
    };
    Reading { nibbles, ..Reading::default() }
}

fn open_case(file: &File, kind: Kind) -> Checkpoint {
    open_with(&file.bytes, &reading(kind)).unwrap().checkpoint().clone()
}

#[test]
fn codes_and_scales_are_kept_bit_for_bit() {
    for (hidden, kind, group_size) in CASES {
        let shape = shape(hidden);
        let file = shape.write(kind, &[]);
        let checkpoint = open_case(&file, kind);
        for (name, (dims, values)) in &file.values {
            let stored = values_as_stored(&checkpoint, name, shape.head_dim as usize);
            let bits = |values: &[f32]| values.iter().map(|value| (value + 0.).to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&stored), bits(values), "{kind:?} {name}");
            let weight = checkpoint.tensor(&model_name(name), None).unwrap();
            let format = match &weight {
                Weight::Packed(packed) => Some(packed.format()),
                _ => None,
            };
            let bits = if matches!(kind, Kind::Q8) { 8 } else { 4 };
            let expected = group_size.filter(|_| dims.len() == 2);
            assert_eq!(
                format,
                expected.map(|group_size| QuantFormat::symmetric(bits, group_size).unwrap()),
                "{kind:?} {name}"
            );
        }
        let dequantized =
            checkpoint.warnings().iter().any(|warning| warning.contains("dequantized when they are loaded"));
        assert_eq!(dequantized, group_size.is_none(), "{kind:?}");
    }
}

/// The model of the same numbers, dense.
fn dense(checkpoint: &Checkpoint) -> (tempfile::TempDir, Checkpoint) {
    let dequantize = |name: &str| {
        let tensor = checkpoint.tensor(name, None).unwrap();
        (name.to_owned(), tensor.to_dense(DType::F32, &Device::Cpu).unwrap())
    };
    let tensors: HashMap<_, _> = checkpoint.tensor_names().map(dequantize).collect();
    let dir = tempfile::tempdir().unwrap();
    candle_core::safetensors::save(&tensors, dir.path().join("model.safetensors")).unwrap();
    fs::write(dir.path().join("config.json"), checkpoint.config().to_string()).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    (dir, checkpoint)
}

fn logits(checkpoint: &Checkpoint) -> Tensor {
    let ids: Vec<u32> = (0..30).map(|i| i * 37 % 260).collect();
    let ids = Tensor::new(ids, &Device::Cpu).unwrap().unsqueeze(0).unwrap();
    let mut model = Model::load(checkpoint, DType::F32, &Device::Cpu).unwrap();
    model.forward(&ids, 0).unwrap().squeeze(0).unwrap()
}

#[test]
fn models_compute_what_dense_ones_do() {
    let fixtures =
        ["f32", "q8_0", "q4_0", "q4_0_tied", "q4_0_gqa_b32"].map(|name| Checkpoint::open(fixture(name)));
    let cases = CASES.map(|(hidden, kind, _)| {
        let file = Shape { layers: 2, ..shape(hidden) }.write(kind, &[]);
        Ok(open_case(&file, kind))
    });
    for checkpoint in fixtures.into_iter().chain(cases) {
        let checkpoint = checkpoint.unwrap();
        let (_dir, expected) = dense(&checkpoint);
        let distance = distance(&logits(&checkpoint), &logits(&expected));
        assert!(distance.max < 3e-4, "{checkpoint:?}: {distance:?}");
    }
}

/// The scores of queries and keys as the format rotates them, on the rows as they are stored, are those of this
/// crate's rotation on the rows as they are loaded.
#[test]
fn rotation_of_adjacent_pairs_is_that_of_halves_on_other_rows() {
    let (head_dim, len) = (8, 5);
    let shape = Shape { hidden: 32, layers: 1, heads: 4, kv_heads: 4, head_dim: 8, ffn: 32, tied: true };
    let file = shape.write(Kind::F32, &[]);
    let opened = open(&file.bytes).unwrap();
    let x = Tensor::from_vec(crate::packed::numbers(len * 32, 3), (len, 32), &Device::Cpu).unwrap();
    let angles: Vec<f32> = (0..len)
        .flat_map(|t| {
            (0..head_dim / 2).map(move |i| t as f32 * 10000f32.powf(-2. * i as f32 / head_dim as f32))
        })
        .collect();
    let angles = Tensor::from_vec(angles, (len, head_dim / 2), &Device::Cpu).unwrap();
    let (cos, sin) = (angles.cos().unwrap(), angles.sin().unwrap());
    let heads = |weight: &Tensor| {
        let y = x.matmul(&weight.t().unwrap()).unwrap().reshape((1, len, 4, head_dim)).unwrap();
        y.transpose(1, 2).unwrap().contiguous().unwrap()
    };
    let scores = |weights: [Tensor; 2],
                  rotate: fn(&Tensor, &Tensor, &Tensor) -> candle_core::Result<Tensor>| {
        let [q, k] = weights.map(|weight| rotate(&heads(&weight), &cos, &sin).unwrap());
        q.matmul(&k.t().unwrap()).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()
    };
    let stored = ["wq", "wk"].map(|name| {
        let (dims, values) = &file.values[&format!("layers.0.{name}.weight")];
        Tensor::from_vec(values.clone(), dims.as_slice(), &Device::Cpu).unwrap()
    });
    let loaded = ["q_proj", "k_proj"].map(|name| {
        let name = format!("model.layers.0.self_attn.{name}.weight");
        opened.checkpoint().dense(&name).unwrap().load(DType::F32, &Device::Cpu).unwrap()
    });
    for (pairs, halves) in scores(stored, rope_i).into_iter().zip(scores(loaded, rope)) {
        assert!((pairs - halves).abs() < 1e-5, "{pairs} {halves}");
    }
}

/// MLX has no symmetric codes: biases say what they mean, where nothing is rounded by that.
#[test]
fn codes_and_scales_become_those_of_mlx() {
    for (hidden, kind, group_size) in CASES {
        let Some(group_size) = group_size else { continue };
        let mut file = shape(hidden).write(kind, &[]);
        let keep = ConvertOptions::mlx(Recipe::safe(Spec::Keep));
        let error = ConvertPlan::new(&open_case(&file, kind), &keep).unwrap_err().to_string();
        let parts = ["whose products with codes are rounded", "requantize or dequantize it"];
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        for (name, (dims, values)) in &file.values {
            let entry = entry(&file.bytes, name);
            let (at, block) = (u64_at(&file.bytes, entry + 48) as usize, u32_at(&file.bytes, entry + 56));
            let block = if block == 0 { dims[dims.len() - 1] } else { block as usize };
            for scale in file.bytes[at..at + values.len() / block * 4].as_chunks_mut().0 {
                *scale = (u32::from_le_bytes(*scale) & !0xFFF).to_le_bytes();
            }
        }
        let folder = folder_of(&[("model.slm", &file.bytes)]);
        let source =
            slm1::open(folder.path().join("model.slm"), &reading(kind)).unwrap().checkpoint().clone();
        let out = folder.path().join("out");
        convert::convert(&ConvertPlan::new(&source, &keep).unwrap(), &out, &RunOptions::default(), &|_| ())
            .unwrap();
        let written = Checkpoint::open(out).unwrap();
        let mut packed = 0;
        for name in source.tensor_names() {
            let bits = |checkpoint: &Checkpoint| -> Vec<u32> {
                let dequantized =
                    checkpoint.tensor(name, None).unwrap().to_dense(DType::F32, &Device::Cpu).unwrap();
                dequantized
                    .flatten_all()
                    .unwrap()
                    .to_vec1::<f32>()
                    .unwrap()
                    .into_iter()
                    .map(f32::to_bits)
                    .collect()
            };
            assert_eq!(bits(&source), bits(&written), "{kind:?} {name}");
            let format = written.tensor(name, None).unwrap().format_name();
            packed += usize::from(format.ends_with(&format!("-bit g{group_size}")));
        }
        assert_eq!(packed, 9, "{kind:?}");
    }
}
