//! Operands that are parts of other tensors, and devices that do not fit.

use crate::expected::{Expected, KINDS};
use crate::packed::{bits, random, refused, tensor};
use crate::{device, nth_device};
use candle_core::{DType, Device, Tensor};
use candle_quant::{nn, Linear, QuantFormat, QuantTensor, SuperBlocks};

/// x that begins in the middle of its memory, at a multiple of 16 bytes or not.
#[test]
fn x_at_an_offset() {
    let Some(device) = device() else { return };
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        for format in [KINDS[0], QuantFormat::NVFP4] {
            let weight = random(&[40, 128], format, DType::F16, 300);
            let w = weight.to_device(&device).unwrap();
            let all = tensor(&[5 * 128 + 40], 301).to_dtype(dtype).unwrap();
            let there = all.to_device(&device).unwrap();
            for offset in [0, 1, 3, 8, 16, 37] {
                let part = |all: &Tensor| all.narrow(0, offset, 3 * 128).unwrap().reshape((3, 128)).unwrap();
                let product = w.matmul(&part(&there), None).unwrap();
                let what = format!("{format} {dtype:?} from element {offset} on");
                Expected::new(&weight, &part(&all), None).check(&product, dtype, &what);
            }
        }
    }
}

#[test]
fn x_that_is_not_contiguous() {
    let Some(device) = device() else { return };
    let weight = random(&[11, 128], KINDS[0], DType::F16, 310);
    let w = weight.to_device(&device).unwrap();
    let turned = tensor(&[128, 6], 311).to_dtype(DType::F16).unwrap();
    let cut = tensor(&[4, 300], 312).to_dtype(DType::F16).unwrap();
    let there = |x: &Tensor| x.to_device(&device).unwrap();
    let product = w.matmul(&there(&turned).t().unwrap(), None).unwrap();
    Expected::new(&weight, &turned.t().unwrap(), None).check(&product, DType::F16, "transposed");
    let product = w.matmul(&there(&cut).narrow(1, 7, 128).unwrap(), None).unwrap();
    Expected::new(&weight, &cut.narrow(1, 7, 128).unwrap(), None).check(&product, DType::F16, "cut");
}

/// Rows of a weight, as ranks of tensor parallelism have them, give slices of the product.
#[test]
fn parts_of_weights() {
    let Some(device) = device() else { return };
    for format in KINDS {
        let k = 2 * format.granularity().max(64);
        let weight = random(&[90, k], format, DType::F16, 320);
        let w = weight.to_device(&device).unwrap();
        for m in [1, 3, 9] {
            let x = tensor(&[m, k], 321).to_dtype(DType::BF16).unwrap();
            let there = x.to_device(&device).unwrap();
            for (start, len) in [(0, 7), (33, 40), (89, 1)] {
                let product = w.narrow(0, start, len).unwrap().matmul(&there, None).unwrap();
                let expected = Expected::new(&weight.narrow(0, start, len).unwrap(), &x, None);
                expected.check(&product, DType::BF16, &format!("{len} rows of {weight:?} from {start} on"));
            }
        }
    }
}

/// Packed words that begin at any multiple of four bytes.
#[test]
fn weights_at_an_offset() {
    let Some(device) = device() else { return };
    for format in KINDS {
        let (n, k) = (20, 2 * format.granularity().max(64));
        let weight = random(&[n, k], format, DType::F16, 330);
        let words: Vec<u32> = weight.packed().flatten_all().unwrap().to_vec1().unwrap();
        let of_row = words.len() / n;
        for offset in [1, 2, 4] {
            let mut padded = vec![0xffff_ffff; offset];
            padded.extend(&words);
            let padded = Tensor::from_vec(padded, n * of_row + offset, &device).unwrap();
            let packed = padded.narrow(0, offset, n * of_row).unwrap().reshape((n, of_row)).unwrap();
            let there = |tensor: &Tensor| tensor.to_device(&device).unwrap();
            let (scales, biases) = (there(weight.scales()), weight.biases().map(there));
            let w = match weight.super_blocks() {
                None => QuantTensor::new(format, packed, scales, biases, None).unwrap(),
                Some(of) => {
                    let of = SuperBlocks { scales: there(&of.scales), biases: of.biases.as_ref().map(there) };
                    QuantTensor::with_super_blocks(format, packed, (scales, biases), of).unwrap()
                }
            };
            for m in [1, 2, 8, 20] {
                let x = tensor(&[m, k], 331).to_dtype(DType::F16).unwrap();
                let product = w.matmul(&there(&x), None).unwrap();
                let what = format!("{format} M={m}, words from {offset} on");
                Expected::new(&weight, &x, None).check(&product, DType::F16, &what);
            }
            assert_eq!(
                bits(&w.dequantize(DType::F32).unwrap()),
                bits(&weight.dequantize(DType::F32).unwrap())
            );
        }
    }
}

#[test]
fn two_devices() {
    let (Some(first), Some(second)) = (device(), nth_device(1)) else { return };
    let weight = random(&[40, 512], KINDS[0], DType::F16, 340);
    let x = tensor(&[2, 512], 341).to_dtype(DType::F16).unwrap();
    let product = |device: &Device| {
        let product = weight.to_device(device).unwrap().matmul(&x.to_device(device).unwrap(), None).unwrap();
        assert!(product.device().same_device(device));
        bits(&product)
    };
    assert_eq!(product(&first), product(&second));

    let on_first = weight.to_device(&first).unwrap();
    let told = refused(on_first.matmul(&x.to_device(&second).unwrap(), None));
    assert!(told.contains("x: expected on Cuda { gpu_id: 0 }"), "{told}");
    assert!(told.contains("found on Cuda { gpu_id: 1 }"), "{told}");
    let back = on_first.to_device(&second).unwrap().to_device(&Device::Cpu).unwrap();
    assert_eq!(bits(&back.dequantize(DType::F32).unwrap()), bits(&weight.dequantize(DType::F32).unwrap()));
}

#[test]
fn operands_on_the_cpu_are_refused() {
    let Some(device) = device() else { return };
    let weight = random(&[40, 64], KINDS[0], DType::F16, 350);
    let w = weight.to_device(&device).unwrap();
    let x = tensor(&[2, 64], 351).to_dtype(DType::F16).unwrap();
    let (there, bias) = (x.to_device(&device).unwrap(), tensor(&[40], 352));
    let ids = Tensor::new(&[0u32], &Device::Cpu).unwrap();
    for told in [
        refused(w.matmul(&x, None)),
        refused(w.matmul(&there, Some(&bias))),
        refused(w.embed(&ids, DType::F16)),
        refused(nn::forward_all([&Linear::from_quant(w.clone(), Some(bias.clone()))], &there)),
    ] {
        assert!(told.contains("expected on Cuda { gpu_id: 0 }, where the weight is, found on Cpu"), "{told}");
    }
    let told = refused(weight.matmul(&there, None));
    assert!(told.contains("expected on Cpu, where the weight is"), "{told}");
    let told = QuantTensor::new(
        weight.format(),
        w.packed().clone(),
        weight.scales().clone(),
        weight.biases().cloned(),
        None,
    );
    assert!(told.unwrap_err().to_string().contains("one on Cpu"));
    for dtype in [DType::U32, DType::F64] {
        let x = Tensor::zeros((2, 64), dtype, &Device::Cpu).unwrap().to_device(&device).unwrap();
        let told = refused(w.matmul(&x, None));
        assert!(told.contains(&format!("{dtype:?}")) && told.contains("use F32, F16 or BF16"), "{told}");
    }
}
