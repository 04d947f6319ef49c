//! Every instruction set through the same checks on the same awkward shapes, against the scalar
//! reference in f64.

use super::dispatch::{self, MAX_FEW};
use super::isa::InstructionSet;
use super::*;
use crate::format::{GroupScales, QuantFormat, QuantizedRows, Quantizer, Scale, SUPER_BLOCK};
use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};

mod algorithms;
mod backward;
#[cfg(unix)]
mod bounds;
mod digits;
mod extremes;
mod outliers;
mod weights;

use weights::{Groups, Weight};

/// [`matmul`] on an instruction set.
fn matmul_with<T: Real>(
    isa: &InstructionSet,
    matrix: &PackedMatrix,
    x: &[T],
    bias: Option<&[f32]>,
) -> Vec<T> {
    dispatch::matmul(isa, matrix, x, bias, ActivationPrecision::Exact)
}

/// [`matmul_backward`] on an instruction set.
fn backward_with<T: Real>(isa: &InstructionSet, matrix: &PackedMatrix, dy: &[T]) -> Vec<T> {
    dispatch::matmul_backward(isa, matrix, dy)
}

/// [`dequantize`] on an instruction set.
fn dequantize_with<T: Real>(isa: &InstructionSet, matrix: &PackedMatrix) -> Vec<T> {
    f32::dequantize::dequantize(f32::kernels(isa), matrix)
}

/// N and K: one row, odd counts, less than a block, every kind of incomplete last block, rows that are
/// not multiples of 16 bytes, more than one span along K.
const SHAPES: [(usize, usize); 12] = [
    (1, 32),
    (3, 64),
    (7, 96),
    (1, 128),
    (17, 160),
    (5, 224),
    (33, 256),
    (2, 1056),
    (50, 1024),
    (19, 2176),
    (129, 384),
    (8, 4096),
];

/// Rows of x: none, every panel size of the GEMV, the edge to tiles, a whole panel of the GEMM and more.
const M: [usize; 15] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, MAX_FEW - 1, MAX_FEW, MAX_FEW + 1, 64, 81];

/// Every format that a weight can have.
fn all_formats() -> impl Iterator<Item = QuantFormat> {
    QuantFormat::all().into_iter().chain(QuantFormat::only_read())
}

fn formats_for(k: usize) -> impl Iterator<Item = QuantFormat> {
    all_formats().filter(move |format| k.is_multiple_of(format.granularity()))
}

/// `x * w^T + bias` in f64, and the sum of magnitudes that bounds its rounding errors.
fn matmul_in_f64(weights: &[f32], k: usize, x: &[f32], bias: Option<&[f32]>) -> Vec<(f64, f64)> {
    let mut results = Vec::new();
    for x in x.chunks_exact(k) {
        for (n, weights) in weights.chunks_exact(k).enumerate() {
            let bias = bias.map_or(0.0, |bias| f64::from(bias[n]));
            let terms = weights.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x));
            let (sum, size) = terms.fold((bias, bias.abs()), |(s, a), t| (s + t, a + t.abs()));
            results.push((sum, size));
        }
    }
    results
}

/// Unit roundoff of an activation dtype, and half its smallest step.
#[allow(clippy::wildcard_enum_match_arm, reason = "all other activations are F32")]
fn unit<T: Real>() -> (f64, f64) {
    match T::DTYPE {
        candle_core::DType::F16 => (2f64.powi(-11), 2f64.powi(-25)),
        candle_core::DType::BF16 => (2f64.powi(-8), 0.0),
        _ => (2f64.powi(-24), 0.0),
    }
}

fn check_matmul<T: Real>(isa: &InstructionSet, weight: &Weight, m: usize, biased: bool, rng: &mut StdRng) {
    let x: Vec<T> = (0..m * weight.k).map(|_| T::from_f32(rng.random_range(-1.0..1.0))).collect();
    let bias: Option<Vec<f32>> = biased.then(|| (0..weight.n).map(|_| rng.random_range(-1.0..1.0)).collect());
    let got = matmul_with(isa, &weight.view(), &x, bias.as_deref());
    let exact: Vec<f32> = x.iter().map(|x| x.to_f32()).collect();
    let want = matmul_in_f64(&weight.dequantized(), weight.k, &exact, bias.as_deref());
    let name = (isa.name(), weight.format, weight.n, weight.k, m);
    assert_close(name, &got, &want, if m <= MAX_FEW { 0 } else { weight.k });
}

/// Whether an output is as good as a sum in f32, and one rounding to T. Kernels of our own add up lanes and groups, each of
/// few terms. Tiles of the `gemm` crate make so many additions `in_a_row`, each of which rounds: a random walk, of which
/// six standard deviations are allowed.
#[track_caller]
fn assert_close<T: Real>(name: impl std::fmt::Debug, got: &[T], want: &[(f64, f64)], in_a_row: usize) {
    assert_eq!(got.len(), want.len());
    let (unit, half_step) = unit::<T>();
    let of_sum = f64::max(1e-6, 6. * (in_a_row as f64 / 12.).sqrt() * 2f64.powi(-23));
    // Two digits of a bf16 lose up to 2^-16 of the largest number of a group, which shows where sums cancel.
    let of_digits = if T::DTYPE == candle_core::DType::BF16 { 2f64.powi(-16) } else { 0. };
    for (index, (got, (want, size))) in got.iter().zip(want).enumerate() {
        let error = (f64::from(got.to_f32()) - want).abs();
        let bound = (of_sum + of_digits) * size + unit * want.abs() + half_step;
        assert!(error <= bound, "{name:?} [{index}]: {} {want} off by {error:e} > {bound:e}", got.to_f32());
    }
}

#[test]
fn products_agree_with_f64_everywhere() {
    for isa in isa::available() {
        let mut rng = StdRng::seed_from_u64(1);
        for (n, k) in SHAPES {
            for format in formats_for(k) {
                let weight = Weight::random(format, n, k, &mut rng);
                // All widths on small shapes; on large ones a random few, to keep the test short.
                let some: Vec<usize> =
                    M.into_iter().filter(|m| n * k < 8192 || *m < 3 || rng.random_bool(0.15)).collect();
                for m in some {
                    check_matmul::<f32>(isa, &weight, m, m % 2 == 1, &mut rng);
                    check_matmul::<f16>(isa, &weight, m, m % 2 == 0, &mut rng);
                    check_matmul::<bf16>(isa, &weight, m, m % 2 == 1, &mut rng);
                }
            }
        }
    }
}

#[test]
fn scales_and_biases_may_differ_in_dtype() {
    for isa in isa::available() {
        let mut rng = StdRng::seed_from_u64(14);
        for (scales, biases) in (0..9).map(|pair| (pair / 3, pair % 3)) {
            let mut weight = Weight::random(QuantFormat::affine(4, 32).unwrap(), 7, 544, &mut rng);
            let mut floats = || (0..7 * 544 / 32).map(|_| rng.random_range(-0.02..0.02)).collect();
            weight.scales = Groups::of(floats(), scales);
            weight.biases = Some(Groups::of(floats(), biases));
            for m in [1, 3, MAX_FEW + 1] {
                check_matmul::<f32>(isa, &weight, m, true, &mut rng);
            }
        }
    }
}

/// Threads share the rows, and each goes over its own in passes.
#[test]
fn products_of_many_rows_agree_with_f64() {
    for isa in isa::available() {
        let mut rng = StdRng::seed_from_u64(16);
        for format in formats_for(128) {
            let weight = Weight::random(format, 2107, 128, &mut rng);
            check_matmul::<f32>(isa, &weight, 1, true, &mut rng);
        }
    }
}

#[test]
fn nvfp4_rows_may_end_inside_a_run_of_32() {
    for isa in isa::available() {
        let mut rng = StdRng::seed_from_u64(2);
        for k in [16, 48, 80, 112, 1040] {
            let weight = Weight::random(QuantFormat::NVFP4, 5, k, &mut rng);
            for m in [1, 4, MAX_FEW + 1] {
                check_matmul::<f32>(isa, &weight, m, true, &mut rng);
            }
        }
    }
}

#[track_caller]
fn assert_same_bits(name: impl std::fmt::Debug, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len());
    for (index, (got, want)) in got.iter().zip(want).enumerate() {
        let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
        assert!(same, "{name:?} [{index}]: {got:e} {want:e}");
    }
}

#[test]
fn dequantize_has_the_bits_of_the_reference() {
    for isa in isa::available() {
        let mut rng = StdRng::seed_from_u64(3);
        for (n, k) in SHAPES {
            for format in formats_for(k) {
                let weight = Weight::random(format, n, k, &mut rng);
                let got: Vec<f32> = dequantize_with(isa, &weight.view());
                assert_same_bits((isa.name(), format, n, k), &got, &weight.dequantized());
            }
        }
    }
}

#[test]
fn every_scale_byte_times_every_code_decodes_alike() {
    for isa in isa::available() {
        for format in QuantFormat::all().into_iter().filter(|format| format.scale().is_byte()) {
            let k = 256;
            let words_per_row = format.words_per_row(k).unwrap();
            let codes: Vec<u8> = (0..words_per_row * 4)
                .map(|byte| if format.bits() == 8 { byte as u8 } else { (byte % 8 * 0x22 + 0x10) as u8 })
                .collect();
            let row: Vec<u32> =
                codes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
            let groups = k / format.group_size();
            let weight = Weight {
                format,
                n: 256,
                k,
                words: row.repeat(256),
                scales: Groups::Byte((0..=255).flat_map(|byte| vec![byte; groups]).collect()),
                biases: None,
                global_scale: 1.0,
                super_blocks: Default::default(),
            };
            let got: Vec<f32> = dequantize_with(isa, &weight.view());
            assert_same_bits((isa.name(), format), &got, &weight.dequantized());
        }
    }
}

#[test]
fn a_nan_reaches_its_row_and_no_other() {
    // Rows of the next passes have the places of the poisoned one. Tiles have a shorter last part along K, and rows of
    // nothing behind the last.
    let (n, poisoned) = (37, 2);
    for isa in isa::available() {
        let mut rng = StdRng::seed_from_u64(4);
        for format in all_formats() {
            let k: usize = if format.scale() == Scale::SuperBlock { 1024 } else { 1056 };
            if !k.is_multiple_of(format.granularity()) {
                continue;
            }
            let groups = k / format.group_size();
            for in_bias in (0..1 + usize::from(format.has_biases())).map(|turn| turn == 1) {
                let mut weight = Weight::random(format, n, k, &mut rng);
                let place = poisoned * groups + groups - 1;
                let super_block = (poisoned + 1) * (k / SUPER_BLOCK) - 1;
                match (&mut weight.scales, &mut weight.biases) {
                    _ if format.scale() == Scale::SuperBlock => {
                        weight.super_blocks[usize::from(in_bias)][super_block] = f16::NAN;
                    }
                    (Groups::Byte(scales), _) => {
                        scales[place] = if format == QuantFormat::NVFP4 { 0x7F } else { 255 };
                    }
                    (_, Some(biases)) if in_bias => biases.set(place, f32::NAN),
                    (scales, _) => scales.set(place, f32::NAN),
                }
                for m in [1, 5, MAX_FEW + 1] {
                    let y: Vec<f32> = matmul_with(isa, &weight.view(), &vec![1.0f32; m * k], None);
                    for (index, y) in y.iter().enumerate() {
                        let name = (isa.name(), format, in_bias, m, index);
                        assert_eq!(y.is_nan(), index % n == poisoned, "{name:?}");
                    }
                }
            }
        }
        let mut weight = Weight::random(QuantFormat::MXFP8, 3, 96, &mut rng);
        weight.words[24 + 7] |= 0x7F00;
        for m in [1, 5, MAX_FEW + 1] {
            let y: Vec<f32> = matmul_with(isa, &weight.view(), &vec![1.0f32; m * 96], None);
            for (index, y) in y.iter().enumerate() {
                assert_eq!(y.is_nan(), index % 3 == 1, "{} {m} {index}", isa.name());
            }
        }
    }
}

/// Relative L2 error of `got` against f64.
fn relative_error(got: impl Iterator<Item = f64>, want: &[(f64, f64)]) -> f64 {
    let (error, size) = got.zip(want).fold((0.0, 0.0), |(error, size), (got, (want, _))| {
        (error + (got - want) * (got - want), size + want * want)
    });
    (error / size).sqrt()
}

/// Results of a 16-bit type are at most 5 % further from f64 than f64 rounded to that type.
fn check_rounding<T: Real>(isa: &InstructionSet, weight: &Weight, x: &[f32], want: &[(f64, f64)]) {
    let x: Vec<T> = x.iter().map(|x| T::from_f32(*x)).collect();
    let got: Vec<T> = matmul_with(isa, &weight.view(), &x, None);
    let error = relative_error(got.iter().map(|y| f64::from(y.to_f32())), want);
    // Through f32, which is far finer than T.
    let rounded = want.iter().map(|(y, _)| f64::from(T::from_f32(*y as f32).to_f32()));
    let unavoidable = relative_error(rounded, want);
    let name = (isa.name(), weight.format, x.len() / weight.k, T::DTYPE);
    assert!(error <= 1.05 * unavoidable, "{name:?}: {error:e}, rounding alone {unavoidable:e}");
}

/// Gaussian weights, long rows, activations of one sign: sums that cancel.
#[test]
fn results_are_as_good_as_rounding_allows() {
    fn gaussian(rng: &mut impl Rng) -> f32 {
        let u: f32 = rng.random_range(1e-6..1.0);
        (-2.0 * u.ln()).sqrt() * (std::f32::consts::TAU * rng.random::<f32>()).cos()
    }
    let mut rng = StdRng::seed_from_u64(5);
    let (n, k) = (24, 16384);
    let dense: Vec<f32> = (0..n * k).map(|_| 0.02 * gaussian(&mut rng)).collect();
    for format in QuantFormat::all() {
        let rows = QuantizedRows::quantize(format, Quantizer::Mlx, &dense, k, None).unwrap();
        let (scales, biases) = match rows.scales {
            GroupScales::Float { scales, biases } => (Groups::F32(scales), Some(Groups::F32(biases))),
            GroupScales::Bytes(scales) => (Groups::Byte(scales), None),
        };
        let super_blocks = Default::default();
        let weight =
            Weight { format, n, k, words: rows.words, scales, biases, global_scale: 1.0, super_blocks };
        let dequantized = weight.dequantized();
        for (m, one_sign) in [(1, false), (1, true), (4, true), (8, false), (MAX_FEW + 1, true)] {
            let signed = |x: f32| if one_sign { x.abs() } else { x };
            let x: Vec<f32> = (0..m * k).map(|_| signed(gaussian(&mut rng))).collect();
            let want = matmul_in_f64(&dequantized, k, &x, None);
            // What f16 and bf16 both have.
            let short: Vec<f32> = x.iter().map(|x| bf16::from_f32(*x).to_f32()).collect();
            let want_of_short = matmul_in_f64(&dequantized, k, &short, None);
            for isa in isa::available() {
                let name = (isa.name(), format, m, one_sign);
                let got: Vec<f32> = matmul_with(isa, &weight.view(), &x, None);
                let error = relative_error(got.iter().map(|y| f64::from(*y)), &want);
                assert!(error <= 1e-6, "{name:?}: {error:e}");

                check_rounding::<f16>(isa, &weight, &short, &want_of_short);
                check_rounding::<bf16>(isa, &weight, &short, &want_of_short);
            }
        }
    }
}

#[test]
fn a_column_has_the_same_bits_whatever_its_company() {
    for isa in isa::available() {
        let mut rng = StdRng::seed_from_u64(6);
        for format in formats_for(2176) {
            let weight = Weight::random(format, 21, 2176, &mut rng);
            let x: Vec<f32> = (0..8 * weight.k).map(|_| rng.random_range(-1.0..1.0)).collect();
            let eight: Vec<f32> = matmul_with(isa, &weight.view(), &x, None);
            // A single column may have a kernel of its own.
            for columns in 2..8 {
                let fewer: Vec<f32> = matmul_with(isa, &weight.view(), &x[..columns * weight.k], None);
                assert_same_bits((isa.name(), format, columns), &fewer, &eight[..columns * 21]);
            }
        }
    }
}

/// Several of everything, and a rest: tasks of rows (with one thread of two tiles), parts of K, panels of columns.
#[test]
fn products_of_many_tiles_agree_with_f64() {
    let mut rng = StdRng::seed_from_u64(8);
    let (n, k, m) = (541, 1344, 150);
    let one_thread = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    for format in formats_for(k) {
        let weight = Weight::random(format, n, k, &mut rng);
        let x: Vec<f32> = (0..m * k).map(|_| rng.random_range(-1.0..1.0)).collect();
        let bias: Vec<f32> = (0..n).map(|_| rng.random_range(-1.0..1.0)).collect();
        let columns = [0, 63, 64, 127, 128, m - 1];
        let some = columns.map(|column| x[column * k..][..k].to_vec()).concat();
        let want = matmul_in_f64(&weight.dequantized(), k, &some, Some(&bias));
        for isa in isa::available() {
            let multiply = || matmul_with(isa, &weight.view(), &x, Some(&bias));
            let outputs: [Vec<f32>; 2] = [multiply(), one_thread.install(multiply)];
            for (got, (want, column)) in
                outputs.iter().flat_map(|got| want.chunks_exact(n).zip(columns).map(move |want| (got, want)))
            {
                let error = relative_error(got[column * n..][..n].iter().map(|y| f64::from(*y)), want);
                assert!(error <= 1e-6, "{} {format} column {column}: {error:e}", isa.name());
            }
        }
    }
}

/// Candle configures the matrix unit once for each thread that it has, this one and those of its pool among them.
#[test]
fn candle_finds_the_matrix_unit_as_it_left_it() {
    use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
    use candle_core::{Device, Module, Tensor};
    let mut rng = StdRng::seed_from_u64(12);
    let mut random = |rows: usize| {
        let numbers: Vec<f32> = (0..rows * 512).map(|_| rng.random_range(-1.0..1.0)).collect();
        Tensor::from_vec(numbers, (rows, 512), &Device::Cpu).unwrap()
    };
    let packed = QTensor::quantize(&random(512), GgmlDType::Q4K).unwrap();
    let (theirs, x) = (QMatMul::from_qtensor(packed).unwrap(), random(64));
    let multiply = || theirs.forward(&x).unwrap().to_vec2::<f32>().unwrap();
    let first = multiply();
    for format in [QuantFormat::affine(4, 64).unwrap(), QuantFormat::NVFP4] {
        // A small matmul stays on this thread, a large one goes to all.
        for n in [16, 1024] {
            let weight = Weight::random(format, n, 512, &mut StdRng::seed_from_u64(13));
            matmul::<f32>(&weight.view(), &[1.; 8 * 512], None);
            assert_eq!(multiply(), first);
        }
    }
}
