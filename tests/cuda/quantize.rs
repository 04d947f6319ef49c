//! Dequantizing, gathering and quantizing: the bits of the CPU.

use crate::device;
use crate::expected::{formats, symmetric};
use crate::packed::{bits, flat, numbers, random, refused, tensor};
use candle_core::{DType, Device, Tensor};
use candle_quant::format::Scale;
use candle_quant::{QuantFormat, QuantTensor};

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Bits of elements and not of their f32, among which NaN may differ.
#[track_caller]
fn assert_same(actual: &Tensor, expected: &Tensor, what: &str) {
    assert_eq!((actual.dims(), actual.dtype()), (expected.dims(), expected.dtype()), "{what}");
    for (i, (actual, expected)) in flat(actual).iter().zip(flat(expected)).enumerate() {
        let same = actual.to_bits() == expected.to_bits() || (actual.is_nan() && expected.is_nan());
        assert!(same, "{what}: element {i}: {actual}, not {expected}");
    }
}

#[test]
fn weights_are_dequantized_as_on_the_cpu() {
    let Some(device) = device() else { return };
    for (seed, format) in formats().enumerate() {
        let k = 3 * format.granularity().max(32);
        for scales in FLOATS {
            for dims in [&[9, k][..], &[2, 3, k]] {
                let weight = random(dims, format, scales, 400 + seed as u64);
                let there = weight.to_device(&device).unwrap();
                for dtype in FLOATS {
                    let actual = there.dequantize(dtype).unwrap();
                    assert!(actual.device().same_device(&device));
                    let what = format!("{weight:?} to {dtype:?}");
                    assert_same(&actual, &weight.dequantize(dtype).unwrap(), &what);
                }
            }
            if format.scale() != Scale::Float {
                break;
            }
        }
    }
    let weight = random(&[9, 64], QuantFormat::MXFP4, DType::F32, 400).to_device(&device).unwrap();
    assert!(weight.dequantize(DType::F64).unwrap_err().to_string().contains("use F32, F16 or BF16"));
}

/// All scale bytes, which include NaN, subnormals, and products beyond the range of the result.
#[test]
fn every_scale_byte_is_decoded_as_on_the_cpu() {
    let Some(device) = device() else { return };
    for format in QuantFormat::all().into_iter().filter(|format| format.scale() != Scale::Float) {
        let k = 256 * format.group_size();
        let plain = random(&[2, k], format, DType::F32, 410);
        let scales: Vec<u8> = (0..512).map(|i| i as u8).collect();
        let scales = Tensor::from_vec(scales, (2, 256), &Device::Cpu).unwrap();
        for global in [None, Some(Tensor::new(3.7e-3f32, &Device::Cpu).unwrap())] {
            let what = format!("{format}, global scale {global:?}");
            let (packed, scales) = (plain.packed().clone(), scales.clone());
            let weight = QuantTensor::new(format, packed, scales, None, global).unwrap();
            for dtype in FLOATS {
                let actual = weight.to_device(&device).unwrap().dequantize(dtype).unwrap();
                assert_same(&actual, &weight.dequantize(dtype).unwrap(), &format!("{what} to {dtype:?}"));
            }
        }
    }
}

#[test]
fn symmetric_codes_are_decoded_as_on_the_cpu() {
    let Some(device) = device() else { return };
    for format in QuantFormat::all().into_iter().filter(|format| format.has_biases()) {
        for scales in FLOATS {
            let weight = symmetric(&random(&[5, 384], format, scales, 430));
            let there = weight.to_device(&device).unwrap();
            let what = format!("{weight:?} with {scales:?} scales");
            assert_same(
                &there.dequantize(DType::F32).unwrap(),
                &weight.dequantize(DType::F32).unwrap(),
                &what,
            );
        }
    }
}

#[test]
fn stacks_with_global_scales_are_decoded_as_on_the_cpu() {
    let Some(device) = device() else { return };
    let plain = random(&[3, 5, 64], QuantFormat::NVFP4, DType::F32, 420);
    let global = Tensor::new(&[0.37f32, 1.1, 5e-3], &Device::Cpu).unwrap();
    let (packed, scales) = (plain.packed().clone(), plain.scales().clone());
    let weight = QuantTensor::new(QuantFormat::NVFP4, packed, scales, None, Some(global)).unwrap();
    let there = weight.to_device(&device).unwrap();
    assert_same(&there.dequantize(DType::F32).unwrap(), &weight.dequantize(DType::F32).unwrap(), "stack");
    let (part, there) = (weight.narrow(0, 1, 2).unwrap(), there.narrow(0, 1, 2).unwrap());
    assert_same(
        &there.dequantize(DType::F32).unwrap(),
        &part.dequantize(DType::F32).unwrap(),
        "part of a stack",
    );
}

#[test]
fn rows_are_gathered_as_on_the_cpu() {
    let Some(device) = device() else { return };
    for format in formats() {
        let k = 3 * format.granularity().max(32);
        let table = random(&[9, k], format, DType::F16, 430);
        let there = table.to_device(&device).unwrap();
        for ids in [DType::U8, DType::U32, DType::I64] {
            let ids = Tensor::new(&[[8u32, 0, 3], [3, 3, 7]], &Device::Cpu).unwrap().to_dtype(ids).unwrap();
            let rows = there.embed(&ids.to_device(&device).unwrap(), DType::BF16).unwrap();
            assert_same(
                &rows,
                &table.embed(&ids, DType::BF16).unwrap(),
                &format!("{format} {:?}", ids.dtype()),
            );
        }
    }
}

/// The host does not read the ids.
#[test]
fn rows_that_a_table_does_not_have_are_nan() {
    let Some(device) = device() else { return };
    let table = random(&[9, 64], QuantFormat::MXFP4, DType::F16, 440).to_device(&device).unwrap();
    let nan_rows = |ids: Tensor| -> Vec<bool> {
        let rows = table.embed(&ids.to_device(&device).unwrap(), DType::F16).unwrap();
        let rows = flat(&rows);
        rows.chunks(64).map(|row| row.iter().all(|value| value.is_nan())).collect()
    };
    assert_eq!(
        nan_rows(Tensor::new(&[0u32, 9, 8, u32::MAX], &Device::Cpu).unwrap()),
        [false, true, false, true]
    );
    assert_eq!(nan_rows(Tensor::new(&[-1i64, 3, 1 << 40], &Device::Cpu).unwrap()), [true, false, true]);
    assert_eq!(nan_rows(Tensor::new(&[200u8, 1], &Device::Cpu).unwrap()), [true, false]);
    let ids = Tensor::new(&[0f32], &device).unwrap();
    let told = refused(table.embed(&ids, DType::F32));
    assert!(told.contains("ids: expected dtype U8, U32 or I64, found F32"), "{told}");
}

#[test]
fn weights_are_quantized_as_on_the_cpu() {
    let Some(device) = device() else { return };
    for (seed, format) in QuantFormat::all().into_iter().enumerate() {
        let k = 3 * format.group_size().max(32);
        for dtype in FLOATS {
            for dims in [&[7, k][..], &[2, 3, k]] {
                let dense = tensor(dims, 450 + seed as u64).to_dtype(dtype).unwrap();
                let expected = QuantTensor::quantize(&dense, format).unwrap();
                let actual = QuantTensor::quantize(&dense.to_device(&device).unwrap(), format).unwrap();
                assert!(actual.device().same_device(&device));
                assert_same_parts(&actual, &expected);
            }
        }
    }
}

#[track_caller]
fn assert_same_parts(actual: &QuantTensor, expected: &QuantTensor) {
    let what = format!("{expected:?}");
    let words = |weight: &QuantTensor| weight.packed().flatten_all().unwrap().to_vec1::<u32>().unwrap();
    assert_eq!(words(actual), words(expected), "{what}: codes");
    assert_eq!(actual.scales().dtype(), expected.scales().dtype(), "{what}");
    assert_eq!(bits(actual.scales()), bits(expected.scales()), "{what}: scales");
    assert_eq!(actual.biases().map(bits), expected.biases().map(bits), "{what}: biases");
    assert_eq!(actual.global_scale().map(bits), expected.global_scale().map(bits), "{what}: global scale");
}

/// Zeros, one sign, subnormals, a constant, powers of two; NVFP4 with a global scale.
#[test]
fn unusual_weights_are_quantized_as_on_the_cpu() {
    let Some(device) = device() else { return };
    let usual = numbers(128, 470);
    let scaled = |factor: f32| usual.iter().map(|value| value * factor).collect::<Vec<f32>>();
    let positive: Vec<f32> = usual.iter().map(|value| value.abs()).collect();
    let powers: Vec<f32> =
        (0..128).map(|i| (i as f32 - 64.).exp2() * if i % 3 == 0 { -1. } else { 1. }).collect();
    let zeros_of_both_signs: Vec<f32> = (0..128).map(|i| if i % 2 == 0 { 0. } else { -0. }).collect();
    for format in QuantFormat::all() {
        for row in [
            vec![0.; 128],
            zeros_of_both_signs.clone(),
            vec![-1.37; 128],
            positive.clone(),
            scaled(1e-40),
            scaled(1e30),
            scaled(3e3),
            powers.clone(),
        ] {
            let dense = Tensor::from_vec(row, (1, 128), &Device::Cpu).unwrap();
            let expected = QuantTensor::quantize(&dense, format).unwrap();
            let actual = QuantTensor::quantize(&dense.to_device(&device).unwrap(), format).unwrap();
            assert_same_parts(&actual, &expected);
        }
    }
}

/// Values of tables, and what lies half way between two of them.
#[test]
fn halfway_between_values_of_a_table_is_as_on_the_cpu() {
    let Some(device) = device() else { return };
    for format in [QuantFormat::NF4, QuantFormat::FP4] {
        let codes: Vec<u32> = [0x7654_3210, 0xFEDC_BA98].repeat(4);
        let codes = Tensor::from_vec(codes, (1, 8), &Device::Cpu).unwrap();
        let one = Tensor::ones((1, 1), DType::F32, &Device::Cpu).unwrap();
        let table = QuantTensor::new(format, codes, one, None, None).unwrap();
        let mut values = flat(&table.dequantize(DType::F32).unwrap());
        values.sort_by(f32::total_cmp);
        values.dedup();
        let halfway = values.windows(2).map(|pair| (pair[0] + pair[1]) / 2.);
        let mut row: Vec<f32> = values.iter().copied().chain(halfway).collect();
        row.resize(64, 0.);
        let dense = Tensor::from_vec(row, (1, 64), &Device::Cpu).unwrap();
        let expected = QuantTensor::quantize(&dense, format).unwrap();
        let actual = QuantTensor::quantize(&dense.to_device(&device).unwrap(), format).unwrap();
        assert_same_parts(&actual, &expected);
    }
}

#[test]
fn weights_that_cannot_be_encoded_are_refused() {
    let Some(device) = device() else { return };
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut row = numbers(4096, 480);
        row[4001] = bad;
        let dense = Tensor::from_vec(row, (32, 128), &device).unwrap();
        let error = QuantTensor::quantize(&dense, QuantFormat::MXFP8).unwrap_err().to_string();
        assert!(error.contains("expected finite numbers"), "{error}");
    }
    let dense = Tensor::zeros((2, 128), DType::U32, &device).unwrap();
    assert!(QuantTensor::quantize(&dense, QuantFormat::MXFP8).is_err());
}
