//! Clip search: never worse than the encoder in any group, better over all, and read like any other row.

use candle_quant::format::{QuantizedRows, Quantizer, Real};
use candle_quant::QuantFormat;
use half::{bf16, f16};
use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::f64::consts::TAU;

/// A row as it was quantized, dequantized; and the same after the search.
fn rows<T: Real>(weights: &[T], format: QuantFormat, quantizer: Quantizer) -> (Vec<f32>, Vec<f32>) {
    let k = weights.len();
    let mut rows = QuantizedRows::quantize(format, quantizer, weights, k, None).unwrap();
    let plain = rows.dequantize(format, k, 1.).unwrap();
    rows.improve(format, weights, k).unwrap();
    (plain, rows.dequantize(format, k, 1.).unwrap())
}

fn squared_errors<T: Real>(weights: &[T], dequantized: &[f32], group_size: usize) -> Vec<f64> {
    let of_group = |(weights, dequantized): (&[T], &[f32])| {
        let pairs = weights.iter().zip(dequantized);
        pairs.map(|(w, d)| (f64::from(w.to_f32()) - f64::from(*d)).powi(2)).sum()
    };
    weights.chunks(group_size).zip(dequantized.chunks(group_size)).map(of_group).collect()
}

/// Before and after, by group.
fn errors<T: Real>(weights: &[T], format: QuantFormat, quantizer: Quantizer) -> Vec<(f64, f64)> {
    let (plain, searched) = rows(weights, format, quantizer);
    let of = |dequantized: &[f32]| squared_errors(weights, dequantized, format.group_size());
    of(&plain).into_iter().zip(of(&searched)).collect()
}

#[track_caller]
fn assert_never_worse<T: Real>(numbers: &[f32], what: &str) {
    // What is packed is finite.
    let number = |number: &f32| Some(T::from_f32(*number)).filter(|rounded| rounded.to_f32().is_finite());
    let weights: Vec<T> = numbers.iter().map(|n| number(n).unwrap_or(T::from_f32(0.))).collect();
    for format in QuantFormat::all() {
        for quantizer in [Quantizer::Mlx, Quantizer::Afq] {
            for (group, (plain, searched)) in errors(&weights, format, quantizer).into_iter().enumerate() {
                let better = searched <= plain || (searched.is_nan() && plain.is_nan());
                assert!(better, "{format}, {:?}, {what}, group {group}: {plain:e}, {searched:e}", T::DTYPE);
            }
        }
    }
}

/// Groups of the kinds that encoders stumble over, side by side.
fn awkward() -> Vec<(&'static str, Vec<f32>)> {
    let of = |number: &dyn Fn(usize) -> f32| (0..256).map(number).collect::<Vec<_>>();
    vec![
        ("zeros", of(&|_| 0.)),
        ("negative zeros", of(&|_| -0.)),
        ("one number", of(&|_| 0.3)),
        ("one sign", of(&|i| -1. - i as f32 / 999.)),
        ("far from zero", of(&|i| 1000. + i as f32 / 256.)),
        ("one outlier", of(&|i| if i % 64 == 5 { 1e4 } else { (i as f32).sin() })),
        ("two values", of(&|i| if i % 3 == 0 { -0.7 } else { 0.2 })),
        ("subnormal", of(&|i| (i as f32 - 99.) * 1e-42)),
        ("tiny", of(&|i| (i as f32 - 99.) * 1e-36)),
        ("huge", of(&|i| (i as f32 - 128.) * 2.6e36)),
        ("both ends of f32", of(&|i| [f32::MAX, f32::MIN][i % 2])),
        ("all sizes", of(&|i| f32::from_bits(((i as u32) << 23).min(0x7F00_0000)))),
        ("whole numbers", of(&|i| (i % 16) as f32 - 8.)),
    ]
}

#[test]
fn awkward_groups_do_not_become_worse() {
    for (what, numbers) in awkward() {
        assert_never_worse::<f32>(&numbers, what);
        assert_never_worse::<f16>(&numbers, what);
        assert_never_worse::<bf16>(&numbers, what);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn no_group_becomes_worse(
        numbers in proptest::collection::vec(-1f32..1., 256),
        exponent in -40i32..40,
        power in 1u32..6,
        offset in -2f32..2.,
    ) {
        // Odd powers keep the sign; high ones leave few large numbers.
        let number = |number: &f32| (number.abs().powi(power as i32).copysign(*number) + offset) * 2f32.powi(exponent);
        let numbers: Vec<_> = numbers.iter().map(number).collect();
        assert_never_worse::<f32>(&numbers, "random");
        assert_never_worse::<f16>(&numbers, "random");
        assert_never_worse::<bf16>(&numbers, "random");
    }

    #[test]
    fn no_group_of_any_bits_becomes_worse(bits in proptest::collection::vec(any::<u32>(), 128)) {
        let numbers: Vec<_> = bits.into_iter().map(f32::from_bits).collect();
        assert_never_worse::<f32>(&numbers, "any bits");
        assert_never_worse::<bf16>(&numbers, "any bits");
    }
}

/// Normal numbers, as weights are.
fn normal(count: usize) -> Vec<bf16> {
    let mut rng = StdRng::seed_from_u64(7);
    let mut normal = || {
        let (radius, angle): (f64, f64) =
            (rng.random_range(f64::MIN_POSITIVE..1.), rng.random_range(0. ..TAU));
        (-2. * radius.ln()).sqrt() * angle.cos()
    };
    (0..count).map(|_| bf16::from_f64(normal() * 0.02)).collect()
}

#[test]
fn the_sum_of_errors_of_normal_numbers_becomes_smaller() {
    let weights = normal(1 << 14);
    for (format, saved) in [
        ("1-bit", 0.48),
        ("2-bit", 0.30),
        ("3-bit", 0.20),
        ("4-bit", 0.14),
        ("5-bit", 0.11),
        ("6-bit", 0.11),
        ("8-bit", 0.33),
        ("mxfp4", 0.08),
        ("nvfp4", 0.20),
        ("mxfp8", 0.),
    ] {
        for all in QuantFormat::all().into_iter().filter(|all| all.to_string().contains(format)) {
            let (plain, searched) = errors(&weights, all, Quantizer::Mlx)
                .into_iter()
                .fold((0., 0.), |sums, (plain, searched)| (sums.0 + plain, sums.1 + searched));
            let found = 1. - searched / plain;
            println!("{all}: {:.1} %", found * 100.);
            assert!(found >= saved, "{all}: {found}");
        }
    }
}

/// Of scales that are bytes there are few enough to try them all.
#[test]
fn no_scale_far_away_would_be_better() {
    let weights = normal(1 << 11);
    let numbers: Vec<f32> = weights.iter().map(|weight| weight.to_f32()).collect();
    for format in [QuantFormat::MXFP4, QuantFormat::MXFP8, QuantFormat::NVFP4] {
        let elements: Vec<f64> = (0..=255u8)
            .map(|code| f64::from(format.element().value(code)))
            .filter(|element| element.is_finite())
            .collect();
        let (_, searched) = rows(&weights, format, Quantizer::Mlx);
        let found: f64 = squared_errors(&weights, &searched, format.group_size()).iter().sum();
        // The nearest of all elements, for the best of all scales.
        let best = |group: &[f32]| {
            let error = |byte: u8| {
                let scale = f64::from(format.scale().value(byte));
                let nearest = |w: &f32| {
                    let distances = elements.iter().map(|element| (element * scale - f64::from(*w)).powi(2));
                    distances.fold(f64::INFINITY, f64::min)
                };
                group.iter().map(nearest).sum::<f64>()
            };
            (0..0x7F).map(error).fold(f64::INFINITY, f64::min)
        };
        let possible: f64 = numbers.chunks(format.group_size()).map(best).sum();
        println!("{format}: {found:e}, {possible:e}");
        assert!(found <= possible * 1.001, "{format}: {found:e}, {possible:e}");
    }
}

/// How much columns count: some of them nothing, whole groups among these.
fn counts(seed: u64, k: usize) -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(seed);
    let of_column = |column: usize| match (column / 32 % 5, rng.random_range(0..4)) {
        (3, _) | (_, 0) => 0.,
        _ => 10f32.powf(rng.random_range(-6. ..6.)),
    };
    (0..k).map(of_column).collect()
}

/// The squared error of each group, in which each column counts as often as `counts` says; alike if all say nothing.
fn weighted_errors<T: Real>(weights: &[T], rows: &[f32], counts: &[f32], group_size: usize) -> Vec<f64> {
    let groups = weights.chunks(group_size).zip(rows.chunks(group_size)).zip(counts.chunks(group_size));
    groups
        .map(|((weights, rows), counts)| {
            let silent = counts.iter().all(|count| *count == 0.);
            let numbers = weights.iter().zip(rows).zip(counts);
            let square = |((w, r), count): ((&T, &f32), &f32)| {
                let count = if silent { 1. } else { f64::from(*count) };
                (f64::from(w.to_f32()) - f64::from(*r)).powi(2) * count
            };
            numbers.map(square).sum()
        })
        .collect()
}

/// No group gets a larger weighted error than plain quantization leaves, and all together a smaller one than the search
/// without weights finds.
fn assert_weighted<T: Real>(numbers: &[f32], seed: u64) {
    let weights: Vec<T> = numbers.iter().map(|number| T::from_f32(*number)).collect();
    let (k, counts) = (weights.len(), counts(seed, weights.len()));
    for format in QuantFormat::all() {
        for quantizer in [Quantizer::Mlx, Quantizer::Afq] {
            let mut rows = QuantizedRows::quantize(format, quantizer, &weights, k, None).unwrap();
            let errors = |rows: &QuantizedRows<T>| {
                let dequantized = rows.dequantize(format, k, 1.).unwrap();
                weighted_errors(&weights, &dequantized, &counts, format.group_size())
            };
            let plain = errors(&rows);
            rows.improve_weighted(format, &weights, k, &counts).unwrap();
            for (group, (plain, searched)) in plain.iter().zip(errors(&rows)).enumerate() {
                let better = searched <= *plain || (searched.is_nan() && plain.is_nan());
                assert!(better, "{format}, {:?}, group {group}: {plain:e}, {searched:e}", T::DTYPE);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn no_group_becomes_worse_where_columns_count_differently(
        numbers in proptest::collection::vec(-1f32..1., 256),
        exponent in -20i32..20,
        offset in -2f32..2.,
        seed in any::<u64>(),
    ) {
        let numbers: Vec<_> = numbers.iter().map(|number| (number + offset) * 2f32.powi(exponent)).collect();
        assert_weighted::<f32>(&numbers, seed);
        assert_weighted::<bf16>(&numbers, seed);
    }
}

#[test]
fn columns_that_count_more_lose_less_than_by_the_search_without_them() {
    let weights = normal(1 << 14);
    let counts = counts(5, weights.len());
    for (format, least) in
        [("2-bit g64", 0.1), ("3-bit g64", 0.1), ("4-bit g64", 0.1), ("mxfp4", 0.05), ("nf4", 0.1)]
    {
        let format = QuantFormat::all().into_iter().find(|all| all.to_string().ends_with(format)).unwrap();
        let k = weights.len();
        let searched = |counts: Option<&[f32]>| {
            let mut rows = QuantizedRows::quantize(format, Quantizer::Mlx, &weights, k, None).unwrap();
            match counts {
                Some(counts) => rows.improve_weighted(format, &weights, k, counts).unwrap(),
                None => rows.improve(format, &weights, k).unwrap(),
            }
            rows
        };
        let sum = |rows: &QuantizedRows<bf16>| -> f64 {
            let dequantized = rows.dequantize(format, k, 1.).unwrap();
            let pairs = weights.iter().zip(dequantized).zip(&counts);
            pairs.map(|((w, d), c)| (f64::from(w.to_f32() - d)).powi(2) * f64::from(*c)).sum()
        };
        let saved = 1. - sum(&searched(Some(&counts))) / sum(&searched(None));
        println!("{format}: {:.1} %", saved * 100.);
        assert!(saved >= least, "{format}: {saved}");
        // Counting all columns alike is the search without weights, to the bit.
        assert_eq!(searched(Some(&vec![1.; k])), searched(None), "{format}");
    }
    let mut rows = QuantizedRows::quantize(QuantFormat::MXFP4, Quantizer::Mlx, &weights, 64, None).unwrap();
    for counts in [&[1.; 63][..], &[-1.; 64], &[f32::NAN; 64]] {
        let error = rows.improve_weighted(QuantFormat::MXFP4, &weights, 64, counts).unwrap_err().to_string();
        assert!(error.contains("64 numbers, finite and not below zero"), "{error}");
    }
}
