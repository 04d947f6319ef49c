//! Products of every kernel, against f64.

use crate::expected::{formats, Expected, KINDS};
use crate::gpu::device_with_own_stream;
use crate::packed::{bits, flat, numbers, random, reference, relative_error, tensor};
use crate::{alike, device, repeats};
use candle_core::{DType, Device, Tensor};
use candle_quant::format::Scale;
use candle_quant::{QuantFormat, QuantTensor};

/// Rows of x that every kernel for some of them gets, full or padded, and slabs of several launches.
const ROWS: [usize; 12] = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33];

/// Multiplies on the device, twice, and compares.
#[track_caller]
pub fn check(device: &Device, weight: &QuantTensor, x: &Tensor, bias: Option<&Tensor>) {
    let what = format!("{weight:?} on {:?} {:?}", x.dims(), x.dtype());
    let on_device = |tensor: &Tensor| tensor.to_device(device).unwrap();
    let (w, x_there, bias_there) = (weight.to_device(device).unwrap(), on_device(x), bias.map(on_device));
    let product = w.matmul(&x_there, bias_there.as_ref()).expect(&what);
    assert!(product.device().same_device(device));
    Expected::new(weight, x, bias).check(&product.to_device(&Device::Cpu).unwrap(), x.dtype(), &what);
    if repeats() {
        let again = w.matmul(&x_there, bias_there.as_ref()).expect(&what);
        assert_eq!(bits(&product), bits(&again), "{what}: not the same twice");
    }
}

pub fn x(dims: &[usize], dtype: DType, seed: u64) -> Tensor {
    tensor(dims, seed).to_dtype(dtype).unwrap()
}

/// Rows of weights that end within a lane's load, a warp's step, a round; with and without a bias.
#[test]
fn every_format_with_every_number_of_rows() {
    let Some(device) = device() else { return };
    for (seed, format) in formats().enumerate() {
        let seed = seed as u64;
        let k_of = |index: usize| match index % 4 {
            0 => format.granularity(),
            1 => 5 * format.granularity(),
            2 => (9 * 128usize).next_multiple_of(format.granularity()),
            _ => 11 * format.granularity().max(32),
        };
        for (index, m) in ROWS.into_iter().enumerate() {
            for (other, dtype) in alike(&[(0, DType::F16), (1, DType::BF16)], index + seed as usize) {
                let k = k_of(index + other + seed as usize);
                let weight = random(&[40, k], format, [DType::F16, DType::BF16][index % 2], seed);
                let bias = x(&[40], DType::F32, seed + 1);
                let bias = (index % 2 == 0).then_some(&bias);
                check(&device, &weight, &x(&[m, k], *dtype, seed + 2), bias);
            }
        }
    }
}

#[test]
fn f32_activations_and_f32_scales() {
    let Some(device) = device() else { return };
    for (seed, format) in formats().enumerate() {
        let k = 3 * format.granularity().max(32);
        for m in [1, 3, 8, 9] {
            let weight = random(&[37, k], format, DType::F16, 40 + seed as u64);
            check(&device, &weight, &x(&[m, k], DType::F32, 41), None);
        }
        if format.scale() == Scale::Float {
            let weight = random(&[37, k], format, DType::F32, 42 + seed as u64);
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                check(&device, &weight, &x(&[2, k], dtype, 43), Some(&x(&[37], DType::BF16, 44)));
            }
        }
    }
}

#[test]
fn blocks_that_take_turns() {
    let Some(device) = device() else { return };
    for format in [KINDS[0], QuantFormat::MXFP4] {
        // Several times as many rows as blocks have sums waiting for, on the card that is pretended; four shares of K and not eight.
        let weight = random(&[3300, 1600], format, DType::F16, 52);
        for m in [1, 2, 8] {
            check(&device, &weight, &x(&[m, 1600], DType::BF16, 53), None);
        }
    }
}

#[test]
fn awkward_shapes() {
    let Some(device) = device() else { return };
    for format in KINDS {
        for n in [1, 130] {
            for k in [
                format.granularity(),
                3 * format.granularity(),
                2880usize.next_multiple_of(format.granularity()),
            ] {
                let weight = random(&[n, k], format, DType::F16, 50);
                for m in [1, 6] {
                    check(&device, &weight, &x(&[m, k], DType::BF16, 51), None);
                }
            }
        }
    }
}

/// K so long that a block's shared memory holds but a part of x, and so few rows that k is split to fill
/// the device.
#[test]
fn k_that_is_split_over_blocks() {
    let Some(device) = device() else { return };
    for format in KINDS {
        for (n, m, k) in
            [(24, 1, 28672), (24, 2, 8192), (40, 4, 8192), (40, 8, 4096), (40, 16, 4096), (1, 13, 3328)]
        {
            let weight = random(&[n, k], format, DType::BF16, 60);
            check(&device, &weight, &x(&[m, k], DType::F16, 61), Some(&x(&[n], DType::F16, 62)));
        }
    }
}

/// So many and so long rows that a lane goes through several batches, each of which has super-blocks of its own.
#[test]
fn many_long_rows_of_super_blocks() {
    let Some(device) = device() else { return };
    for format in [QuantFormat::Q2_K, QuantFormat::Q4_K, QuantFormat::Q6_K] {
        let weight = random(&[1024, 1 << 14], format, DType::F16, 63);
        check(&device, &weight, &x(&[1, 1 << 14], DType::F16, 64), None);
    }
}

/// The second kernel starts while the first one runs, whose output it reads.
#[test]
fn a_product_of_a_product() {
    let Some(device) = device() else { return };
    for (m, dtype) in [(1, DType::F16), (5, DType::BF16), (3, DType::F32), (20, DType::BF16)] {
        let [first, second] = [[128, 320], [40, 128]].map(|dims| random(&dims, KINDS[0], DType::F16, 65));
        let x = x(&[m, 320], dtype, 66);
        let [on_first, on_second] = [&first, &second].map(|weight| weight.to_device(&device).unwrap());
        let x_there = x.to_device(&device).unwrap();
        let y = on_first.matmul(&x_there, None).unwrap();
        let z = on_second.matmul(&y, None).unwrap();
        let [y, z] = [y, z].map(|tensor| tensor.to_device(&Device::Cpu).unwrap());
        Expected::new(&first, &x, None).check(&y, dtype, "the first");
        Expected::new(&second, &y, None).check(&z, dtype, "the second");
    }
}

#[test]
fn x_of_any_rank() {
    let Some(device) = device() else { return };
    let weight = random(&[19, 128], KINDS[0], DType::F16, 70);
    let w = weight.to_device(&device).unwrap();
    for dims in [&[128][..], &[1, 128], &[2, 3, 128], &[2, 1, 4, 128]] {
        let x = x(dims, DType::F16, 71);
        let product = w.matmul(&x.to_device(&device).unwrap(), None).unwrap();
        Expected::new(&weight, &x, None).check(&product, DType::F16, &format!("{dims:?}"));
    }
}

#[test]
fn bias_of_any_dtype() {
    let Some(device) = device() else { return };
    let weight = random(&[50, 128], KINDS[0], DType::F16, 80);
    for m in [1, 9] {
        for dtype in [DType::F16, DType::BF16, DType::F32] {
            for bias in [DType::F16, DType::BF16, DType::F32] {
                check(&device, &weight, &x(&[m, 128], dtype, 81), Some(&x(&[50], bias, 82)));
            }
        }
    }
}

#[test]
fn scales_and_biases_of_different_dtypes() {
    let Some(device) = device() else { return };
    let weight = random(&[20, 128], KINDS[0], DType::F32, 90);
    for (scale, bias) in [(DType::F16, DType::BF16), (DType::BF16, DType::F16), (DType::F16, DType::F32)] {
        let weight = QuantTensor::new(
            weight.format(),
            weight.packed().clone(),
            weight.scales().to_dtype(scale).unwrap(),
            weight.biases().map(|biases| biases.to_dtype(bias).unwrap()),
            None,
        );
        check(&device, &weight.unwrap(), &x(&[3, 128], DType::F16, 91), None);
    }
}

/// So many rows of x, or so long scales, that weights are dequantized to the dtype of x, some at a time, and multiplied by
/// cuBLAS. Beside the rounding of the result there is that of each weight.
#[test]
fn dense_products() {
    let Some(device) = device() else { return };
    for format in KINDS {
        let (n, k) = (70, 512);
        for (m, scales, dtype) in [
            (460, DType::F16, DType::F16),
            (460, DType::F16, DType::BF16),
            (131, DType::F32, DType::F16),
            (131, DType::F32, DType::F32),
        ] {
            let weight = random(&[n, k], format, scales, 100);
            for bias in [None, Some(x(&[n], DType::F32, 101))] {
                let x = x(&[m, k], dtype, 102);
                let expected = Expected::new(&weight, &x, bias.as_ref());
                let there = |tensor: &Tensor| tensor.to_device(&device).unwrap();
                let w = weight.to_device(&device).unwrap();
                let product = w.matmul(&there(&x), bias.as_ref().map(there).as_ref()).unwrap();
                let bound = match dtype {
                    DType::F16 => 8e-4,
                    DType::BF16 => 6e-3,
                    _ => 1e-6,
                };
                let error = relative_error(&flat(&product), &expected.products);
                assert!(error < bound, "{format} {dtype:?}: {error:.2e}");
            }
        }
    }
}

/// The two halves of K nearly cancel: were the sum of one rounded to f16 before the other is added, as cuBLAS may by
/// default, the rounding would be larger than the result.
#[test]
fn dense_products_are_added_up_in_f32() {
    let Some(device) = device() else { return };
    let (n, half, m) = (16, 1024, 449);
    let dense = tensor(&[n, half], 103);
    let dense = Tensor::cat(&[&dense, &dense], 1).unwrap().to_dtype(DType::F16).unwrap();
    let weight = QuantTensor::quantize(&dense, QuantFormat::affine(4, 64).unwrap()).unwrap();
    // Multiples of 1/64, of which the second half is the first, negated, and 1/64 more.
    let first = (tensor(&[m, half], 104) * 32.).unwrap().round().unwrap();
    let x = Tensor::cat(&[&first, &(1. - &first).unwrap()], 1).unwrap();
    let x = (x / 64.).unwrap().to_dtype(DType::F16).unwrap();
    let expected = Expected::new(&weight, &x, None);
    let product = weight.to_device(&device).unwrap().matmul(&x.to_device(&device).unwrap(), None).unwrap();
    for (got, exact) in flat(&product).iter().zip(&expected.products) {
        // The result's rounding, and those of 1024 weights of magnitude 1 times 1/64, one way as likely as the other.
        let bound = exact.abs() / 1024. + 32. / 2048. / 64.;
        assert!((f64::from(*got) - exact).abs() < bound, "{got} for {exact}");
    }
}

/// More rows than the scratch holds: parts take turns in its two halves.
#[test]
fn dense_products_in_parts() {
    let Some(device) = device() else { return };
    // 32 MB are 64 rows of 131072 f32.
    let (n, k, m) = (131, 131_072, 66);
    let weight = random(&[n, k], QuantFormat::affine(2, 128).unwrap(), DType::F32, 110);
    let x = x(&[m, k], DType::F32, 111);
    let product = weight.to_device(&device).unwrap().matmul(&x.to_device(&device).unwrap(), None).unwrap();
    // Some rows of x suffice.
    for row in [0, m - 1] {
        let expected = Expected::new(&weight, &x.narrow(0, row, 1).unwrap(), None);
        let error = relative_error(&flat(&product.get(row).unwrap()), &expected.products);
        assert!(error < 1e-6, "row {row}: {error:.2e}");
    }
}

#[test]
fn stacks() {
    let Some(device) = device() else { return };
    for format in [KINDS[0], QuantFormat::NVFP4] {
        let stack = random(&[3, 40, 128], format, DType::F16, 120);
        let x = x(&[3, 2, 128], DType::F16, 121);
        let there = |tensor: &Tensor| tensor.to_device(&device).unwrap();
        let products = stack.to_device(&device).unwrap().matmul(&there(&x), None).unwrap();
        assert_eq!(products.dims(), [3, 2, 40]);
        // The same x for every matrix.
        let shared = stack.to_device(&device).unwrap().matmul(&there(&x.get(1).unwrap()), None).unwrap();
        for index in 0..3 {
            let one = stack.narrow(0, index, 1).unwrap();
            let part = |tensor: &Tensor| tensor.squeeze(0).unwrap();
            let one = QuantTensor::new(
                format,
                part(one.packed()),
                part(one.scales()),
                one.biases().map(part),
                None,
            );
            let one = one.unwrap();
            let what = format!("matrix {index} of {stack:?}");
            let expected = Expected::new(&one, &x.get(index).unwrap(), None);
            expected.check_elements(&products.get(index).unwrap(), DType::F16, &what);
            let expected = Expected::new(&one, &x.get(1).unwrap(), None);
            expected.check_elements(&shared.get(index).unwrap(), DType::F16, &what);
        }
    }
}

/// On one thread and another, and on a device with a stream of its own.
#[test]
fn products_on_other_streams() {
    let (Some(device), Some(own)) = (device(), device_with_own_stream()) else { return };
    let weight = random(&[40, 4096], KINDS[0], DType::F16, 130);
    let x = x(&[16, 4096], DType::F16, 131);
    let product = |device: &Device| {
        let there = weight.to_device(device).unwrap().matmul(&x.to_device(device).unwrap(), None).unwrap();
        bits(&there)
    };
    let expected = product(&device);
    assert_eq!(product(&own), expected);
    std::thread::scope(|scope| {
        for device in [&device, &own, &device, &own] {
            scope.spawn(|| assert_eq!(product(device), expected));
        }
    });
}

#[test]
fn gradients_are_those_of_the_cpu() {
    let Some(device) = device() else { return };
    for dims in [&[24, 64][..], &[3, 24, 64]] {
        let weight = random(dims, KINDS[0], DType::F32, 140);
        let gradients = |device: &Device| {
            let values = Tensor::from_vec(numbers(3 * 64, 141), (3, 64), device).unwrap();
            let x = candle_core::Var::from_tensor(&values).unwrap();
            let bias = Tensor::from_vec(numbers(24, 142), 24, device).unwrap();
            let bias = candle_core::Var::from_tensor(&bias).unwrap();
            let product = weight.to_device(device).unwrap().matmul(&x, Some(&bias)).unwrap();
            let gradients = product.sqr().unwrap().sum_all().unwrap().backward().unwrap();
            [&x, &bias].map(|variable| flat(gradients.get(variable).expect("a gradient")))
        };
        for (expected, found) in gradients(&Device::Cpu).into_iter().zip(gradients(&device)) {
            let expected: Vec<f64> = expected.into_iter().map(f64::from).collect();
            let error = relative_error(&found, &expected);
            assert!(error < 1e-6, "{dims:?}: {error:.2e}");
        }
    }
}

/// The gradient of x, of a product that a loss weighs with `dy`.
fn gradient(weight: &QuantTensor, dy: &Tensor, device: &Device) -> Tensor {
    let there = |tensor: &Tensor| tensor.to_device(device).unwrap();
    let [.., k] = weight.dims()[..] else { panic!("a matrix has K") };
    let dims = [&dy.dims()[..dy.rank() - 1], &[k]].concat();
    let x = candle_core::Var::from_tensor(&there(&x(&dims, dy.dtype(), 143))).unwrap();
    let y = weight.to_device(device).unwrap().matmul(&x, None).unwrap();
    let gradients = (y * there(dy)).unwrap().sum_all().unwrap().backward().unwrap();
    gradients.get(&x).expect("a gradient").clone()
}

/// Compares the gradient of x with f64. On the device, beside the rounding of the result there is that of each weight.
#[track_caller]
fn check_gradient(device: &Device, weight: &QuantTensor, dy: &Tensor) {
    let [n, k] = weight.dims()[..] else { panic!("a matrix is checked") };
    let got = gradient(weight, dy, device);
    assert_eq!((got.dims().last(), got.dtype()), (Some(&k), dy.dtype()));
    let weights = reference(weight);
    let mut expected = Vec::new();
    for dy in flat(dy).chunks(n) {
        let mut sums = vec![0f64; k];
        for (dy, weights) in dy.iter().zip(weights.chunks(k)) {
            sums.iter_mut().zip(weights).for_each(|(sum, w)| *sum += f64::from(*dy) * f64::from(*w));
        }
        expected.extend(sums);
    }
    let bound = match dy.dtype() {
        DType::F16 => 8e-4,
        DType::BF16 => 6e-3,
        _ => 1e-6,
    };
    let error = relative_error(&flat(&got), &expected);
    assert!(error < bound, "{weight:?} {:?} {:?}: {error:.2e}", dy.dims(), dy.dtype());
}

#[test]
fn gradients_of_every_format() {
    let Some(device) = device() else { return };
    for (seed, format) in formats().enumerate() {
        for (index, dtype) in [DType::F32, DType::F16, DType::BF16].into_iter().enumerate() {
            let (n, m) = [(37, 5), (1, 33), (130, 1)][(seed + index) % 3];
            let k = [1, 3, 5][index] * format.granularity();
            let weight = random(&[n, k], format, DType::F16, 144 + seed as u64);
            check_gradient(&device, &weight, &x(&[m, n], dtype, 145));
        }
    }
    // Of more dimensions, and in another order.
    let weight = random(&[24, 64], KINDS[0], DType::F16, 146);
    check_gradient(&device, &weight, &x(&[24], DType::F16, 147));
    check_gradient(&device, &weight, &x(&[2, 3, 24], DType::BF16, 147));
    let turned = x(&[24, 6], DType::BF16, 148).t().unwrap();
    check_gradient(&device, &weight, &turned);
}

/// More rows than the scratch holds: what the parts add up is f32, and rounded once.
#[test]
fn gradients_in_parts() {
    let Some(device) = device() else { return };
    // 32 MB are 64 rows of 131072 f32, and 128 of 16 bits.
    let k = 131_072;
    for (n, format, dtype) in [
        (131, KINDS[0], DType::F32),
        (129, QuantFormat::NVFP4, DType::BF16),
        (129, QuantFormat::MXFP4, DType::F16),
    ] {
        let weight = random(&[n, k], format, DType::F16, 149);
        check_gradient(&device, &weight, &x(&[2, n], dtype, 150));
    }
}

/// The two parts nearly cancel: were the sum of one rounded to f16 before the other is added, the rounding would be larger
/// than the result.
#[test]
fn gradients_in_parts_are_added_up_in_f32() {
    let Some(device) = device() else { return };
    let (half, k, m) = (128, 131_072, 2);
    let dense = tensor(&[half, k], 151);
    let dense = Tensor::cat(&[&dense, &dense], 0).unwrap().to_dtype(DType::F16).unwrap();
    let weight = QuantTensor::quantize(&dense, QuantFormat::affine(4, 64).unwrap()).unwrap();
    // Multiples of 1/64, of which the second half is the first, negated, and 1/64 more.
    let first = (tensor(&[m, half], 152) * 32.).unwrap().round().unwrap();
    let dy = Tensor::cat(&[&first, &(1. - &first).unwrap()], 1).unwrap();
    let dy = (dy / 64.).unwrap().to_dtype(DType::F16).unwrap();
    let got = flat(&gradient(&weight, &dy, &device));
    let weights = reference(&weight);
    // Some columns suffice.
    for column in (0..k).step_by(1009) {
        for (row, dy) in flat(&dy).chunks(2 * half).enumerate() {
            let rows = dy.iter().zip(weights.chunks(k));
            let exact: f64 = rows.map(|(dy, w)| f64::from(*dy) * f64::from(w[column])).sum();
            // The result's rounding, and those of 128 weights of magnitude 4 at most times 1/64.
            let bound = exact.abs() / 1024. + 12. * 4. / 2048. / 64.;
            let got = f64::from(got[row * k + column]);
            assert!((got - exact).abs() < bound, "{got} for {exact}");
        }
    }
}

#[test]
fn fake_quantization_is_that_of_the_cpu() {
    let Some(device) = device() else { return };
    for format in QuantFormat::all() {
        for dtype in [DType::F32, DType::BF16] {
            let weight = x(&[6, 2 * format.granularity()], dtype, 155);
            let on = |device: &Device| {
                let weight = candle_core::Var::from_tensor(&weight.to_device(device).unwrap()).unwrap();
                let quantized = QuantTensor::fake_quantize(&weight, format).unwrap();
                assert!(quantized.device().same_device(device));
                let gradients = quantized.sqr().unwrap().sum_all().unwrap().backward().unwrap();
                [bits(&quantized), bits(gradients.get(&weight).expect("a gradient"))]
            };
            assert_eq!(on(&device), on(&Device::Cpu), "{format} {dtype:?}");
        }
    }
}

#[test]
fn nothing_times_a_weight_is_nothing() {
    let Some(device) = device() else { return };
    for dims in [&[40, 64][..], &[3, 40, 64]] {
        let weight = random(dims, KINDS[0], DType::F16, 150).to_device(&device).unwrap();
        for dtype in [DType::F16, DType::F32] {
            let some = x(&[2, 64], dtype, 151).to_device(&device).unwrap();
            let product = weight.matmul(&some.narrow(0, 1, 0).unwrap(), None).unwrap();
            let expected = [&dims[..dims.len() - 2], &[0, 40]].concat();
            assert_eq!((product.dims(), product.dtype()), (expected.as_slice(), dtype));
            assert!(flat(&product).is_empty());
        }
    }
}
