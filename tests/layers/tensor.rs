//! `QuantTensor`: construction, quantizing, dequantizing, cutting and joining.

use crate::packed::{bits, flat, numbers, packed, reference, tensor};
use candle_core::{DType, Device, Tensor};
use candle_quant::format::Bits;
use candle_quant::{QuantFormat, QuantTensor, Result};
use std::path::Path;

const AFFINE: QuantFormat = QuantFormat::affine_opt(4, 32).unwrap();

/// The parts of a weight, to be spoilt one by one.
#[derive(Clone)]
struct Parts {
    format: QuantFormat,
    packed: Tensor,
    scales: Tensor,
    biases: Option<Tensor>,
    global_scale: Option<Tensor>,
}

impl Parts {
    fn of(format: QuantFormat, dims: &[usize]) -> Self {
        let weight = packed(dims, format, 1);
        Self {
            format,
            packed: weight.packed().clone(),
            scales: weight.scales().clone(),
            biases: weight.biases().cloned(),
            global_scale: None,
        }
    }

    fn build(self) -> Result<QuantTensor> {
        QuantTensor::new(self.format, self.packed, self.scales, self.biases, self.global_scale)
    }
}

/// Builds a spoilt weight; the error has to say all of `told`.
#[track_caller]
fn refused(parts: Parts, told: &[&str]) {
    let error = parts.build().expect_err("accepted").to_string();
    for told in told {
        assert!(error.contains(told), "{told:?} is not in {error:?}");
    }
}

fn zeros(dims: &[usize], dtype: DType) -> Tensor {
    Tensor::zeros(dims, dtype, &Device::Cpu).unwrap()
}

#[test]
fn packed_words_are_checked() {
    let good = Parts::of(AFFINE, &[3, 64]);
    let with = |packed| Parts { packed, ..good.clone() };
    refused(with(zeros(&[3, 8], DType::I64)), &["packed words of an affine 4-bit g32", "U32", "I64"]);
    refused(with(zeros(&[8], DType::U32)), &["[.., N, words]", "[8]"]);
    refused(with(zeros(&[0, 8], DType::U32)), &["no dimension of zero", "[0, 8]"]);
    refused(with(zeros(&[3, 0], DType::U32)), &["no dimension of zero", "[3, 0]"]);
    refused(with(zeros(&[3, 6], DType::U32)), &["whole groups, 4 words each", "6 words in [3, 6]"]);
    assert_eq!(good.build().unwrap().dims(), [3, 64]);
}

#[test]
fn scales_and_biases_are_checked() {
    let good = Parts::of(AFFINE, &[3, 64]);
    let with = |scales| Parts { scales, ..good.clone() };
    refused(with(zeros(&[3, 2], DType::U8)), &["scales", "F16, BF16 or F32", "U8"]);
    refused(with(zeros(&[3, 2], DType::F64)), &["scales", "F16, BF16 or F32", "F64"]);
    refused(with(zeros(&[3, 1], DType::F32)), &["scales", "shape [3, 2]", "[3, 1]"]);
    refused(with(zeros(&[2, 3], DType::F32)), &["scales", "shape [3, 2]", "[2, 3]"]);
    refused(with(zeros(&[1, 3, 2], DType::F32)), &["scales", "shape [3, 2]", "[1, 3, 2]"]);
    let with = |biases| Parts { biases, ..good.clone() };
    refused(with(Some(zeros(&[3, 2], DType::U8))), &["biases", "F16, BF16 or F32", "U8"]);
    refused(with(Some(zeros(&[3, 4], DType::F32))), &["biases", "shape [3, 2]", "[3, 4]"]);
    // Scales and biases may differ in dtype.
    with(Some(zeros(&[3, 2], DType::BF16))).build().unwrap();

    for format in [QuantFormat::MXFP4, QuantFormat::NVFP4, QuantFormat::MXFP8] {
        let good = Parts::of(format, &[3, 64]);
        let dims = good.scales.dims().to_vec();
        let shape = format!("shape {dims:?}");
        refused(Parts { scales: zeros(&dims, DType::F32), ..good.clone() }, &["scales", "U8", "F32"]);
        refused(Parts { scales: zeros(&[3, 1], DType::U8), ..good.clone() }, &["scales", &shape, "[3, 1]"]);
        refused(
            Parts { biases: Some(zeros(&dims, DType::F32)), ..good },
            &["expected no biases, found biases"],
        );
    }
}

#[test]
fn global_scales_are_checked() {
    let global = |values: &[f32]| Some(Tensor::new(values, &Device::Cpu).unwrap());
    let parts = Parts { global_scale: global(&[1.]), ..Parts::of(AFFINE, &[3, 64]) };
    refused(parts, &["global scale", "only formats with scales of a byte", "found one"]);
    let good = Parts::of(QuantFormat::NVFP4, &[2, 3, 64]);
    let with = |global_scale| Parts { global_scale, ..good.clone() };
    refused(with(Some(zeros(&[2], DType::F16))), &["dtype F32", "F16"]);
    refused(with(global(&[1., 1., 1.])), &["one value, or 2", "[3]"]);
    refused(with(Some(zeros(&[2, 1], DType::F32))), &["one value, or 2", "[2, 1]"]);
    refused(with(global(&[1., -0.5])), &["finite numbers of 0 or more", "-0.5"]);
    refused(with(global(&[1., f32::NAN])), &["finite numbers of 0 or more", "NaN"]);
    refused(with(global(&[f32::INFINITY])), &["finite numbers of 0 or more", "inf"]);
    for global_scale in [global(&[0.]), global(&[0.25]), global(&[0.25, 3.]), Some(zeros(&[], DType::F32))] {
        with(global_scale).build().unwrap();
    }
    // One matrix has one global scale.
    let single = Parts { global_scale: global(&[1., 1.]), ..Parts::of(QuantFormat::NVFP4, &[3, 64]) };
    refused(single, &["one value, or 1", "[2]"]);
}

#[test]
fn parts_need_not_be_contiguous() {
    let weight = packed(&[4, 64], AFFINE, 3);
    let turned = |part: &Tensor| part.t().unwrap().contiguous().unwrap().t().unwrap();
    let biases = weight.biases().map(turned);
    let same = QuantTensor::new(AFFINE, turned(weight.packed()), turned(weight.scales()), biases, None);
    assert_eq!(bits(&same.unwrap().dequantize(DType::F32).unwrap()), bits(&dequantized(&weight)));
}

#[test]
fn every_global_scale_is_that_of_its_matrix() {
    for format in [QuantFormat::NVFP4, QuantFormat::MXFP4, QuantFormat::MXFP8] {
        let weight = packed(&[2, 3, 64], format, 4);
        let (words, scales) = (weight.packed().clone(), weight.scales().clone());
        let global = Tensor::new(&[0.37f32, 0.], &Device::Cpu).unwrap();
        let scaled = QuantTensor::new(format, words, scales, None, Some(global)).unwrap();
        assert_eq!(flat(&dequantized(&scaled)), reference(&scaled));
        assert_eq!(flat(&dequantized(&scaled))[3 * 64..], [0.; 3 * 64]);
        for expert in 0..2 {
            let one = scaled.narrow(0, expert, 1).unwrap();
            assert_eq!(one.global_scale().unwrap().dims(), [1]);
            assert_eq!(bits(&dequantized(&one)), bits(&dequantized(&scaled).narrow(0, expert, 1).unwrap()));
        }
    }
}

/// Affine codes without biases stand for integers around zero, times the scale, rounded once.
#[test]
fn codes_without_biases_are_symmetric() {
    for format in QuantFormat::all().into_iter().filter(|format| format.has_biases()) {
        let weight = packed(&[6, 256], format, 5);
        let zero = 1i64 << (format.bits() - 1);
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let scales = weight.scales().to_dtype(dtype).unwrap();
            let symmetric = QuantFormat::symmetric(format.bits(), format.group_size()).unwrap();
            let build =
                |format, scales| QuantTensor::new(format, weight.packed().clone(), scales, None, None);
            let refused = build(format, scales.clone()).unwrap_err().to_string();
            assert!(refused.contains("QuantFormat::symmetric"), "{refused}");
            let build = |scales| build(symmetric, scales).unwrap();
            let symmetric = build(scales.clone());
            assert_eq!(symmetric.biases().is_none(), dtype == DType::F32);
            let expected: Vec<u32> = codes(&symmetric)
                .into_iter()
                .zip(flat(&scales).into_iter().flat_map(|scale| vec![scale; format.group_size()]))
                // At most 8 and 24 bits: exact in f64. A zero is positive.
                .map(|(code, scale)| (((code as i64 - zero) as f64 * f64::from(scale)) as f32 + 0.).to_bits())
                .collect();
            assert_eq!(bits(&dequantized(&symmetric)), expected, "{format} {dtype:?}");

            let (rows, tail) = (symmetric.narrow(0, 1, 4).unwrap(), symmetric.narrow(1, 128, 128).unwrap());
            let whole = dequantized(&symmetric);
            assert_eq!(bits(&dequantized(&rows)), bits(&whole.narrow(0, 1, 4).unwrap()));
            assert_eq!(bits(&dequantized(&tail)), bits(&whole.narrow(1, 128, 128).unwrap()));
            let twice = QuantTensor::concat(&[&symmetric, &symmetric]).unwrap();
            assert_eq!(bits(&dequantized(&twice)), bits(&Tensor::cat(&[&whole, &whole], 0).unwrap()));
            if dtype == DType::F32 {
                let told = QuantTensor::concat(&[&symmetric, &weight]).expect_err("accepted").to_string();
                assert!(told.contains("expected symmetric") && told.contains("found affine"), "{told}");
            }
        }
    }
    // 128 times this scale is no f16; the biases are F32 then.
    let large = Tensor::full(600f32, (2, 2), &Device::Cpu).unwrap().to_dtype(DType::F16).unwrap();
    let format = QuantFormat::symmetric(8, 32).unwrap();
    let packed = Tensor::full(0xff80_7f00u32, (2, 16), &Device::Cpu).unwrap();
    let weight = QuantTensor::new(format, packed, large, None, None).unwrap();
    assert_eq!(flat(&dequantized(&weight))[..4], [-128. * 600., -600., 0., 127. * 600.]);
}

/// The codes of a weight, one by one from the bits.
fn codes(weight: &QuantTensor) -> Vec<u32> {
    let words: Vec<u32> = weight.packed().flatten_all().unwrap().to_vec1().unwrap();
    let width = weight.format().bits();
    let bit = |at: usize| words[at / 32] >> (at % 32) & 1;
    let count = words.len() * 32 / width;
    (0..count).map(|code| (0..width).map(|b| bit(code * width + b) << b).sum()).collect()
}

fn dequantized(weight: &QuantTensor) -> Tensor {
    weight.dequantize(DType::F32).unwrap()
}

/// What `mx.quantize` of mlx 0.32.4 made of the same weights, in every format and dtype.
#[test]
fn quantize_agrees_with_mlx() {
    let path = Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures/mlx/codec.safetensors");
    let file = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
    let mut cases = 0;
    for (name, weight) in &file {
        let Some(case) = name.strip_suffix(".w") else { continue };
        if file.contains_key(&format!("{case}.gs")) {
            continue; // there a global scale was asked for; here it comes when it is needed
        }
        let number = |part: &str| part[1..].parse().unwrap();
        let format = match *case.split('.').collect::<Vec<_>>() {
            ["affine", bits, group, _] => QuantFormat::affine(number(bits), number(group)).unwrap(),
            ["mxfp4", ..] => QuantFormat::MXFP4,
            ["mxfp8", ..] => QuantFormat::MXFP8,
            ["nvfp4", ..] => QuantFormat::NVFP4,
            _ => panic!("{case}"),
        };
        let quantized = QuantTensor::quantize(weight, format).unwrap();
        let words = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<u32>().unwrap();
        assert_eq!(words(quantized.packed()), words(&file[&format!("{case}.q")]), "{case}");
        let scales = &file[&format!("{case}.s")];
        assert_eq!(quantized.scales().dtype(), scales.dtype(), "{case}");
        assert_eq!(bits(quantized.scales()), bits(scales), "{case}");
        assert_eq!(quantized.biases().map(bits), file.get(&format!("{case}.b")).map(bits), "{case}");
        cases += 1;
    }
    assert_eq!(cases, (Bits::ALL.len() * 3 + 3) * 3);
}

#[test]
fn stacks_and_views_are_quantized_as_their_matrices() {
    for format in QuantFormat::all() {
        let stack = tensor(&[2, 256, 3], 5).transpose(1, 2).unwrap();
        assert!(!stack.is_contiguous());
        let whole = QuantTensor::quantize(&stack, format).unwrap();
        assert_eq!(whole.dims(), [2, 3, 256]);
        for index in 0..2 {
            let one = QuantTensor::quantize(&stack.get(index).unwrap(), format).unwrap();
            let words = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<u32>().unwrap();
            assert_eq!(words(&whole.packed().get(index).unwrap()), words(one.packed()), "{format}");
            assert_eq!(bits(&whole.scales().get(index).unwrap()), bits(one.scales()), "{format}");
        }
    }
}

#[test]
fn decoding_follows_the_definition_in_every_dtype() {
    for format in QuantFormat::all() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let weight = tensor(&[5, 384], 6).to_dtype(dtype).unwrap();
            let weight = QuantTensor::quantize(&weight, format).unwrap();
            let exact = reference(&weight);
            assert_eq!(flat(&dequantized(&weight)), exact, "{format}");
            for rounded in [DType::F16, DType::BF16] {
                let expected =
                    Tensor::new(exact.as_slice(), &Device::Cpu).unwrap().to_dtype(rounded).unwrap();
                let actual = weight.dequantize(rounded).unwrap();
                assert_eq!(actual.dtype(), rounded);
                assert_eq!(bits(&actual), bits(&expected), "{format} {rounded:?}");
            }
        }
    }
    let error = packed(&[2, 64], AFFINE, 7).dequantize(DType::F64).unwrap_err().to_string();
    assert!(error.contains("F64") && error.contains("use F32, F16 or BF16"), "{error}");
}

#[test]
fn large_weights_get_a_global_scale_in_nvfp4_alone() {
    let weight = (tensor(&[4, 64], 8) * 1e6).unwrap();
    let absmax = flat(&weight.abs().unwrap()).into_iter().fold(0., f32::max);
    let quantized = QuantTensor::quantize(&weight, QuantFormat::NVFP4).unwrap();
    assert_eq!(flat(quantized.global_scale().unwrap()), [absmax / 2688.]);
    let dequantized = flat(&dequantized(&quantized));
    assert_eq!(dequantized, reference(&quantized));
    // The widest gap of E2M1 is from 4 to 6, a third of a group's largest; E4M3 adds its 1/16.
    for (group, (dequantized, weight)) in dequantized.chunks(16).zip(flat(&weight).chunks(16)).enumerate() {
        let largest = weight.iter().fold(0f32, |largest, w| largest.max(w.abs()));
        for (d, w) in dequantized.iter().zip(weight) {
            assert!((d - w).abs() <= largest * (1. / 6. + 1. / 16.), "group {group}: {d} for {w}");
        }
    }
    for (scale, needed) in [(2688f32, false), (2689., true)] {
        let weight = Tensor::full(scale, (1, 16), &Device::Cpu).unwrap();
        let quantized = QuantTensor::quantize(&weight, QuantFormat::NVFP4).unwrap();
        assert_eq!(quantized.global_scale().is_some(), needed, "{scale}");
        let relative = flat(&quantized.dequantize(DType::F32).unwrap())[0] / scale - 1.;
        assert!(relative.abs() < 1e-6, "{scale}: {relative}");
    }
    for format in [AFFINE, QuantFormat::MXFP4, QuantFormat::MXFP8] {
        assert!(QuantTensor::quantize(&weight, format).unwrap().global_scale().is_none());
    }
}

#[test]
fn what_cannot_be_quantized_is_refused() {
    let error = |weight: &Tensor, format| QuantTensor::quantize(weight, format).unwrap_err().to_string();
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut values = numbers(128, 9);
        values[77] = bad;
        let weight = Tensor::from_vec(values, (2, 64), &Device::Cpu).unwrap();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let error = error(&weight.to_dtype(dtype).unwrap(), AFFINE);
            assert!(error.contains("finite numbers"), "{error}");
        }
    }
    for (dims, told) in [
        (&[64][..], "expected a shape [.., N, K], found [64]"),
        (&[], "expected a shape [.., N, K], found []"),
        (&[2, 48], "expected a positive multiple of 32, found 48"),
        (&[0, 64], "at least one element"),
    ] {
        let error = error(&zeros(dims, DType::F32), AFFINE);
        assert!(error.contains(told), "{error}");
    }
    let error = error(&zeros(&[2, 64], DType::F64), AFFINE);
    assert!(error.contains("F64") && error.contains("use F32, F16 or BF16"), "{error}");
}

/// Dequantized slices are bit for bit the slices of the dequantized whole, along every dimension.
#[test]
fn slices_decode_as_the_whole_does() {
    for format in QuantFormat::all() {
        let mut weight = packed(&[3, 5, 384], format, 10);
        if format == QuantFormat::NVFP4 {
            let global = Tensor::new(&[0.3f32, 0.7, 1.9], &Device::Cpu).unwrap();
            let (words, scales) = (weight.packed().clone(), weight.scales().clone());
            weight = QuantTensor::new(format, words, scales, None, Some(global)).unwrap();
        }
        let whole = dequantized(&weight);
        let g = format.group_size();
        let along_k = [(2, 0, g), (2, g, 384 - g), (2, 384 - g, g), (2, 0, 384)];
        let others = [(0, 0, 1), (0, 1, 2), (0, 0, 3), (1, 0, 5), (1, 2, 2), (1, 4, 1)];
        for (dim, start, len) in along_k.into_iter().chain(others) {
            let slice = weight.narrow(dim, start, len).unwrap();
            let expected = whole.narrow(dim, start, len).unwrap();
            assert_eq!(slice.dims(), expected.dims());
            assert_eq!(bits(&dequantized(&slice)), bits(&expected), "{format} {dim} {start} {len}");
        }
        let twice = weight.narrow(2, g, 2 * g).unwrap().narrow(1, 1, 3).unwrap().narrow(2, g, g).unwrap();
        let expected = whole.narrow(1, 1, 3).unwrap().narrow(2, 2 * g, g).unwrap();
        assert_eq!(bits(&dequantized(&twice)), bits(&expected), "{format}");
    }
}

#[test]
fn slices_that_cannot_be_are_refused() {
    let weight = packed(&[2, 4, 128], QuantFormat::affine(3, 64).unwrap(), 11);
    for (dim, start, len, told) in [
        (2, 32, 64, "multiples of the group size 64, found 64 from 32 on"),
        (2, 0, 32, "multiples of the group size 64, found 32 from 0 on"),
        (2, 64, 128, "expected 1 or more of 128, found 128 from 64 on"),
        (1, 0, 0, "expected 1 or more of 4, found 0 from 0 on"),
        (1, 3, 2, "expected 1 or more of 4, found 2 from 3 on"),
        (1, usize::MAX, 2, "1 or more of 4"),
        (0, 2, 1, "1 or more of 2"),
        (3, 0, 1, "dimension 3"),
    ] {
        let error = weight.narrow(dim, start, len).unwrap_err().to_string();
        assert!(error.contains(told), "{error}");
    }
}

#[test]
fn joining_undoes_cutting() {
    for format in QuantFormat::all() {
        for dims in [&[7, 256][..], &[2, 7, 256]] {
            let weight = packed(dims, format, 12);
            let along_n = dims.len() - 2;
            let part = |start, len| weight.narrow(along_n, start, len).unwrap();
            let joined = QuantTensor::concat(&[&part(0, 2), &part(2, 1), &part(3, 4)]).unwrap();
            assert_eq!(joined.dims(), dims);
            assert_eq!(bits(&dequantized(&joined)), bits(&dequantized(&weight)), "{format}");
        }
    }
}

#[test]
fn weights_that_do_not_fit_are_not_joined() {
    let error = |parts: &[&QuantTensor]| QuantTensor::concat(parts).unwrap_err().to_string();
    assert!(error(&[]).contains("expected at least one, found none"));
    let weight = packed(&[2, 128], AFFINE, 13);
    let other_format = packed(&[2, 128], QuantFormat::MXFP4, 13);
    let told = error(&[&weight, &other_format]);
    assert!(told.contains("affine 4-bit g32") && told.contains("mxfp4"), "{told}");
    error(&[&weight, &packed(&[2, 64], AFFINE, 13)]);
    error(&[&weight, &packed(&[1, 2, 128], AFFINE, 13)]);
    let small = packed(&[2, 128], QuantFormat::NVFP4, 13);
    let large = QuantTensor::quantize(&(tensor(&[2, 128], 13) * 1e6).unwrap(), QuantFormat::NVFP4).unwrap();
    let told = error(&[&small, &large]);
    assert!(told.contains("global scale"), "{told}");
    assert_eq!(QuantTensor::concat(&[&large, &large]).unwrap().dims(), [4, 128]);
}

#[test]
fn sizes_count_all_parts() {
    let bytes_per_weight = |format: QuantFormat, dtype| {
        let weight = tensor(&[4, 256], 14).to_dtype(dtype).unwrap();
        let weight = QuantTensor::quantize(&weight, format).unwrap();
        assert_eq!(weight.bits_per_weight(), weight.size_in_bytes() as f64 * 8. / 1024.);
        weight.bits_per_weight()
    };
    for bits in Bits::ALL.map(Bits::get) {
        for group_size in QuantFormat::AFFINE_GROUP_SIZES {
            let format = QuantFormat::affine(bits, group_size).unwrap();
            let (b, g) = (bits as f64, group_size as f64);
            assert_eq!(bytes_per_weight(format, DType::BF16), b + 32. / g);
            assert_eq!(bytes_per_weight(format, DType::F32), b + 64. / g);
        }
    }
    assert_eq!(bytes_per_weight(QuantFormat::MXFP4, DType::F32), 4.25);
    assert_eq!(bytes_per_weight(QuantFormat::NVFP4, DType::F32), 4.5);
    assert_eq!(bytes_per_weight(QuantFormat::MXFP8, DType::F32), 8.25);
    let large = (tensor(&[4, 256], 14) * 1e6).unwrap();
    let large = QuantTensor::quantize(&large, QuantFormat::NVFP4).unwrap();
    assert_eq!(large.size_in_bytes(), 4 * 256 / 2 + 4 * 256 / 16 + 4);
}

#[test]
fn a_weight_moves_with_all_its_parts() {
    let weight = (tensor(&[4, 256], 15) * 1e6).unwrap();
    for format in [AFFINE, QuantFormat::NVFP4] {
        let weight = QuantTensor::quantize(&weight, format).unwrap();
        let moved = weight.to_device(&Device::Cpu).unwrap();
        assert_eq!(moved.size_in_bytes(), weight.size_in_bytes());
        assert_eq!(bits(&dequantized(&moved)), bits(&dequantized(&weight)));
        assert_eq!(format!("{moved:?}"), format!("QuantTensor[{format}; [4, 256], Cpu]"));
    }
}
