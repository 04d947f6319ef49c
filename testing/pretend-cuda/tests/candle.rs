//! Candle's own kernels in the emulator: how they get their parameters, and what the emulator adds to the functions of
//! CUDA for them. That candle computes rightly is for whole models to show.

mod common;

use common::gpu::{message, Gpu};
use half::{bf16, f16};
use pretend_cuda::status::*;

/// A row for each block of a warp, with holes between the rows of the source.
fn rows() -> (Vec<f32>, Vec<f32>) {
    let all: Vec<f32> = (0..3 * 50).map(|i| ((i * 37 % 101) as f32 - 50.) / 9.).collect();
    let rows = all.chunks(50).flat_map(|row| row[..40].to_vec()).collect();
    (all, rows)
}

#[track_caller]
fn assert_close(actual: &[f32], expected: &[f64], bound: f64) {
    assert_eq!(actual.len(), expected.len());
    for (i, (a, e)) in actual.iter().zip(expected).enumerate() {
        assert!((f64::from(*a) - e).abs() <= bound * (1. + e.abs()), "{i}: {a} for {e}");
    }
}

/// Sizes, a null pointer or dimensions and strides, and pointers.
#[test]
fn parameters_of_several_types() {
    let gpu = Gpu::new(0);
    let (all, rows) = rows();
    let out = gpu.room(4 * rows.len());
    let (x, y) = (gpu.upload(&rows), gpu.upload(&vec![2.5f32; rows.len()]));
    let sums: Vec<f64> = rows.iter().map(|x| f64::from(*x) + 2.5).collect();
    assert_eq!(gpu.launch_words("badd_f32", 1, [64, 1, 1], 0, &[120, 1, 0, x, y, out]), SUCCESS);
    assert_close(&gpu.download(out, 120), &sums, 6e-8);
    // Dimensions, strides of one side, strides of the other.
    let info = gpu.upload(&[3u64, 40, 50, 1, 40, 1]);
    let source = gpu.upload(&all);
    assert_eq!(gpu.launch_words("badd_f32", 1, [128, 1, 1], 0, &[120, 2, info, source, y, out]), SUCCESS);
    assert_close(&gpu.download(out, 120), &sums, 6e-8);
}

/// Signed and narrow numbers by value, after pointers.
#[test]
fn numbers_among_the_parameters() {
    let gpu = Gpu::new(0);
    let out = gpu.room(8);
    let value = u64::from(bf16::from_f32(-1.5).to_bits());
    assert_eq!(gpu.launch_words("fill_bf16", 1, [32, 1, 1], 0, &[out, value, 4]), SUCCESS);
    let pair = f32::from_bits((value << 16 | value) as u32);
    assert_eq!(gpu.download(out, 2), [pair; 2]);
    let (_, rows) = rows();
    let (x, out) = (gpu.upload(&rows), gpu.room(4 * rows.len()));
    let eps = u64::from(1e-5f32.to_bits());
    assert_eq!(gpu.launch_words("rmsnorm_f32", 3, [32, 1, 1], 0, &[x, out, 0, 40, 32, eps]), SUCCESS);
    let expected: Vec<f64> = rows
        .chunks(40)
        .flat_map(|row| {
            let mean = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / 40.;
            row.iter().map(move |x| f64::from(*x) / (mean + 1e-5).sqrt()).collect::<Vec<_>>()
        })
        .collect();
    assert_close(&gpu.download(out, 120), &expected, 1e-6);
}

#[test]
fn lanes_together_and_dynamic_shared_memory() {
    let gpu = Gpu::new(0);
    let (_, rows) = rows();
    let (x, out) = (gpu.upload(&rows), gpu.room(4 * rows.len()));
    assert_eq!(gpu.launch_words("softmax_f32", 3, [1, 32, 1], 0, &[x, out, 40]), SUCCESS);
    let expected: Vec<f64> = rows
        .chunks(40)
        .flat_map(|row| {
            let sum: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
            row.iter().map(move |x| f64::from(*x).exp() / sum).collect::<Vec<_>>()
        })
        .collect();
    assert_close(&gpu.download(out, 120), &expected, 1e-6);
    assert_eq!(gpu.launch_words("asort_asc_f32", 3, [64, 1, 1], 4 * 64, &[x, out, 40, 64]), SUCCESS);
    for (row, order) in rows.chunks(40).zip(gpu.download(out, 120).chunks(40)) {
        let sorted: Vec<f32> = order.iter().map(|i| row[i.to_bits() as usize]).collect();
        assert!(sorted.is_sorted(), "{sorted:?}");
    }
    // Too little of it is noticed; by AddressSanitizer only in kernels that are compiled with it, which these are not.
    if cfg!(not(address_sanitizer)) {
        let error = gpu.launch_words("asort_asc_f32", 1, [64, 1, 1], 4 * 63, &[x, out, 40, 64]);
        assert!(message(error).contains("shared memory overrun"), "{}", message(error));
    }
}

/// The cumulative normal distribution, from tables.
#[test]
fn functions_that_cuda_has_and_cpp_has_not() {
    let gpu = Gpu::new(0);
    let (x, out) = (gpu.upload(&[-5f32, -1., 0., 0.5, 1.]), gpu.room(20));
    assert_eq!(gpu.launch_words("unormcdf_f32", 1, [32, 1, 1], 0, &[5, 1, 0, x, out]), SUCCESS);
    let found = gpu.download(out, 5);
    assert_close(&found, &[2.866_515_72e-7, 0.158_655_254, 0.5, 0.691_462_461, 0.841_344_746], 1e-7);
    assert!((f64::from(found[0]) / 2.866_515_72e-7 - 1.).abs() < 1e-6);
}

/// In 16 bits: rounded once, and NaN is not lost.
#[test]
fn functions_of_16_bit_numbers() {
    fn check(gpu: &Gpu, name: &str, inputs: &[&[f32]], round: fn(f32) -> (u16, f32), f: fn(&[f64]) -> f64) {
        let bits = |x: &[f32]| x.iter().map(|x| round(*x).0).collect::<Vec<_>>();
        let mut params = vec![4, 1, 0];
        params.extend(inputs.iter().map(|x| gpu.upload(&bits(x))));
        params.push(gpu.room(8));
        assert_eq!(gpu.launch_words(name, 1, [32, 1, 1], 0, &params), SUCCESS);
        let words = gpu.download(params[params.len() - 1], 2);
        let found: Vec<u16> =
            words.iter().flat_map(|w| [w.to_bits() as u16, (w.to_bits() >> 16) as u16]).collect();
        for (i, found) in found.into_iter().enumerate() {
            let exact = f(&inputs.iter().map(|x| f64::from(round(x[i]).1)).collect::<Vec<_>>());
            let expected = round(exact as f32);
            let is_nan = found & 0x7fff > round(f32::INFINITY).0;
            assert!(found == expected.0 || exact.is_nan() && is_nan, "{name} {i}: {found:x} for {exact}");
        }
    }
    let bf = |x: f32| (bf16::from_f32(x).to_bits(), bf16::from_f32(x).to_f32());
    let fp = |x: f32| (f16::from_f32(x).to_bits(), f16::from_f32(x).to_f32());
    let gpu = Gpu::new(0);
    let (x, y) = (&[0.3f32, -1.7, f32::NAN, 2.][..], &[0.7f32, -1.9, 1., f32::NAN][..]);
    let larger = |v: &[f64]| if v[0].is_nan() || v[1].is_nan() { f64::NAN } else { v[0].max(v[1]) };
    let smaller = |v: &[f64]| if v[0].is_nan() || v[1].is_nan() { f64::NAN } else { v[0].min(v[1]) };
    check(&gpu, "bmaximum_bf16", &[x, y], bf, larger);
    check(&gpu, "bmaximum_f16", &[x, y], fp, larger);
    check(&gpu, "bminimum_bf16", &[x, y], bf, smaller);
    check(&gpu, "bminimum_f16", &[x, y], fp, smaller);
    type Function = fn(&[f64]) -> f64;
    let functions: [(&str, Function); 6] = [
        ("uexp", |v| v[0].exp()),
        ("ulog", |v| v[0].ln()),
        ("usin", |v| v[0].sin()),
        ("ucos", |v| v[0].cos()),
        ("usqrt", |v| v[0].sqrt()),
        ("uabs", |v| v[0].abs()),
    ];
    for (name, function) in functions {
        check(&gpu, &format!("{name}_bf16"), &[x], bf, function);
        check(&gpu, &format!("{name}_f16"), &[x], fp, function);
    }
}

#[test]
fn what_is_not_emulated_is_named() {
    let gpu = Gpu::new(0);
    let unknown = gpu.function("mul_mat_q4_K").unwrap_err();
    assert!(unknown == NOT_FOUND && message(unknown).contains("mul_mat_q4_K"), "{}", message(unknown));
    let (x, out) = (gpu.upload(&[1u32; 8]), gpu.room(32));
    let error = gpu.launch_words("cast_f32_f8_e4m3", 1, [32, 1, 1], 0, &[8, 1, 0, x, out]);
    assert!(message(error).contains("FP8 is not emulated"), "{}", message(error));
}

#[test]
fn blocks_of_any_size_up_to_the_largest() {
    let gpu = Gpu::new(0);
    let x = gpu.upload(&[1f32; 8]);
    for (threads, result) in [(1, SUCCESS), (1024, SUCCESS), (0, INVALID_VALUE), (1025, INVALID_VALUE)] {
        assert_eq!(
            gpu.launch_words("usqr_f32", 1, [threads, 1, 1], 0, &[8, 1, 0, x, x]),
            result,
            "{threads}"
        );
    }
}
