//! Activations far larger than others, above all where they meet weights of zero; and results that are subnormal.

use super::*;
use crate::format::Element;

/// Activations of about 0.01, with larger ones as real models have them.
fn activations(kind: usize, m: usize, k: usize, rng: &mut StdRng) -> (Vec<f32>, Vec<usize>) {
    let mut x: Vec<f32> = (0..m * k).map(|_| rng.random_range(-0.01..0.01)).collect();
    let every = |step: usize| (step / 2..k).step_by(step).collect::<Vec<_>>();
    let (columns, size): (Vec<usize>, f32) = match kind {
        // One number of a token, massive channels, one in every group, every other one, some of a group.
        0 => (vec![k / 2 + 1], 100.),
        1 => (vec![k / 3], 1e4),
        2 => (vec![5, k - 7], 1e4),
        3 => (every(32), 3.),
        4 => (every(2), 10.),
        5 => ((40..48).collect(), 1e4),
        6 => (vec![1, 2, 3, 64, 90], 1e25),
        _ => (every(4), 0.3),
    };
    for (m, x) in x.chunks_exact_mut(k).enumerate() {
        if kind != 0 || m == 0 {
            columns.iter().for_each(|k| x[*k] = if k % 3 == 0 { -size } else { size * 0.7 });
        }
    }
    (x, columns)
}

/// Makes a code of every row stand for zero, as well as the format has one, and says how well.
fn erase(weight: &mut Weight, columns: &[usize]) {
    let groups = weight.k / weight.format.group_size();
    if let Some(biases) = &mut weight.biases {
        // Code 5 (or 1) is zero.
        let zero = if weight.format.bits() < 3 { 1. } else { 5. };
        let scales = match weight.scales {
            Groups::F32(_) => [0.0096, -0.0047, 0.0181],
            // A power of two times a small number: exact in every dtype.
            Groups::Byte(_) | Groups::F16(_) | Groups::Bf16(_) => [0.0078125, -0.00390625, 0.015625],
        };
        for group in 0..weight.n * groups {
            weight.scales.set(group, scales[group % 3]);
            biases.set(group, -zero * scales[group % 3]);
        }
    }
    let bits = weight.format.bits();
    let code = match (weight.format.element().uint(), &weight.biases) {
        (Some(_), Some(_)) => {
            if bits < 3 {
                1u64
            } else {
                5
            }
        }
        (Some(_), None) => 1 << (bits - 1),
        (None, _) => {
            if weight.format.element() == Element::Nf4 {
                7
            } else {
                0
            }
        }
    };
    let row_words = weight.k * bits / 32;
    for row in weight.words.chunks_exact_mut(row_words) {
        for k in columns {
            for bit in 0..bits {
                let (word, at) = ((k * bits + bit) / 32, (k * bits + bit) % 32);
                row[word] = row[word] & !(1 << at) | ((code >> bit & 1) as u32) << at;
            }
        }
    }
}

/// Kernels ask for as many rows as they multiply together.
#[cfg(target_arch = "x86_64")]
#[test]
fn columns_of_any_number_of_rows() {
    let (n, k) = (67, 256);
    let mut rng = StdRng::seed_from_u64(33);
    for format in formats_for(k) {
        let weight = Weight::random(format, n, k, &mut rng);
        let dequantized = weight.dequantized();
        for (first_row, rows) in [(0, 1), (3, 16), (0, 17), (16, 32), (5, 62)] {
            for column in [0, 1, 77, 255] {
                let mut found = vec![0.; rows];
                weight.view().column(first_row, column, &mut found);
                let expected = (first_row..first_row + rows).map(|row| dequantized[row * k + column]);
                for (row, (found, expected)) in found.iter().zip(expected).enumerate() {
                    let what = format!("{format}: row {row} of {rows} from {first_row} on, column {column}");
                    assert!(
                        (found - expected).abs() <= 1e-6 * expected.abs(),
                        "{what}: {found}, not {expected}"
                    );
                }
            }
        }
        let mut last = [0.; 10];
        weight.view().column(n - 7, 77, &mut last);
        let are_there = last.map(|weight| !weight.is_nan());
        assert_eq!(are_there, [true, true, true, true, true, true, true, false, false, false], "{format}");
    }
}

#[test]
fn results_are_as_good_beside_outliers() {
    // K of GGML's super-blocks, too; scales and biases are bf16 (`Weight::random`).
    let (n, k) = (37, 768);
    let mut rng = StdRng::seed_from_u64(31);
    for format in formats_for(k) {
        for kind in 0..8 {
            let erased_or_not =
                [1, 3, 9, 40].into_iter().flat_map(|m| [true, false].map(|erased| (m, erased)));
            for (m, erased) in erased_or_not {
                let mut weight = Weight::random(format, n, k, &mut rng);
                let (x, columns) = activations(kind, m, k, &mut rng);
                // No code of tables stands for zero; of super-blocks with biases it depends on these.
                let has_zero = !matches!(format.element(), Element::Iq4Nl | Element::Iq(_))
                    && !matches!(weight.biases, Some(Groups::Byte(_)));
                let erased = erased && has_zero;
                if erased {
                    erase(&mut weight, &columns);
                }
                let dequantized = weight.dequantized();
                if erased {
                    let zero = |row: &[f32]| columns.iter().all(|k| row[*k] == 0.);
                    assert!(dequantized.chunks_exact(k).all(zero), "{format}");
                }
                let want = matmul_in_f64(&dequantized, k, &x, None);
                for isa in isa::tested() {
                    let got: Vec<f32> = matmul_with(isa, &weight.view(), &x, None);
                    let got = got.iter().map(|y| f64::from(*y));
                    let error = relative_error(got, &want);
                    let name = (isa.name(), format, kind, m, erased);
                    assert!(error <= 1e-6, "{name:?}: {error:e}");
                }
            }
        }
    }
}

/// Where biases have all bits of f32, they do not survive that a center is added to them: a weight that is zero would be almost zero.
#[cfg(target_arch = "x86_64")]
#[test]
fn outliers_meet_the_weights_of_the_reference() {
    let (n, k) = (35, 768);
    let mut rng = StdRng::seed_from_u64(34);
    let mut checked = 0;
    for format in formats_for(k) {
        for m in [1, 9, 40] {
            let mut weight = Weight::random(format, n, k, &mut rng);
            if !matches!(weight.biases, Some(Groups::F32(_))) {
                continue;
            }
            let (x, columns) = activations(2, m, k, &mut rng);
            erase(&mut weight, &columns);
            let dequantized = weight.dequantized();
            assert!(dequantized.chunks_exact(k).all(|row| columns.iter().all(|k| row[*k] == 0.)), "{format}");
            let want = matmul_in_f64(&dequantized, k, &x, None);
            // Others, as for two to eight rows, multiply and add with one rounding.
            let in_integers = |isa: &&InstructionSet| match isa.name() {
                "avx512vnni" | "avx512amx" => true,
                name => name == "avx2" && m == 1,
            };
            for isa in isa::tested().iter().filter(in_integers) {
                let got: Vec<f32> = matmul_with(isa, &weight.view(), &x, None);
                let error = relative_error(got.iter().map(|y| f64::from(*y)), &want);
                assert!(error <= 1e-6, "{:?}: {error:e}", (isa.name(), format, m));
            }
            checked += 1;
        }
    }
    assert!(checked > 0, "no format has biases of f32");
}

/// Activations, scales, or only results below 2^-126, where f32 has steps of 2^-149.
#[test]
fn subnormal_results_are_as_good() {
    let (n, k) = (7, 256);
    let mut rng = StdRng::seed_from_u64(32);
    for format in formats_for(k) {
        for (m, log) in
            [1, 3, 40].into_iter().flat_map(|m| [-140, -130, -126, -122, -110].map(|log| (m, log)))
        {
            let weight = Weight::random(format, n, k, &mut rng);
            let size = 2f64.powi(log) as f32;
            let x: Vec<f32> = (0..m * k).map(|_| rng.random_range(-1.0f32..1.0) * size).collect();
            let want = matmul_in_f64(&weight.dequantized(), k, &x, None);
            for isa in isa::tested() {
                let got: Vec<f32> = matmul_with(isa, &weight.view(), &x, None);
                for (index, (got, (want, magnitude))) in got.iter().zip(&want).enumerate() {
                    let error = (f64::from(*got) - want).abs();
                    // A rounding of each term, of which there may be as many as there are weights.
                    let bound = 1e-6 * magnitude + 2f64.powi(-149) * k as f64;
                    let name = (isa.name(), format, m, log, index);
                    assert!(error <= bound, "{name:?}: {got:e} {want:e} off by {error:e} > {bound:e}");
                }
            }
        }
    }
}
