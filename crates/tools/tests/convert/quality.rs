//! What is said of the loss, against sums in f64 over what is written; and what is not finite.

use super::common::{bundled, tensors, Source};
use candle_core::{DType, Device};
use candle_quant::checkpoint::Checkpoint;
use candle_quant::{Error, Result};
use candle_quant_tools::convert::{self, ConvertOptions, ConvertPlan, ConvertReport, Recipe, RunOptions};
use std::path::Path;

fn run(source: &Checkpoint, recipe: Recipe, out: &Path, options: &RunOptions) -> Result<ConvertReport> {
    let plan = ConvertPlan::new(source, &ConvertOptions::mlx(recipe)).unwrap();
    convert::convert(&plan, out, options, &|_| ())
}

fn uniform(format: &str) -> Recipe {
    Recipe::named("uniform", format.parse().unwrap()).unwrap()
}

#[test]
fn quality_is_that_of_what_is_written() {
    let source = bundled("tiny-bf16");
    for format in ["2:g128", "3:g32", "4", "8", "mxfp4", "mxfp8", "nvfp4", "f16"] {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("out");
        let report = run(&source, uniform(format), &out, &RunOptions::default()).unwrap();
        let written = Checkpoint::open(&out).unwrap();
        let converted = if format == "f16" { 35 } else { 22 };
        assert_eq!(report.tensors.len(), converted, "{format}");
        assert!(report.tensors.is_sorted_by(|a, b| a.relative_rms >= b.relative_rms));
        for tensor in &report.tensors {
            let dequantize = |checkpoint: &Checkpoint| -> Vec<f64> {
                let weight = checkpoint.tensor(&tensor.name, None).unwrap();
                let numbers =
                    weight.to_dense(DType::F32, &Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
                numbers.flatten_all().unwrap().to_vec1().unwrap()
            };
            let (a, b) = (dequantize(&source), dequantize(&written));
            let sum = |of: &dyn Fn(f64, f64) -> f64| a.iter().zip(&b).map(|(a, b)| of(*a, *b)).sum::<f64>();
            let (error, signal) = (sum(&|a, b| (a - b).powi(2)), sum(&|a, _| a * a));
            let cosine = sum(&|a, b| a * b) / (signal * sum(&|_, b| b * b)).sqrt();
            let largest = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0., f64::max);
            let close = |found: f64, expected: f64| (found - expected).abs() <= 1e-12 * expected.abs();
            let name = format!("{format} {}", tensor.name);
            assert!(close(tensor.relative_rms, (error / signal).sqrt()), "{name}");
            assert!(close(tensor.cosine.unwrap(), cosine), "{name}");
            assert_eq!(tensor.max_abs, largest, "{name}");
            match tensor.sqnr_db {
                Some(found) => assert!((found - 10. * (signal / error).log10()).abs() < 1e-9, "{name}"),
                None => assert_eq!(error, 0., "{name}"),
            }
            assert_eq!((tensor.elements, tensor.nan, tensor.infinite), (a.len() as u64, 0, 0));
        }
        let worst = report.tensors[0].relative_rms;
        let bounds = match format {
            "2:g128" => (0.3, 0.8),
            "3:g32" => (0.1, 0.25),
            "4" | "nvfp4" => (0.05, 0.12),
            "mxfp4" => (0.1, 0.16),
            "8" => (0.001, 0.01),
            "mxfp8" => (0.02, 0.04),
            _ => (0., 1e-5),
        };
        assert!(bounds.0 <= worst && worst <= bounds.1, "{format}: {worst}");
    }
}

#[test]
fn scales_and_saturation_are_counted() {
    // A group of zeros, one whose positive end is larger, one whose negative end is, one that is constant.
    let mut numbers = vec![0f32; 128];
    numbers[32..64].copy_from_slice(&[1.; 32]);
    numbers[32] = -0.5;
    numbers[64..96].copy_from_slice(&[0.5; 32]);
    numbers[64] = -1.;
    numbers[96..].copy_from_slice(&[0.25; 32]);
    let source = Source::new().with("w.weight", &[1, 128], &numbers).finish();
    let folder = tempfile::tempdir().unwrap();
    let report = |format: &str| {
        let out = folder.path().join(format);
        run(&source.open(), uniform(format), &out, &RunOptions::default()).unwrap().tensors.remove(0)
    };
    let affine = report("4:g32");
    assert_eq!((affine.negative_scales, affine.zero_scales, affine.saturated), (3, 0, 0));
    let nvfp4 = report("nvfp4");
    // Two groups of 16 zeros.
    assert_eq!((nvfp4.negative_scales, nvfp4.zero_scales, nvfp4.saturated), (0, 2, 0));
    // 0.195 / 6 rounds down to an E4M3 of 0.03125, so that 0.195 is beyond 6 x 0.03125 = 0.1875.
    let source = Source::new().with("w.weight", &[1, 32], &[0.195; 32]).finish();
    let out = folder.path().join("saturated");
    let report = run(&source.open(), uniform("nvfp4"), &out, &RunOptions::default()).unwrap();
    assert_eq!(report.tensors[0].saturated, 32);
    assert!((report.tensors[0].max_abs - 0.0075).abs() < 1e-7);
}

#[test]
fn numbers_that_are_not_finite_are_named_and_counted() {
    let mut packed = super::common::numbers(1, 64 * 64);
    (packed[0], packed[700], packed[4095]) = (f32::NAN, f32::INFINITY, f32::NEG_INFINITY);
    let mut vector = vec![1f32; 64];
    vector[3] = f32::NAN;
    let source = Source::new()
        .with("a.weight", &[64, 64], &packed)
        .with("norm.weight", &[64], &vector)
        .random("z.weight", &[64, 64])
        .finish();
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let error = run(&source.open(), uniform("4"), &out, &RunOptions::default()).unwrap_err().to_string();
    for part in ["`a.weight`", "1 NaN, 2 infinite of 4096 numbers", "1 more tensors", "--allow-nonfinite"] {
        assert!(error.contains(part), "{part} in {error}");
    }
    assert!(!out.exists());
    let options = RunOptions { allow_nonfinite: true, resume: true, ..RunOptions::default() };
    let report = run(&source.open(), uniform("4"), &out, &options).unwrap();
    let counts: Vec<_> = report.tensors.iter().map(|t| (t.name.as_str(), t.nan, t.infinite)).collect();
    assert!(counts.contains(&("a.weight", 1, 2)) && counts.contains(&("norm.weight", 1, 0)), "{counts:?}");
    // Packed they are zero, with a small error of a number; plain they stay what they are.
    let weight = Checkpoint::open(&out).unwrap().tensor("a.weight", None).unwrap();
    let dequantized =
        weight.to_dense(DType::F32, &Device::Cpu).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert!(dequantized.iter().all(|number| number.is_finite()));
    assert!([0, 700, 4095].iter().all(|index| dequantized[*index].abs() < 1e-3));
    assert_eq!(tensors(&out)["norm.weight"].2, tensors(source.folder.path())["norm.weight"].2);
}

#[test]
fn numbers_beyond_a_dtype_are_refused() {
    let source = Source::new().with("w.weight", &[1, 64], &[1e6; 64]).finish();
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let error = run(&source.open(), uniform("f16"), &out, &RunOptions::default()).unwrap_err().to_string();
    assert!(error.contains("`w.weight`") && error.contains("64 too large for the dtype"), "{error}");
    // The width of the group overflows.
    let mut huge = vec![0.; 64];
    (huge[0], huge[1]) = (3e38, -3e38);
    let wide = Source::new().with("w.weight", &[1, 64], &huge).finish();
    let out = folder.path().join("4");
    let error = run(&wide.open(), uniform("4"), &out, &RunOptions::default()).unwrap_err().to_string();
    assert!(error.contains("64 too large for the dtype of 64 numbers"), "{error}");
    let out = folder.path().join("nvfp4");
    let error = run(&source.open(), uniform("nvfp4"), &out, &RunOptions::default()).unwrap_err().to_string();
    assert!(error.contains("magnitudes up to 2688") && error.contains("another format"), "{error}");
}

#[test]
fn too_much_loss_makes_no_output() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let source = bundled("tiny-bf16");
    let mut options = RunOptions { max_relative_rms: Some(0.05), ..RunOptions::default() };
    let error = run(&source, uniform("4"), &out, &options).unwrap_err();
    let Error::Quality { relative_rms, limit, worse, .. } = &error else { panic!("{error}") };
    assert!(*relative_rms > 0.05 && *limit == 0.05 && *worse == 22, "{error}");
    assert!(!out.exists());
    // What is finished is finished: with another limit it only has to be accepted.
    options = RunOptions { max_relative_rms: Some(0.2), resume: true, ..RunOptions::default() };
    run(&source, uniform("4"), &out, &options).unwrap();
    assert!(out.exists());
}

#[test]
fn wide_numbers_that_are_not_finite_are_counted_too() {
    let numbers: Vec<u8> =
        [1., f64::NAN, f64::INFINITY, f64::MIN].iter().flat_map(|n: &f64| n.to_le_bytes()).collect();
    let source = Source::new().with_bytes("a", "F64", &[4], &numbers).finish();
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let error = run(&source.open(), uniform("4"), &out, &RunOptions::default()).unwrap_err().to_string();
    assert!(error.contains("`a`") && error.contains("1 NaN, 1 infinite of 4 numbers"), "{error}");
}
