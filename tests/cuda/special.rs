//! Numbers at the edge: global scales, extreme and missing scales, infinities and NaN.

use crate::expected::{symmetric, Expected, KINDS};
use crate::packed::{flat, random, tensor};
use crate::{alike, device};
use candle_core::{DType, Device, Tensor};
use candle_quant::format::Scale;
use candle_quant::{QuantFormat, QuantTensor};

fn product(device: &Device, weight: &QuantTensor, x: &Tensor) -> Tensor {
    let there = weight.to_device(device).unwrap().matmul(&x.to_device(device).unwrap(), None).unwrap();
    there.to_device(&Device::Cpu).unwrap()
}

/// The same codes with other scales.
fn with_scales(weight: &QuantTensor, scales: Vec<u8>, global: Option<Tensor>) -> QuantTensor {
    let scales = Tensor::from_vec(scales, weight.scales().dims(), &Device::Cpu).unwrap();
    QuantTensor::new(weight.format(), weight.packed().clone(), scales, None, global).unwrap()
}

fn scale_bytes(weight: &QuantTensor) -> Vec<u8> {
    weight.scales().flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn global_scales() {
    let Some(device) = device() else { return };
    for format in [QuantFormat::NVFP4, QuantFormat::MXFP4, QuantFormat::MXFP8] {
        let plain = random(&[40, 192], format, DType::F16, 200);
        let global = Tensor::new(&[0.0371f32], &Device::Cpu).unwrap();
        let weight = with_scales(&plain, scale_bytes(&plain), Some(global));
        for m in [1, 4, 8] {
            for dtype in [DType::F16, DType::F32] {
                let x = tensor(&[m, 192], 201).to_dtype(dtype).unwrap();
                let what = format!("{format} with a global scale");
                Expected::new(&weight, &x, None).check(&product(&device, &weight, &x), dtype, &what);
            }
        }
    }
    let stack = random(&[3, 40, 64], QuantFormat::NVFP4, DType::F16, 202);
    let globals = [0.5f32, 0.03, 2.];
    let global = Tensor::new(&globals, &Device::Cpu).unwrap();
    let stack = with_scales(&stack, scale_bytes(&stack), Some(global));
    let x = tensor(&[2, 64], 203).to_dtype(DType::F16).unwrap();
    let products = product(&device, &stack, &x);
    for (index, global) in globals.into_iter().enumerate() {
        let part = |tensor: &Tensor| tensor.get(index).unwrap().contiguous().unwrap();
        let one = QuantTensor::new(
            QuantFormat::NVFP4,
            part(stack.packed()),
            part(stack.scales()),
            None,
            Some(Tensor::new(global, &Device::Cpu).unwrap()),
        );
        let expected = Expected::new(&one.unwrap(), &x, None);
        expected.check_elements(&products.get(index).unwrap(), DType::F16, "global scale of a stack");
    }
}

fn is_affine(format: &QuantFormat) -> bool {
    format.has_biases() && format.scale() == Scale::Float
}

/// Codes around zero, with scales that the tensor cores take and with f32 scales, dequantized and multiplied.
#[test]
fn symmetric_codes() {
    let Some(device) = device() else { return };
    for format in KINDS.into_iter().filter(is_affine) {
        for (scales, x) in [(DType::F16, DType::F16), (DType::F32, DType::F16), (DType::F32, DType::F32)] {
            let weight = symmetric(&random(&[40, 256], format, scales, 240));
            // Many rows of 16 bits meet weights rounded to as many, which is another bound.
            let most = if x == DType::F32 { 200 } else { 16 };
            for m in [1, 8, most] {
                let x = tensor(&[m, 256], 241).to_dtype(x).unwrap();
                let what = format!("{format}, {scales:?} scales, M={m}");
                Expected::new(&weight, &x, None).check(&product(&device, &weight, &x), x.dtype(), &what);
            }
        }
    }
}

/// The scale 0 is 2^-127, and neighbours of very different size do not disturb each other.
#[test]
fn extreme_scales() {
    let Some(device) = device() else { return };
    for format in [QuantFormat::MXFP4, QuantFormat::MXFP8] {
        let plain = random(&[40, 320], format, DType::F16, 210);
        let scales = scale_bytes(&plain).into_iter().enumerate().map(|(i, scale)| match (i / 10 + i) % 5 {
            0 => 0,
            1 => scale - 60,
            2 => 127 + 90,
            _ => scale,
        });
        let weight = with_scales(&plain, scales.collect(), None);
        for m in [1, 4, 8] {
            for dtype in [DType::BF16, DType::F32] {
                let x = tensor(&[m, 320], 211).to_dtype(dtype).unwrap();
                let expected = Expected::new(&weight, &x, None);
                expected.check_elements(&product(&device, &weight, &x), dtype, &format!("{format} M={m}"));
            }
        }
    }
}

/// A group whose scale is NaN, and a code that is, make the products of their row NaN and of no other.
#[test]
fn scales_and_codes_that_are_nan() {
    let Some(device) = device() else { return };
    for format in [QuantFormat::MXFP4, QuantFormat::MXFP8, QuantFormat::NVFP4] {
        let plain = random(&[40, 160], format, DType::F16, 220);
        let groups = 160 / format.group_size();
        let mut scales = scale_bytes(&plain);
        scales[7 * groups + 1] = if format == QuantFormat::NVFP4 { 0x7f } else { 255 };
        scales[21 * groups + groups - 1] = 255;
        let mut weight = with_scales(&plain, scales, None);
        let mut rows = vec![7, 21];
        if format == QuantFormat::MXFP8 {
            let mut words: Vec<u32> = weight.packed().flatten_all().unwrap().to_vec1().unwrap();
            words[30 * 40 + 3] |= 0x7f00;
            words[31 * 40 + 39] |= 0xff00_0000;
            rows.extend([30, 31]);
            let packed = Tensor::from_vec(words, weight.packed().dims(), &Device::Cpu).unwrap();
            weight = QuantTensor::new(format, packed, weight.scales().clone(), None, None).unwrap();
        }
        let finite = Expected::new(&plain, &tensor(&[8, 160], 221).to_dtype(DType::F16).unwrap(), None);
        for m in [1, 3, 8] {
            let x = tensor(&[8, 160], 221).narrow(0, 0, m).unwrap().contiguous().unwrap();
            for dtype in [DType::F16, DType::F32] {
                let products = flat(&product(&device, &weight, &x.to_dtype(dtype).unwrap()));
                for (i, product) in products.iter().enumerate() {
                    let what = format!("{format} M={m} {dtype:?} row {}", i % 40);
                    if rows.contains(&(i % 40)) {
                        assert!(product.is_nan(), "{what}: {product}");
                    } else if dtype == DType::F16 {
                        let expected = finite.products[i];
                        assert!(
                            (f64::from(*product) - expected).abs() < 0.01 + 0.01 * expected.abs(),
                            "{what}"
                        );
                    }
                }
            }
        }
    }
}

/// Infinities and NaN of x show in the products of their row of x and in no other.
#[test]
fn x_that_is_not_finite() {
    let Some(device) = device() else { return };
    for format in KINDS {
        let weight = random(&[40, 512], format, DType::F16, 230);
        for dtype in [DType::F16, DType::BF16, DType::F32] {
            for m in [1, 2, 5, 16] {
                let clean = tensor(&[m, 512], 231).to_dtype(dtype).unwrap();
                let expected = Expected::new(&weight, &clean, None);
                for &bad in alike(&[f32::INFINITY, f32::NEG_INFINITY, f32::NAN], m) {
                    let mut values = flat(&clean);
                    let row = m / 2;
                    values[row * 512 + 201] = bad;
                    let x =
                        Tensor::from_vec(values, (m, 512), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
                    let products = product(&device, &weight, &x);
                    let what = format!("{format} {dtype:?} M={m} {bad}");
                    assert!(flat(&products.get(row).unwrap()).iter().all(|y| !y.is_finite()), "{what}");
                    // The others are what they would be.
                    let others = flat(&products).into_iter().enumerate().map(|(i, y)| match i / 40 == row {
                        true => expected.products[i] as f32,
                        false => y,
                    });
                    let others = Tensor::from_iter(others, &Device::Cpu).unwrap().reshape((m, 40)).unwrap();
                    let others = others.to_dtype(dtype).unwrap();
                    expected.check_elements(&others, dtype, &what);
                }
            }
        }
    }
}

/// Activations far apart in size, as outliers of real models are, and beyond the range of a half.
#[test]
fn x_of_any_size() {
    let Some(device) = device() else { return };
    for format in KINDS {
        let weight = random(&[40, 512], format, DType::F16, 240);
        for (dtype, sizes) in
            [(DType::BF16, [1e-30f32, 1e30]), (DType::F16, [6e-8, 300.]), (DType::BF16, [1., 1e4])]
        {
            let values = flat(&tensor(&[3, 512], 241)).into_iter().enumerate();
            let values =
                values.map(|(i, value)| if i % 97 == 0 { value * sizes[1] } else { value * sizes[0] });
            let x = Tensor::from_iter(values, &Device::Cpu).unwrap().reshape((3, 512)).unwrap();
            let x = x.to_dtype(dtype).unwrap();
            let products = product(&device, &weight, &x);
            Expected::new(&weight, &x, None).check_elements(&products, dtype, &format!("{format} {sizes:?}"));
        }
    }
}
