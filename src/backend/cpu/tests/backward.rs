//! The gradient of x on every instruction set, against f64.

use super::algorithms::made_up_formats;
use super::*;
use crate::format::Element;

/// Rows of dy: around the numbers that kernels and tasks take.
const M: [usize; 10] = [0, 1, 2, 7, 31, 32, 33, 48, 49, 200];

/// `dy * w` in f64, and the sum of magnitudes that bounds its rounding errors. Where kernels round a weight once and the
/// reference rounds it twice, it is the magnitude of the largest weight that counts: small ones are differences.
fn backward_in_f64(weight: &Weight, dy: &[f32]) -> Vec<(f64, f64)> {
    let weights = weight.dequantized();
    let turned: Vec<f32> =
        (0..weights.len()).map(|at| weights[at % weight.n * weight.k + at / weight.n]).collect();
    let mut want = matmul_in_f64(&turned, weight.n, dy, None);
    if !weight.view().scaling_is_exact() {
        let largest = f64::from(weights.iter().fold(0f32, |largest, w| largest.max(w.abs())));
        for (want, dy) in want.chunks_exact_mut(weight.k).zip(dy.chunks_exact(weight.n)) {
            let size = largest * dy.iter().map(|dy| f64::from(dy.abs())).sum::<f64>();
            want.iter_mut().for_each(|(_, bound)| *bound = bound.max(size));
        }
    }
    want
}

fn check<T: Real>(isa: &InstructionSet, weight: &Weight, m: usize, rng: &mut StdRng) {
    let dy: Vec<T> = (0..m * weight.n).map(|_| T::from_f32(rng.random_range(-1.0..1.0))).collect();
    let exact: Vec<f32> = dy.iter().map(|dy| dy.to_f32()).collect();
    let name = (isa.name(), weight.format, weight.n, weight.k, m);
    let got = backward_with(isa, &weight.view(), &dy);
    assert_close(name, &got, &backward_in_f64(weight, &exact), weight.n);
}

#[test]
fn gradients_agree_with_f64_everywhere() {
    // One, two and three rows behind whole tiles, too.
    let more = [(129, 64), (130, 96), (259, 160), (300, 32)];
    for isa in isa::available() {
        let mut rng = StdRng::seed_from_u64(31);
        for (n, k) in SHAPES.into_iter().chain(more) {
            for format in formats_for(k) {
                let weight = Weight::random(format, n, k, &mut rng);
                let some: Vec<usize> =
                    M.into_iter().filter(|m| n * k * m < 1 << 16 || rng.random_bool(0.05)).collect();
                for m in some {
                    check::<f32>(isa, &weight, m, &mut rng);
                    check::<f16>(isa, &weight, m, &mut rng);
                    check::<bf16>(isa, &weight, m, &mut rng);
                }
            }
        }
    }
}

#[test]
fn nvfp4_rows_may_end_inside_a_run_of_32() {
    for isa in isa::available() {
        let mut rng = StdRng::seed_from_u64(32);
        for k in [16, 48, 80, 112, 1040] {
            let weight = Weight::random(QuantFormat::NVFP4, 5, k, &mut rng);
            for m in [1, 4, 50] {
                check::<f32>(isa, &weight, m, &mut rng);
            }
        }
    }
}

#[test]
fn formats_without_a_codec_have_gradients() {
    for isa in isa::available() {
        let mut rng = StdRng::seed_from_u64(33);
        for format in made_up_formats() {
            let mut weight = Weight::random(format, 7, 384, &mut rng);
            if format.element() == Element::E4m3 {
                // No NaN.
                weight.words.iter_mut().for_each(|word| *word &= 0xBFBF_BFBF);
            }
            for m in [1, 40] {
                check::<f32>(isa, &weight, m, &mut rng);
            }
        }
    }
}

/// Several tiles, panels and tasks: as good as f32, and with the same bits on any number of threads.
#[test]
fn gradients_have_the_same_bits_on_any_number_of_threads() {
    let mut rng = StdRng::seed_from_u64(34);
    let (n, k) = (541, 1344);
    let pools =
        [1, 2, 3, 40].map(|threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap());
    for format in formats_for(k) {
        let weight = Weight::random(format, n, k, &mut rng);
        for (m, checked) in [(1, vec![0]), (33, vec![0, 32]), (850, vec![0, 47, 48, 767, 768, 849])] {
            let dy: Vec<f32> = (0..m * n).map(|_| rng.random_range(-1.0..1.0)).collect();
            let some: Vec<f32> = checked.iter().flat_map(|row| dy[row * n..][..n].to_vec()).collect();
            let want = backward_in_f64(&weight, &some);
            for isa in isa::available() {
                let got = backward_with(isa, &weight.view(), &dy);
                for (row, want) in checked.iter().zip(want.chunks_exact(k)) {
                    let error = relative_error(got[row * k..][..k].iter().map(|x| f64::from(*x)), want);
                    assert!(error <= 1e-6, "{} {format} row {row} of {m}: {error:e}", isa.name());
                }
                // Long texts take long: of those, one other number of threads.
                for pool in pools.iter().filter(|pool| m < 100 || pool.current_num_threads() == 3) {
                    let again = pool.install(|| backward_with(isa, &weight.view(), &dy));
                    assert_same_bits((isa.name(), format, m, pool.current_num_threads()), &again, &got);
                }
            }
        }
    }
}

#[test]
fn a_nan_reaches_the_columns_of_its_group_and_no_other() {
    let (n, k, poisoned) = (37, 1056, 2);
    for isa in isa::available() {
        let mut rng = StdRng::seed_from_u64(35);
        for format in formats_for(k) {
            let mut weight = Weight::random(format, n, k, &mut rng);
            let (size, groups) = (format.group_size(), k / format.group_size());
            for group in [0, groups - 1] {
                let place = poisoned * groups + group;
                match &mut weight.scales {
                    Groups::Byte(scales) => {
                        scales[place] = if format == QuantFormat::NVFP4 { 0x7F } else { 255 };
                    }
                    scales @ (Groups::F16(_) | Groups::Bf16(_) | Groups::F32(_)) => {
                        scales.set(place, f32::NAN)
                    }
                }
            }
            for m in [1, 5, 49] {
                let dx = backward_with(isa, &weight.view(), &vec![1f32; m * n]);
                for (index, dx) in dx.iter().enumerate() {
                    let expected = [0, groups - 1].contains(&(index % k / size));
                    assert_eq!(dx.is_nan(), expected, "{} {format} {m} [{index}]", isa.name());
                }
            }
        }
    }
}
