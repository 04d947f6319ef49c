//! Products with more rows of x than a GEMV takes, in tiles.

use crate::device;
use crate::expected::{symmetric, Expected, KINDS};
use crate::matmul::{check, x};
use crate::packed::{bits, flat, random, reference, relative_error, tensor};
use candle_core::{DType, Device, Tensor};
use candle_quant::{QuantFormat, QuantTensor};

/// Columns that end within a tile, a warp's share, a kernel; rows of weights and k that do.
#[test]
fn every_kind_with_every_number_of_columns() {
    let Some(device) = device() else { return };
    const ROWS: [usize; 12] = [9, 16, 17, 32, 33, 64, 65, 96, 97, 128, 129, 200];
    for (seed, format) in KINDS.into_iter().enumerate() {
        for (index, m) in ROWS.into_iter().enumerate() {
            let n = [130, 1, 257][(seed + index) % 3];
            let granularity = format.granularity().max(32);
            // Four super-blocks are as many steps as the ring has places, twice; more of them take the emulator too long.
            let most = if granularity == 256 { 4 } else { 11 };
            let k = [1, 5, most, 3][(seed + index) % 4] * granularity;
            let dtype = [DType::F16, DType::BF16, DType::F32][(seed + index / 3) % 3];
            let weight = random(&[n, k], format, [DType::F16, DType::BF16][index % 2], 200 + seed as u64);
            let bias = (index % 2 == 0).then(|| x(&[n], DType::F32, 201));
            check(&device, &weight, &x(&[m, k], dtype, 202), bias.as_ref());
        }
    }
}

/// Blocks whose share of all steps begins and ends within tiles, is one tile, or several.
#[test]
fn blocks_that_share_tiles() {
    let Some(device) = device() else { return };
    for (n, k, m) in [(100, 8192, 20), (8576, 256, 10), (34_000, 64, 9), (40, 8192, 100), (6400, 384, 250)] {
        // Of the second, rows of x have factors of their own.
        for (format, dtype) in [(KINDS[0], DType::F16), (QuantFormat::NVFP4, DType::BF16)] {
            let weight = random(&[n, k], format, DType::F16, 210);
            let sizes: Vec<f32> = (0..m).map(|row| [0.1, 1., 30.][row % 3]).collect();
            let sizes = Tensor::from_vec(sizes, (m, 1), &Device::Cpu).unwrap();
            let x = tensor(&[m, k], 211).broadcast_mul(&sizes).unwrap().to_dtype(dtype).unwrap();
            check(&device, &weight, &x, None);
        }
    }
}

/// A channel that is 10^6 times as large as the others, and meets weights of zero.
#[test]
fn outliers_cost_no_digits_of_the_others() {
    let Some(device) = device() else { return };
    let (n, k, m, channel) = (64, 512, 33, 77);
    let keep: Vec<f32> = (0..k).map(|i| f32::from(i != channel)).collect();
    let dense = tensor(&[n, k], 220).broadcast_mul(&Tensor::new(keep, &Device::Cpu).unwrap()).unwrap();
    for format in [QuantFormat::MXFP4, QuantFormat::NVFP4, QuantFormat::MXFP8] {
        let weight = QuantTensor::quantize(&dense, format).unwrap();
        assert!(reference(&weight).iter().skip(channel).step_by(k).all(|w| *w == 0.), "{format}");
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let mut values = flat(&(tensor(&[m, k], 221) * 0.01).unwrap());
            values.iter_mut().skip(channel).step_by(k).for_each(|value| *value = 1e4);
            let x = Tensor::from_vec(values, (m, k), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            let exact = Expected::new(&weight, &x, None).products;
            let product = weight.to_device(&device).unwrap().matmul(&x.to_device(&device).unwrap(), None);
            let error = relative_error(&flat(&product.unwrap()), &exact);
            let rounded = Tensor::new(exact.clone(), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            let bound = (1.05 * relative_error(&flat(&rounded), &exact)).max(1e-6);
            assert!(error <= bound, "{format} {dtype:?}: {error:.2e} > {bound:.2e}");
        }
    }
}

/// What is no number stays in its row.
#[test]
fn rows_with_nan_and_infinity() {
    let Some(device) = device() else { return };
    for format in [KINDS[0], QuantFormat::MXFP8] {
        let weight = random(&[40, 128], format, DType::F16, 230).to_device(&device).unwrap();
        for dtype in [DType::F16, DType::BF16, DType::F32] {
            let sound = x(&[20, 128], dtype, 231);
            let mut values = flat(&sound);
            (values[3 * 128 + 5], values[17 * 128 + 127]) = (f32::NAN, f32::INFINITY);
            let harmed = Tensor::from_vec(values, (20, 128), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            let product = |x: &Tensor| flat(&weight.matmul(&x.to_device(&device).unwrap(), None).unwrap());
            let (expected, found) = (product(&sound), product(&harmed));
            for (row, (expected, found)) in expected.chunks(40).zip(found.chunks(40)).enumerate() {
                match row {
                    3 => assert!(found.iter().all(|y| y.is_nan()), "{format} {dtype:?}: {found:?}"),
                    17 => {
                        let is_infinity = found.iter().any(|y| y.is_infinite());
                        assert!(
                            is_infinity && found.iter().all(|y| !y.is_finite()),
                            "{format} {dtype:?}: {found:?}"
                        );
                    }
                    _ => assert_eq!(found, expected, "{format} {dtype:?} row {row}"),
                }
            }
        }
    }
}

/// More rows than one launch takes: those of the second have the bits that they have alone.
#[test]
fn rows_of_several_launches() {
    let Some(device) = device() else { return };
    // 128 rows of two halves of 131072 numbers are 64 MB.
    let (n, k, m) = (3, 131_072, 140);
    let weight = random(&[n, k], QuantFormat::affine(1, 128).unwrap(), DType::F16, 240);
    let x = x(&[m, k], DType::F32, 241);
    let w = weight.to_device(&device).unwrap();
    let product = w.matmul(&x.to_device(&device).unwrap(), None).unwrap();
    let part = x.narrow(0, 128, 12).unwrap().to_device(&device).unwrap();
    let alone = w.matmul(&part, None).unwrap();
    assert_eq!(bits(&alone), bits(&product.narrow(0, 128, 12).unwrap().contiguous().unwrap()));
    for row in [0, 127, 128, m - 1] {
        let expected = Expected::new(&weight, &x.narrow(0, row, 1).unwrap(), None).products;
        let error = relative_error(&flat(&product.get(row).unwrap()), &expected);
        assert!(error < 1e-6, "row {row}: {error:.2e}");
    }
}

/// Codes around zero, of every width.
#[test]
fn symmetric_codes() {
    let Some(device) = device() else { return };
    for (index, bits) in [1, 2, 3, 4, 5, 6, 8].into_iter().enumerate() {
        let group_size = [32, 64, 128][index % 3];
        let affine =
            random(&[130, 3 * group_size], QuantFormat::affine(bits, group_size).unwrap(), DType::F16, 250);
        check(&device, &symmetric(&affine), &x(&[20, 3 * group_size], DType::BF16, 251), None);
    }
}
