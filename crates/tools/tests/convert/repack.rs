//! Packed weights of other layouts and formats that MLX can hold exactly.

use super::common::{bundled, convert, json_file, tensors, tensors_of, Source};
use candle_core::{DType, Device};
use candle_quant::checkpoint::{Checkpoint, Weight};
use candle_quant_tools::convert::{self, ConvertOptions, ConvertPlan, Recipe, RunOptions};
use candle_quant_tools::verify;
use half::{bf16, f16};
use sha2::{Digest, Sha256};
use std::fs;
use std::path::PathBuf;

fn fixture(path: &str) -> Checkpoint {
    Checkpoint::open(PathBuf::from(env!("CANDLE_QUANT_REPOSITORY")).join("tests/fixtures").join(path))
        .unwrap()
}

fn safe(format: &str) -> ConvertOptions {
    ConvertOptions::mlx(Recipe::safe(format.parse().unwrap()))
}

fn uqff() -> ConvertOptions {
    ConvertOptions::uqff(Recipe::named("mistralrs", "keep".parse().unwrap()).unwrap())
}

fn dequantized(checkpoint: &Checkpoint, name: &str) -> Vec<f32> {
    let numbers = checkpoint.tensor(name, None).unwrap().to_dense(DType::F32, &Device::Cpu).unwrap();
    numbers.flatten_all().unwrap().to_vec1().unwrap()
}

/// `expected.json` is what the tools dequantize.
#[test]
fn integers_with_zeros_and_symmetric_ones_have_biases_in_mlx() {
    for (name, format) in [
        ("hf/awq-g64", "affine 4-bit g64"),
        ("hf/awq-gemv_fast-g32", "affine 4-bit g32"),
        ("hf/ct-int4-g32", "affine 4-bit g32"),
        ("hf/ct-int8-channel", "affine 8-bit g128"),
        ("hf/gptq-b4-g128", "affine 4-bit g128"),
        // Not symmetric: scales in F32, beside biases that 16 bits don't hold.
        ("hf/awq-rows", "affine 4-bit g128"),
        ("hf/awq-gemv-g64", "affine 4-bit g64"),
        ("hf/gptq-b2-g64", "affine 2-bit g64"),
        ("hf/gptq-b3-g32", "affine 3-bit g32"),
        ("hf/ct-int4-asym-g64", "affine 4-bit g64"),
        ("hf/ct-llmc-awq", "affine 4-bit g128"),
    ] {
        let source = fixture(name);
        let out = convert(&source, &safe("keep"));
        let written = Checkpoint::open(out.path()).unwrap();
        let expected = json_file(source.path().join("expected.json"));
        let mut packed = 0;
        for (tensor, expected) in expected.as_object().unwrap() {
            let numbers = dequantized(&written, tensor);
            let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            let sha256: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(sha256, expected["sha256"].as_str().unwrap(), "{name} {tensor}");
            let weight = written.tensor(tensor, None).unwrap();
            packed += usize::from(matches!(&weight, Weight::Packed(_)) && weight.format_name() == format);
        }
        assert_eq!(packed, if name == "hf/ct-llmc-awq" { 7 } else { 6 }, "{name}");
        // As mlx-lm asks for it: scales and biases of one dtype.
        for (tensor, (dtype, shape, _)) in tensors(out.path()) {
            if let Some(module) = tensor.strip_suffix(".biases") {
                let scales = &tensors(out.path())[&format!("{module}.scales")];
                assert_eq!((&scales.0, &scales.1), (&dtype, &shape));
            }
        }
        assert!(verify::verify(&written).passed(true), "{name}");
    }
}

/// The fixture with F32 scales, each with these of its bits only.
fn with_scales(mask: impl Fn(usize) -> u32) -> Source {
    let mut source = Source::new();
    let folder = fixture("hf/ct-int4-g128-f32").path().to_owned();
    for (index, (name, (dtype, shape, mut bytes))) in
        tensors_of(&folder.join("model.safetensors")).into_iter().enumerate()
    {
        if name.ends_with("weight_scale") {
            assert_eq!(dtype, "F32");
            for scale in bytes.as_chunks_mut::<4>().0 {
                *scale = (u32::from_le_bytes(*scale) & mask(index)).to_le_bytes();
            }
        }
        source = source.with_bytes(&name, &dtype, &shape, &bytes);
    }
    source.with_config(&fs::read_to_string(folder.join("config.json")).unwrap()).finish()
}

/// MLX rounds the product of code and scale before it adds the bias.
#[test]
fn symmetric_integers_with_f32_scales_have_biases_where_nothing_is_rounded() {
    let (source, sixteen_bits) = (with_scales(|_| !0xF), with_scales(|_| !0xFFFF));
    for source in [&source, &sixteen_bits] {
        for out in [convert(&source.open(), &safe("keep")), convert(&source.open(), &uqff())] {
            let written = Checkpoint::open(out.path()).unwrap();
            let mut packed = 0;
            for name in source.open().tensor_names() {
                let found = written.tensor(name, None).unwrap();
                packed += usize::from(found.format_name() == "affine 4-bit g128");
                assert_eq!(dequantized(&source.open(), name), dequantized(&written, name), "{name}");
            }
            assert_eq!(packed, 6);
            assert!(verify::verify(&written).passed(true));
        }
    }
    let out = convert(&source.open(), &safe("keep"));
    for (tensor, (dtype, _, biases)) in tensors(out.path()) {
        if let Some(module) = tensor.strip_suffix(".biases") {
            let scales = &tensors(out.path())[&format!("{module}.scales")];
            let number = |bytes: &[u8; 4]| f32::from_le_bytes(*bytes);
            let pairs = scales.2.as_chunks().0.iter().zip(biases.as_chunks().0);
            assert_eq!((scales.0.as_str(), dtype.as_str()), ("F32", "F32"));
            assert!(pairs.into_iter().all(|(scale, bias)| number(bias) == -8. * number(scale)), "{tensor}");
        }
    }
}

#[test]
fn symmetric_integers_with_other_f32_scales_are_still_a_choice() {
    // As they were written, with one bit too many, and with that in one weight alone.
    let last = tensors_of(&fixture("hf/ct-int4-g128-f32").path().join("model.safetensors"))
        .into_keys()
        .rposition(|name| name.ends_with("weight_scale"))
        .unwrap();
    let one_bad = with_scales(|index| if index == last { !0x7 } else { !0xF });
    for source in [fixture("hf/ct-int4-g128-f32"), with_scales(|_| !0x7).open(), one_bad.open()] {
        let error = ConvertPlan::new(&source, &safe("4")).unwrap_err().to_string();
        let parts = [
            "symmetric 4-bit g128 with scales whose products with codes are rounded",
            "requantize or dequantize it",
        ];
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
}

#[test]
fn mxfp4_becomes_five_bits_exactly() {
    for (name, count) in [
        ("mlx/llama-untied-mxfp4", 16),
        ("mlx/gptoss-mxfp4-mlxlm", 16),
        ("mlx/gptoss-mxfp4-hf", 6),
        ("uqff/mxfp4", 9),
    ] {
        let source = fixture(name);
        let recipe = Recipe::from_toml("x", "format = \"5:g32\"\ndefaults = false").unwrap();
        let plan = ConvertPlan::new(&source, &ConvertOptions::mlx(recipe)).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("out");
        convert::convert(&plan, &out, &RunOptions::default(), &|_| ()).unwrap();
        let written = Checkpoint::open(&out).unwrap();
        let mut widened = 0;
        for tensor in plan.tensors().filter(|tensor| tensor.from == "mxfp4") {
            assert_eq!((tensor.to.as_str(), tensor.rule.as_str()), ("affine 5-bit g32", "format"));
            assert_eq!(written.tensor(&tensor.name, None).unwrap().format_name(), "affine 5-bit g32");
            // Zeros have no sign there.
            let (a, b) = (dequantized(&source, &tensor.name), dequantized(&written, &tensor.name));
            assert!(a.iter().any(|number| *number != 0.) && a == b, "{name} {}", tensor.name);
            widened += 1;
        }
        assert_eq!(widened, count, "{name}");
        assert!(verify::verify(&written).passed(true), "{name}");
    }
    // It was not asked for: five bits are for a head that could have been packed with four.
    let plan = ConvertPlan::new(&fixture("mlx/llama-untied-mxfp4"), &safe("4:g32")).unwrap();
    assert!(plan.tensors().any(|tensor| tensor.name == "lm_head.weight" && tensor.to == "mxfp4"));
}

/// One row of all codes, twice, for each scale.
fn mxfp4(scales: &[u8]) -> Source {
    let codes: Vec<u8> = [0x10u8, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE].repeat(2 * scales.len());
    Source::new()
        .with_config(r#"{"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}}"#)
        .with_bytes("w.weight", "U32", &[scales.len(), 4], &codes)
        .with_bytes("w.scales", "U8", &[scales.len(), 1], scales)
        .finish()
}

/// What is written, against E2M1 and E8M0 by their definitions.
#[test]
fn every_code_and_the_ends_of_the_scales() {
    const E2M1: [f64; 8] = [0., 0.5, 1., 1.5, 2., 3., 4., 6.];
    let width = |dtype| if dtype == DType::F32 { 4 } else { 2 };
    for (dtype, scales) in
        [(DType::BF16, &[0u8, 1, 100, 127, 252][..]), (DType::F16, &[104, 127, 140]), (DType::F32, &[0, 252])]
    {
        let recipe = Recipe::from_toml("x", "format = \"5:g32\"\ndefaults = false").unwrap();
        let mut options = ConvertOptions::mlx(recipe);
        options.dtype = Some(dtype);
        let out = convert(&mxfp4(scales).open(), &options);
        let stored = tensors(out.path());
        let numbers = |name: &str| -> Vec<f64> {
            let bytes = stored[name].2.chunks_exact(width(dtype));
            bytes
                .map(|bytes| match dtype {
                    DType::BF16 => bf16::from_le_bytes(bytes.try_into().unwrap()).to_f64(),
                    DType::F16 => f16::from_le_bytes(bytes.try_into().unwrap()).to_f64(),
                    _ => f32::from_le_bytes(bytes.try_into().unwrap()).into(),
                })
                .collect()
        };
        let (found_scales, biases) = (numbers("w.scales"), numbers("w.biases"));
        for (row, exponent) in scales.iter().enumerate() {
            // 32 codes of 5 bits, lowest first.
            let words = stored["w.weight"].2[row * 20..][..20].iter().rev();
            let bits: Vec<bool> =
                words.flat_map(|byte| (0..8).rev().map(move |bit| byte >> bit & 1 == 1)).rev().collect();
            for (index, code) in bits.chunks(5).enumerate() {
                let code = code.iter().rev().fold(0u8, |code, bit| code << 1 | u8::from(*bit));
                let sign = if index % 16 < 8 { 1. } else { -1. };
                let expected = sign * E2M1[index % 8] * 2f64.powi(i32::from(*exponent) - 127);
                assert_eq!(f64::from(code) * found_scales[row] + biases[row], expected, "{exponent} {index}");
            }
        }
    }
}

#[test]
fn scales_that_a_dtype_does_not_hold_are_named() {
    for (dtype, scale, shown) in [
        (DType::BF16, 253, "2^126"),
        (DType::F16, 100, "2^-27"),
        (DType::F16, 142, "2^15"),
        (DType::F32, 255, "2^128"),
    ] {
        let mut options = safe("5:g32");
        options.recipe = Recipe::from_toml("x", "format = \"5:g32\"\ndefaults = false").unwrap();
        options.dtype = Some(dtype);
        let source = mxfp4(&[127, scale]);
        let plan = ConvertPlan::new(&source.open(), &options).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("out");
        let error = convert::convert(&plan, &out, &RunOptions::default(), &|_| ()).unwrap_err().to_string();
        for part in ["`w`", shown, "--dtype"] {
            assert!(error.contains(part), "{part} in {error}");
        }
        assert!(!out.exists());
    }
}

#[test]
fn nothing_else_becomes_wider() {
    // 4-bit affine codes would be 5-bit ones, too, but nobody can mean that.
    let plan = ConvertPlan::new(&bundled("tiny"), &safe("5:g32")).unwrap();
    assert!(plan.tensors().filter(|t| t.shape.len() > 1).all(|t| t.to == "affine 4-bit g64"));
}

/// In which group a column is, no other file says, and MLX has no groups across rows; UQFF has some of HQQ's (`exact.rs`), none of 3
/// bits that mistral.rs dequantizes on a CPU.
#[test]
fn columns_in_order_and_groups_across_rows_are_decoded_or_packed_anew() {
    for (name, format, in_uqff) in [
        ("hf/gptq-act-order-b4-g32", "affine 4-bit g32, act-order", false),
        ("hf/hqq-b4-g64-axis0", "affine 4-bit g64, across rows", true),
        ("hf/hqq-b3-g32-axis0", "affine 3-bit g32, across rows", false),
    ] {
        let source = fixture(name);
        let refusing = [safe("keep"), uqff()].into_iter().take(if in_uqff { 1 } else { 2 });
        for options in refusing {
            let told = ConvertPlan::new(&source, &options).unwrap_err().to_string();
            assert!(told.contains(&format!("{format}, as it is in")), "{told}");
            assert!(told.contains("requantize or dequantize it"), "{told}");
        }
        let mut options = ConvertOptions::dense();
        options.dtype = Some(DType::F32);
        let dense = convert(&source, &options);
        let dense = Checkpoint::open(dense.path()).unwrap();
        let expected = json_file(source.path().join("expected.json"));
        for (tensor, expected) in expected.as_object().unwrap() {
            let numbers = dequantized(&dense, tensor);
            let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            let sha256: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(sha256, expected["sha256"].as_str().unwrap(), "{name} {tensor}");
        }
    }
}
