//! `QuantTensor::matmul` and `embed`, against f64 and candle's dense operations on the same weights.

use crate::packed::{bits, flat, packed, reference, refused, relative_error, tensor};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Module, Tensor, Var};
use candle_quant::{LayerWeight, Linear, QuantFormat, QuantTensor};
use std::sync::Arc;

const AFFINE: QuantFormat = QuantFormat::affine_opt(4, 32).unwrap();

/// Of every kind of format one.
const FORMATS: [QuantFormat; 5] = [
    AFFINE,
    QuantFormat::affine_opt(3, 64).unwrap(),
    QuantFormat::MXFP4,
    QuantFormat::NVFP4,
    QuantFormat::MXFP8,
];

/// `x * weight^T + bias` in f64 for `x` `[.., K]` and a matrix.
fn product(weight: &QuantTensor, x: &Tensor, bias: Option<&Tensor>) -> Vec<f64> {
    let k = weight.dims()[1];
    let (weights, bias) = (reference(weight), bias.map(flat));
    let mut products = Vec::new();
    for x in flat(x).chunks(k) {
        for (n, row) in weights.chunks(k).enumerate() {
            let dot: f64 = row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
            products.push(dot + bias.as_ref().map_or(0., |bias| f64::from(bias[n])));
        }
    }
    products
}

/// Compares with the product in f64: 1e-6 for F32, and 5 % more than one rounding for F16 and BF16.
#[track_caller]
fn check(weight: &QuantTensor, x: &Tensor, bias: Option<&Tensor>) {
    let expected = product(weight, x, bias);
    let actual = weight.matmul(x, bias).unwrap();
    assert_eq!(actual.dtype(), x.dtype());
    let mut dims = x.dims().to_vec();
    *dims.last_mut().unwrap() = weight.dims()[0];
    assert_eq!(actual.dims(), dims);
    let rounded = Tensor::new(expected.as_slice(), &Device::Cpu).unwrap().to_dtype(x.dtype()).unwrap();
    let bound = match x.dtype() {
        DType::F32 => 1e-6,
        _ => 1.05 * relative_error(&flat(&rounded), &expected),
    };
    let error = relative_error(&flat(&actual), &expected);
    assert!(error <= bound, "{weight:?} on {x:?}: {error:.2e} > {bound:.2e}");
}

#[test]
fn x_of_any_rank_and_dtype() {
    for format in FORMATS {
        let weight = packed(&[37, 192], format, 20);
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for (seed, dims) in
                [&[192][..], &[1, 192], &[5, 192], &[2, 3, 192], &[2, 1, 20, 192]].iter().enumerate()
            {
                let x = tensor(dims, 21 + seed as u64).to_dtype(dtype).unwrap();
                check(&weight, &x, None);
            }
        }
    }
}

#[test]
fn x_that_is_a_view() {
    let weight = packed(&[11, 128], AFFINE, 30);
    let turned = tensor(&[128, 6], 31).t().unwrap();
    check(&weight, &turned, None);
    let shifted = tensor(&[9, 128], 32).narrow(0, 4, 3).unwrap();
    check(&weight, &shifted, None);
    let cut = tensor(&[4, 300], 33).narrow(1, 7, 128).unwrap();
    assert!(!cut.is_contiguous());
    check(&weight, &cut, None);
    let repeated = tensor(&[1, 128], 34).broadcast_as((40, 128)).unwrap();
    check(&weight, &repeated, None);
}

#[test]
fn bias_of_any_float_dtype() {
    for m in [1, 4, 50] {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let weight = packed(&[19, 128], AFFINE, 40);
            let x = tensor(&[m, 128], 41).to_dtype(dtype).unwrap();
            for bias_dtype in [DType::F32, DType::F16, DType::BF16] {
                let bias = tensor(&[19], 42).to_dtype(bias_dtype).unwrap();
                check(&weight, &x, Some(&bias));
            }
            let every_other = tensor(&[19, 2], 43).narrow(1, 1, 1).unwrap().squeeze(1).unwrap();
            check(&weight, &x, Some(&every_other));
        }
    }
}

#[test]
fn nothing_times_a_weight_is_nothing() {
    let matrix = packed(&[3, 64], AFFINE, 50);
    let stack = packed(&[2, 3, 64], AFFINE, 50);
    let one = packed(&[1, 3, 64], AFFINE, 50);
    for (weight, x, expected) in [
        (&matrix, &[0, 64][..], &[0, 3][..]),
        (&matrix, &[2, 0, 64], &[2, 0, 3]),
        (&stack, &[0, 64], &[2, 0, 3]),
        (&stack, &[4, 1, 0, 64], &[4, 2, 0, 3]),
        (&one, &[0, 5, 64], &[0, 5, 3]),
    ] {
        for dtype in [DType::F32, DType::BF16] {
            let x = Tensor::zeros(x, dtype, &Device::Cpu).unwrap();
            let bias = tensor(&[3], 51);
            let product = weight.matmul(&x, Some(&bias)).unwrap();
            assert_eq!((product.dims(), product.dtype()), (expected, dtype));
        }
    }
}

/// Stacks against candle's broadcasting product of the dense weights.
#[test]
fn stacks_broadcast_both_ways() {
    for (weight, x, expected) in [
        (&[3, 7, 64][..], &[3, 5, 64][..], &[3, 5, 7][..]),
        (&[3, 7, 64], &[5, 64], &[3, 5, 7]),
        (&[3, 7, 64], &[1, 5, 64], &[3, 5, 7]),
        (&[3, 7, 64], &[4, 1, 5, 64], &[4, 3, 5, 7]),
        (&[1, 7, 64], &[4, 5, 64], &[4, 5, 7]),
        (&[2, 3, 7, 64], &[3, 1, 64], &[2, 3, 1, 7]),
        (&[2, 1, 7, 64], &[3, 40, 64], &[2, 3, 40, 7]),
    ] {
        for format in FORMATS.into_iter().filter(|format| format.group_size() <= 64) {
            let weight = packed(weight, format, 60);
            let (x, bias) = (tensor(x, 61), tensor(&[7], 62));
            let dense = Tensor::from_vec(reference(&weight), weight.dims(), &Device::Cpu).unwrap();
            let wide = |tensor: &Tensor| tensor.to_dtype(DType::F64).unwrap();
            let products = wide(&x).broadcast_matmul(&wide(&dense).t().unwrap()).unwrap();
            let products = products.broadcast_add(&wide(&bias)).unwrap();
            let actual = weight.matmul(&x, Some(&bias)).unwrap();
            assert_eq!((actual.dims(), products.dims()), (expected, expected));
            let products: Vec<f64> = products.flatten_all().unwrap().to_vec1().unwrap();
            let error = relative_error(&flat(&actual), &products);
            assert!(error < 1e-6, "{weight:?} on {x:?}: {error:.2e}");
        }
    }
}

#[test]
fn every_expert_has_its_own_global_scale() {
    let stack = packed(&[3, 7, 64], QuantFormat::NVFP4, 70);
    let global = Tensor::new(&[0.37f32, 1.1, 5e-3], &Device::Cpu).unwrap();
    let (words, scales) = (stack.packed().clone(), stack.scales().clone());
    let stack = QuantTensor::new(QuantFormat::NVFP4, words, scales, None, Some(global)).unwrap();
    let x = tensor(&[2, 64], 71);
    let products = stack.matmul(&x, None).unwrap();
    let weights = reference(&stack);
    for expert in 0..3 {
        let weights = &weights[expert * 7 * 64..][..7 * 64];
        let expected: Vec<f64> = flat(&x)
            .chunks(64)
            .flat_map(|x| {
                weights
                    .chunks(64)
                    .map(|row| row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum())
                    .collect::<Vec<f64>>()
            })
            .collect();
        let error = relative_error(&flat(&products.get(expert).unwrap()), &expected);
        assert!(error < 1e-6, "expert {expert}: {error:.2e}");
    }
}

/// A rank that holds some rows computes bit for bit what one that holds all of them does.
#[test]
fn products_of_slices_along_n_are_slices_of_the_product() {
    for format in QuantFormat::all() {
        let weight = packed(&[150, 1152], format, 80);
        for m in [1, 3, 20, 40, 70] {
            let x = tensor(&[m, 1152], 81);
            let whole = weight.matmul(&x, None).unwrap();
            for (start, len) in [(0, 1), (5, 30), (33, 80)] {
                let slice = weight.narrow(0, start, len).unwrap().matmul(&x, None).unwrap();
                assert_eq!(bits(&slice), bits(&whole.narrow(1, start, len).unwrap()), "{format} M={m}");
            }
        }
    }
}

#[test]
fn arguments_that_do_not_fit_are_refused() {
    let weight = packed(&[3, 64], AFFINE, 90);
    let x = tensor(&[2, 64], 91);
    for (dims, told) in
        [(&[2, 32][..], "found shape [2, 32]"), (&[64, 2], "found shape [64, 2]"), (&[], "found shape []")]
    {
        let error = refused(weight.matmul(&Tensor::zeros(dims, DType::F32, &Device::Cpu).unwrap(), None));
        assert!(error.contains("expected last dimension 64") && error.contains(told), "{error}");
    }
    for dtype in [DType::F64, DType::U32] {
        for weight in [&weight, &packed(&[2, 3, 64], AFFINE, 90)] {
            let error = refused(weight.matmul(&x.abs().unwrap().to_dtype(dtype).unwrap(), None));
            assert!(
                error.contains(&format!("{dtype:?}")) && error.contains("use F32, F16 or BF16"),
                "{error}"
            );
        }
    }
    for (dims, told) in [(&[4][..], "[4]"), (&[1, 3], "[1, 3]"), (&[], "[]")] {
        let bias = Tensor::zeros(dims, DType::F32, &Device::Cpu).unwrap();
        let error = refused(weight.matmul(&x, Some(&bias)));
        assert!(error.contains("bias: expected shape [3]") && error.contains(told), "{error}");
    }
    let error = refused(weight.matmul(&x, Some(&Tensor::zeros(3, DType::U32, &Device::Cpu).unwrap())));
    assert!(error.contains("bias") && error.contains("U32"), "{error}");
    let stack = packed(&[2, 3, 64], AFFINE, 90);
    let error = refused(stack.matmul(&tensor(&[64], 91), None));
    assert!(error.contains("expected a shape [.., M, K]") && error.contains("[64]"), "{error}");
    let error = refused(stack.matmul(&tensor(&[3, 2, 64], 91), None));
    assert!(error.contains("[3]") && error.contains("[2]"), "{error}");
}

/// The gradient with respect to x, against that of candle's product with the dense weights.
#[test]
fn gradients_are_those_of_the_dense_product() {
    for (weight, x) in [
        (&[7, 64][..], &[64][..]),
        (&[7, 64], &[5, 64]),
        (&[7, 64], &[2, 3, 64]),
        (&[3, 7, 64], &[5, 64]),
        (&[3, 7, 64], &[4, 3, 5, 64]),
    ] {
        let weight = packed(weight, AFFINE, 100);
        let x = Var::from_tensor(&tensor(x, 101)).unwrap();
        let bias = tensor(&[7], 102);
        let dense = Tensor::from_vec(reference(&weight), weight.dims(), &Device::Cpu).unwrap();
        let row = match x.rank() {
            1 => x.unsqueeze(0).unwrap(),
            _ => x.as_tensor().clone(),
        };
        let expected = row.broadcast_matmul(&dense.t().unwrap()).unwrap();
        let actual = weight.matmul(&x, Some(&bias)).unwrap();
        // A loss in which every element of the product has another weight.
        let importance = tensor(actual.dims(), 103);
        let expected = (expected.reshape(actual.dims()).unwrap() * &importance).unwrap();
        let actual = (actual * &importance).unwrap();
        let gradient = |loss: &Tensor| {
            flat(loss.sum_all().unwrap().backward().unwrap().get(&x).expect("a gradient for x"))
        };
        let expected: Vec<f64> = gradient(&expected).into_iter().map(f64::from).collect();
        let error = relative_error(&gradient(&actual), &expected);
        assert!(error < 1e-6, "{weight:?} on {x:?}: {error:.2e}");
    }
}

#[test]
fn embedding_gathers_decoded_rows() {
    for format in FORMATS {
        let table = packed(&[9, 192], format, 110);
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let all = Tensor::from_vec(reference(&table), (9, 192), &Device::Cpu).unwrap();
            let all = all.to_dtype(dtype).unwrap();
            for ids_dtype in [DType::U8, DType::U32, DType::I64] {
                let ids = Tensor::new(&[[8u32, 0, 3], [3, 3, 7]], &Device::Cpu).unwrap();
                let ids = ids.to_dtype(ids_dtype).unwrap();
                let expected = all.index_select(&ids.flatten_all().unwrap(), 0).unwrap();
                let rows = table.embed(&ids, dtype).unwrap();
                assert_eq!((rows.dims(), rows.dtype()), (&[2, 3, 192][..], dtype));
                assert_eq!(bits(&rows), bits(&expected), "{format}");
                let turned = table.embed(&ids.t().unwrap(), dtype).unwrap();
                assert_eq!(bits(&turned), bits(&rows.transpose(0, 1).unwrap()), "{format}");
            }
            let one = table.embed(&Tensor::new(5u32, &Device::Cpu).unwrap(), dtype).unwrap();
            assert_eq!(one.dims(), [192]);
            assert_eq!(bits(&one), bits(&all.get(5).unwrap()));
            let none = table.embed(&Tensor::zeros((2, 0), DType::U32, &Device::Cpu).unwrap(), dtype);
            assert_eq!(none.unwrap().dims(), [2, 0, 192]);
        }
    }
}

#[test]
fn ids_that_are_none_are_refused() {
    let table = packed(&[9, 64], AFFINE, 120);
    let error = |ids: Tensor| refused(table.embed(&ids, DType::F32));
    let told = error(Tensor::new(&[0u32, 9], &Device::Cpu).unwrap());
    assert!(told.contains("ids: expected each below 9, found 9"), "{told}");
    let told = error(Tensor::new(&[0i64, -1], &Device::Cpu).unwrap());
    assert!(told.contains("ids: expected each below 9, found -1"), "{told}");
    let told = error(Tensor::new(&[0f32], &Device::Cpu).unwrap());
    assert!(told.contains("ids: expected dtype U8, U32 or I64, found F32"), "{told}");
    let ids = Tensor::new(&[0u32], &Device::Cpu).unwrap();
    let told = refused(packed(&[2, 9, 64], AFFINE, 120).embed(&ids, DType::F32));
    assert!(told.contains("expected a weight [N, K]") && told.contains("[2, 9, 64]"), "{told}");
    let told = refused(table.embed(&ids, DType::F64));
    assert!(told.contains("F64") && told.contains("use F32, F16 or BF16"), "{told}");
}

/// Whatever its strides, as in candle_nn.
#[test]
fn x_without_rows_gives_an_empty_result() {
    let device = Device::Cpu;
    let (n, k) = (32, 64);
    let dense = Tensor::randn(0f32, 1., (n, k), &device).unwrap();
    let bias = Tensor::randn(0f32, 1., n, &device).unwrap();
    let ones = |dims: &[usize]| Tensor::ones(dims, DType::F32, &device).unwrap();
    let without_rows = [
        ones(&[0, k]),
        ones(&[k, 0]).t().unwrap(),
        ones(&[4, k]).narrow(0, 4, 0).unwrap(),
        ones(&[4, 2 * k]).narrow(1, 3, k).unwrap().narrow(0, 2, 0).unwrap(),
        ones(&[1, k]).broadcast_as((0, k)).unwrap(),
        ones(&[2, 0, k]),
        ones(&[0, 3, k]).transpose(0, 1).unwrap(),
        ones(&[2, 5, k]).narrow(1, 1, 0).unwrap(),
        ones(&[5, 2, k]).transpose(0, 1).unwrap().narrow(1, 0, 0).unwrap(),
        ones(&[2, 3, 0, k]).transpose(0, 1).unwrap(),
        ones(&[2, k, 3, 0]).transpose(1, 3).unwrap(),
    ];
    let packed = QuantTensor::quantize(&dense, QuantFormat::affine(4, 32).unwrap()).unwrap();
    let blocks = QTensor::quantize(&dense, GgmlDType::Q4_0).unwrap();
    let weights = [
        LayerWeight::Dense(dense.clone()),
        LayerWeight::Quantized(packed),
        LayerWeight::Ggml(Arc::new(blocks)),
    ];
    let reference = candle_nn::Linear::new(dense, Some(bias.clone()));
    for x in &without_rows {
        let expected = reference.forward(x).map(|y| y.dims().to_vec());
        let mut dims = x.dims().to_vec();
        *dims.last_mut().unwrap() = n;
        for weight in &weights {
            // There candle_nn refuses some, too.
            if expected.is_err() && matches!(weight, LayerWeight::Dense(_)) {
                continue;
            }
            for bias in [None, Some(bias.clone())] {
                let y = Linear::new(weight.clone(), bias).forward(x);
                let y = y.unwrap_or_else(|error| panic!("{:?} {weight:?}: {error}", x.layout()));
                assert_eq!((y.dims(), y.dtype()), (dims.as_slice(), DType::F32), "{:?}", x.layout());
            }
        }
    }
}
