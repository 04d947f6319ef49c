//! Activations and scales of any size, and far apart: what fixed point could lose.

use super::*;
use crate::format::{Element, ZeroPoint};

#[test]
fn activations_of_any_size_survive_fixed_point() {
    for isa in isa::tested() {
        let mut rng = StdRng::seed_from_u64(7);
        // Scales and biases in F32, and in F16.
        for (n, format) in [6, 7].into_iter().flat_map(|n| formats_for(1024).map(move |format| (n, format))) {
            let weight = Weight::random(format, n, 1024, &mut rng);
            let dequantized = weight.dequantized();
            // Magnitudes from 2^-60 to 2^60 beside each other, and rows that are tiny or zero throughout.
            for (low, high) in [(-60.0, 60.0), (-100.0, -90.0), (90.0, 100.0)] {
                let x: Vec<f32> = (0..1024)
                    .map(|_| rng.random_range(-1.0f32..1.0) * 2f32.powf(rng.random_range(low..high)))
                    .collect();
                for m in [1, 3] {
                    let x = x.repeat(m);
                    let want = matmul_in_f64(&dequantized, 1024, &x, None);
                    let got: Vec<f32> = matmul_with(isa, &weight.view(), &x, None);
                    let error = relative_error(got.iter().map(|y| f64::from(*y)), &want);
                    assert!(error <= 1e-6, "{} {format} 2^{low} m={m}: {error:e}", isa.name());
                }
            }
            for m in [1, 3] {
                let zero: Vec<f32> = matmul_with(isa, &weight.view(), &vec![0f32; m * 1024], None);
                assert_eq!(zero, vec![0.0; m * n], "{} {format}", isa.name());
                let mut infinite = vec![1f32; m * 1024];
                infinite[1000] = f32::INFINITY;
                let got: Vec<f32> = matmul_with(isa, &weight.view(), &infinite, None);
                let finite = got.iter().map(|y| y.is_finite()).collect::<Vec<_>>();
                let want = [vec![false; n], vec![true; (m - 1) * n]].concat();
                assert_eq!(finite, want, "{} {format}", isa.name());
            }
        }
    }
}

/// Codes and activations that are all as large as they can be, of one sign or of two: sums of integers are largest.
#[test]
fn the_largest_sums_are_as_good() {
    let (n, k) = (3, 1152);
    let mut rng = StdRng::seed_from_u64(15);
    for format in formats_for(k) {
        let mut weight = Weight::random(format, n, k, &mut rng);
        let row = weight.words.len() / n;
        // Kernels add up codes and take the middle one out of the sum, also where weights are all zero: codes of one bit.
        weight.words.fill(0);
        let middles = match format.zero_point() {
            ZeroPoint::Midpoint => weight.dequantized(),
            ZeroPoint::Bias | ZeroPoint::None => vec![0.; n * k],
        };
        // The least codes, the greatest, and one of them after the other. Those of E4M3 would be NaN.
        let ones = if format.element() == Element::E4m3 { 0x7E7E_7E7E } else { u32::MAX };
        for (word, to) in weight.words.iter_mut().enumerate() {
            *to = [0, ones, if word % 2 == 0 { ones } else { 0 }][word / row];
        }
        let dequantized = weight.dequantized();
        for signs in [[1., 1.], [-1., -1.], [1., -1.]] {
            // The largest number of three signed limbs, and what its negative could be mistaken for.
            for largest in [0x7F_7F7F as f32, 0x80_8080 as f32, f32::MAX / 2f32.powi(20)] {
                let x: Vec<f32> = (0..k).map(|index| signs[index % 2] * largest).collect();
                let want = matmul_in_f64(&dequantized, k, &x, None);
                let of_middles = matmul_in_f64(&middles, k, &x, None);
                for isa in isa::tested() {
                    let got: Vec<f32> = matmul_with(isa, &weight.view(), &x, None);
                    for (row, (got, (want, magnitude))) in got.iter().zip(&want).enumerate() {
                        let error = (f64::from(*got) - want).abs();
                        let name = (isa.name(), format, signs, largest, row);
                        // Sums of equal terms in f32 are rounded to the same side again and again.
                        assert!(
                            error <= 1e-5 * (magnitude + of_middles[row].1),
                            "{name:?}: {got:e} {want:e} off by {error:e}"
                        );
                    }
                }
            }
        }
    }
}

/// Powers of two are scales from the smallest to where a weight times x leaves f32.
#[test]
fn scales_of_any_size_are_as_good() {
    let (n, k) = (245, 64);
    let mut rng = StdRng::seed_from_u64(9);
    for format in [QuantFormat::MXFP4, QuantFormat::MXFP8] {
        let mut weight = Weight::random(format, n, k, &mut rng);
        weight.global_scale = 1.;
        let groups = k / format.group_size();
        weight.scales = Groups::Byte((0..n as u8).flat_map(|byte| vec![byte; groups]).collect());
        let dequantized = weight.dequantized();
        for (m, size) in [1, 3].into_iter().flat_map(|m| [-8, 0, 60].map(|log| (m, 2f32.powi(log)))) {
            let x: Vec<f32> = (0..m * k).map(|_| rng.random_range(-1.0..1.0) * size).collect();
            let want = matmul_in_f64(&dequantized, k, &x, None);
            for isa in isa::tested() {
                let got: Vec<f32> = matmul_with(isa, &weight.view(), &x, None);
                for (index, (got, (want, magnitude))) in got.iter().zip(&want).enumerate() {
                    let name = (isa.name(), format, m, size, index % n);
                    if *magnitude < f64::from(f32::MAX) {
                        // Below 2^-126, f32 has steps of 2^-149.
                        let bound = 1e-6 * magnitude + 1e-43;
                        let error = (f64::from(*got) - want).abs();
                        assert!(error <= bound, "{name:?}: {got:e} {want:e} off by {error:e} > {bound:e}");
                    }
                }
            }
        }
    }
}

/// A group counts, however much larger the scales of its neighbours are, and whatever they are of zeros.
#[test]
fn scales_far_apart_in_a_row_are_as_good() {
    let (n, k) = (20, 288);
    let mut rng = StdRng::seed_from_u64(10);
    for format in [QuantFormat::MXFP4, QuantFormat::NVFP4, QuantFormat::MXFP8] {
        let mut weight = Weight::random(format, n, k, &mut rng);
        let (groups, group_words) = (k / format.group_size(), format.group_size() * format.bits() / 32);
        for words in weight.words.chunks_exact_mut(group_words) {
            if rng.random_bool(0.2) {
                words.fill(0);
            }
        }
        let byte = |rng: &mut StdRng| match format {
            QuantFormat::NVFP4 => rng.random_range(1..0x7F),
            _ => 100 + rng.random_range(0..4) * rng.random_range(0..12),
        };
        weight.scales = Groups::Byte((0..n * groups).map(|_| byte(&mut rng)).collect());
        let dequantized = weight.dequantized();
        // Every vector looks at one group.
        let mut x = vec![0f32; groups * k];
        for (group, x) in x.chunks_exact_mut(k).enumerate() {
            let places = group * format.group_size()..(group + 1) * format.group_size();
            x[places].iter_mut().for_each(|x| *x = rng.random_range(-1.0..1.0));
        }
        let want = matmul_in_f64(&dequantized, k, &x, None);
        for isa in isa::tested() {
            let alone = x.chunks_exact(k).flat_map(|x| matmul_with::<f32>(isa, &weight.view(), x, None));
            for got in [alone.collect(), matmul_with::<f32>(isa, &weight.view(), &x, None)] {
                for (index, (got, (want, magnitude))) in got.iter().zip(&want).enumerate() {
                    let error = (f64::from(*got) - want).abs();
                    let name = (isa.name(), format, index / n, index % n);
                    assert!(error <= 1e-6 * magnitude, "{name:?}: {got:e} {want:e} off by {error:e}");
                }
            }
        }
    }
}

/// A group counts, however much smaller its activations are than those of its neighbours, if its scale makes up for it.
#[test]
fn activations_far_apart_are_as_good() {
    let (n, k, m) = (20, 288, 3);
    let mut rng = StdRng::seed_from_u64(11);
    for format in [QuantFormat::MXFP4, QuantFormat::MXFP8] {
        for lowest in [0, 60] {
            let mut weight = Weight::random(format, n, k, &mut rng);
            let logs: Vec<i32> = (0..k / 32).map(|_| rng.random_range(-40..40)).collect();
            // What scales are larger, activations are smaller.
            let byte = |log: &i32| (40 + lowest - log) as u8;
            weight.scales = Groups::Byte(logs.iter().map(byte).collect::<Vec<_>>().repeat(n));
            let size = |index: usize| 2f32.powi(logs[index % k / 32]);
            let x: Vec<f32> = (0..m * k).map(|index| size(index) * rng.random_range(-1.0..1.0)).collect();
            let want = matmul_in_f64(&weight.dequantized(), k, &x, None);
            for isa in isa::tested() {
                let alone = x.chunks_exact(k).flat_map(|x| matmul_with::<f32>(isa, &weight.view(), x, None));
                for got in [alone.collect(), matmul_with::<f32>(isa, &weight.view(), &x, None)] {
                    assert_eq!(got.len(), want.len());
                    for (index, (got, (want, magnitude))) in got.iter().zip(&want).enumerate() {
                        let error = (f64::from(*got) - want).abs();
                        let name = (isa.name(), format, lowest, index / n, index % n);
                        assert!(error <= 1e-6 * magnitude, "{name:?}: {got:e} {want:e} off by {error:e}");
                    }
                }
            }
        }
    }
}
