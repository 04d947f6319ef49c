//! What is quantized to types of GGML: those without super-blocks bit for bit as by its reference, the K types with less error.

use super::common::tensors_of;
use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{Device, Tensor};
use candle_quant::format::GgmlType;
use std::path::Path;

#[test]
fn types_without_super_blocks_are_those_of_ggml() {
    let stored = tensors_of(
        &Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures/gguf/quants.safetensors"),
    );
    let (_, dims, bytes) = &stored["weights"];
    let weights: Vec<f32> = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    for kind in [GgmlType::Q4_0, GgmlType::Q4_1, GgmlType::Q5_0, GgmlType::Q5_1, GgmlType::Q8_0] {
        let (_, _, expected) = &stored[&kind.name().to_lowercase()];
        let width = expected.len() / dims[0];
        for (row, (weights, expected)) in
            weights.chunks_exact(dims[1]).zip(expected.chunks_exact(width)).enumerate()
        {
            let (mut blocks, mut values) = (Vec::new(), vec![0.; weights.len()]);
            kind.quantize(weights, false, &mut blocks, &mut values).unwrap();
            assert_eq!(blocks, expected, "{kind:?} row {row}");
            let (mut searched, mut better) = (Vec::new(), vec![0.; weights.len()]);
            kind.quantize(weights, true, &mut searched, &mut better).unwrap();
            assert_eq!(read(kind, &blocks), values, "{kind:?} row {row}");
            assert_eq!(read(kind, &searched), better, "{kind:?} row {row}");
            assert!(error(weights, &better) <= error(weights, &values), "{kind:?} row {row}");
        }
    }
}

/// The numbers that candle reads.
fn read(kind: GgmlType, blocks: &[u8]) -> Vec<f32> {
    let dtype = match kind {
        GgmlType::Q4_0 => GgmlDType::Q4_0,
        GgmlType::Q4_1 => GgmlDType::Q4_1,
        GgmlType::Q5_0 => GgmlDType::Q5_0,
        GgmlType::Q5_1 => GgmlDType::Q5_1,
        other => {
            assert_eq!(other, GgmlType::Q8_0);
            GgmlDType::Q8_0
        }
    };
    let elements = blocks.len() / dtype.type_size() * dtype.block_size();
    let storage = QStorage::from_data(blocks.into(), &Device::Cpu, dtype).unwrap();
    let tensor = QTensor::new(storage, elements).unwrap().dequantize(&Device::Cpu).unwrap();
    tensor.to_vec1().unwrap()
}

fn error(weights: &[f32], values: &[f32]) -> f64 {
    weights.iter().zip(values).map(|(a, b)| f64::from(a - b).powi(2)).sum()
}

/// Normal numbers, by Box and Muller.
fn normal(count: usize) -> Vec<f32> {
    let mut state = 26u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    };
    (0..count)
        .map(|_| ((-2. * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos()) as f32)
        .collect()
}

/// Of normal numbers, and of some with outliers: less is lost than by llama.cpp's quantizers, as candle has them. What is said of
/// the values is what a reader dequantizes.
#[test]
fn k_types_lose_less_than_those_of_ggml() {
    let mut outliers = normal(256 * 64);
    outliers.iter_mut().step_by(61).for_each(|weight| *weight *= 12.);
    let shifted: Vec<f32> = normal(256 * 64).iter().map(|weight| weight.abs() + 0.5).collect();
    for (kind, dtype, share) in [
        (GgmlType::Q2K, GgmlDType::Q2K, 0.97),
        (GgmlType::Q3K, GgmlDType::Q3K, 0.97),
        (GgmlType::Q4K, GgmlDType::Q4K, 0.97),
        (GgmlType::Q5K, GgmlDType::Q5K, 0.97),
        (GgmlType::Q6K, GgmlDType::Q6K, 0.97),
    ] {
        for (case, weights) in
            [("normal", normal(256 * 64)), ("outliers", outliers.clone()), ("shifted", shifted.clone())]
        {
            let (mut blocks, mut values) = (Vec::new(), vec![0.; weights.len()]);
            kind.quantize(&weights, false, &mut blocks, &mut values).unwrap();
            let tensor = Tensor::new(weights.as_slice(), &Device::Cpu).unwrap();
            let theirs = QTensor::quantize(&tensor, dtype).unwrap();
            let theirs: Vec<f32> = theirs.dequantize(&Device::Cpu).unwrap().to_vec1().unwrap();
            let storage = QStorage::from_data(blocks.into(), &Device::Cpu, dtype).unwrap();
            let read = QTensor::new(storage, weights.len()).unwrap().dequantize(&Device::Cpu).unwrap();
            let read: Vec<f32> = read.to_vec1().unwrap();
            for (value, read) in values.iter().zip(&read) {
                assert!((value - read).abs() <= 1e-5 * read.abs().max(1e-3), "{value} {read}");
            }
            let (ours, theirs) = (error(&weights, &read), error(&weights, &theirs));
            println!("{kind:?} {case}: {:.4} of ggml's", ours / theirs);
            assert!(ours <= share * theirs, "{kind:?} {case}: {ours} {theirs}");
        }
    }
}
