//! Every algorithm by itself, and the table that chooses one.

use super::super::dispatch::{choose, prepare, run, Algorithm, ManyRows};
use super::super::fast_kernel::Digits;
#[cfg(target_arch = "aarch64")]
use super::super::int8::{gemm::Int8Gemm, gemv_neon::Int8GemvNeon};
#[cfg(target_arch = "x86_64")]
use super::super::{
    bf16::gemm_amx::Bf16Amx,
    f32::fp8_gemv::Fp8Gemv,
    fast_kernel::RowKernel,
    int8::{few_amx::Int8FewAmx, gemm::Int8Gemm, gemv_avx2::Int8GemvAvx2, gemv_vnni::Int8GemvVnni},
};
use super::*;
use crate::format::{Bits, Element, Scale, ZeroPoint};

/// The algorithms for which an instruction set suffices.
fn algorithms(isa: &InstructionSet) -> Vec<Algorithm> {
    let in_f32 = [Algorithm::F32Gemv, Algorithm::F32Tiles];
    let fast: Vec<Algorithm> = match isa {
        InstructionSet::Portable(_) => vec![],
        #[cfg(target_arch = "aarch64")]
        InstructionSet::Neon(_) => vec![],
        #[cfg(target_arch = "aarch64")]
        InstructionSet::NeonDotprod(isa) => vec![
            Algorithm::Int8GemvNeon(Int8GemvNeon::new(*isa)),
            Algorithm::Int8FewDot(Int8Gemm::new(*isa)),
            Algorithm::Int8ManyDot(Int8Gemm::new(*isa)),
        ],
        #[cfg(target_arch = "aarch64")]
        InstructionSet::NeonI8mm(isa) => {
            vec![Algorithm::Int8FewI8mm(Int8Gemm::new(*isa)), Algorithm::Int8ManyI8mm(Int8Gemm::new(*isa))]
        }
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2(isa) => vec![
            Algorithm::Int8GemvAvx2(Int8GemvAvx2::new(*isa)),
            Algorithm::Int8ManyAvx2(Int8Gemm::new(*isa)),
        ],
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512(isa) => vec![Algorithm::Fp8Gemv(Fp8Gemv::new(*isa))],
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512Vnni(isa) => vec![
            Algorithm::Int8GemvVnni(Int8GemvVnni::new(*isa)),
            Algorithm::Int8Few(Int8Gemm::new(*isa)),
            Algorithm::Int8Many(Int8Gemm::new(*isa)),
        ],
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512Amx(isa) => vec![
            Algorithm::Int8FewAmx(Int8FewAmx::new(*isa)),
            Algorithm::Int8Amx(Int8Gemm::new(*isa)),
            Algorithm::Bf16Amx(Bf16Amx::new(*isa)),
        ],
    };
    in_f32.into_iter().chain(fast).collect()
}

fn name(algorithm: Algorithm) -> &'static str {
    match algorithm {
        Algorithm::F32Gemv => "f32 GEMV",
        Algorithm::F32Tiles => "f32 tiles",
        #[cfg(target_arch = "x86_64")]
        Algorithm::Int8GemvVnni(_) => "int8 GEMV",
        #[cfg(target_arch = "x86_64")]
        Algorithm::Int8GemvAvx2(_) => "int8 GEMV, AVX2",
        #[cfg(target_arch = "aarch64")]
        Algorithm::Int8GemvNeon(_) => "int8 GEMV, NEON",
        #[cfg(target_arch = "aarch64")]
        Algorithm::Int8FewDot(_) => "int8 dot, few",
        #[cfg(target_arch = "aarch64")]
        Algorithm::Int8ManyDot(_) => "int8 dot, many",
        #[cfg(target_arch = "aarch64")]
        Algorithm::Int8FewI8mm(_) => "int8 I8MM, few",
        #[cfg(target_arch = "aarch64")]
        Algorithm::Int8ManyI8mm(_) => "int8 I8MM, many",
        #[cfg(target_arch = "x86_64")]
        Algorithm::Int8Few(_) => "int8 VNNI, few",
        #[cfg(target_arch = "x86_64")]
        Algorithm::Int8Many(_) => "int8 VNNI, many",
        #[cfg(target_arch = "x86_64")]
        Algorithm::Int8ManyAvx2(_) => "int8 AVX2, many",
        #[cfg(target_arch = "x86_64")]
        Algorithm::Fp8Gemv(_) => "FP8 GEMV",
        #[cfg(target_arch = "x86_64")]
        Algorithm::Int8FewAmx(_) => "int8 AMX, few",
        #[cfg(target_arch = "x86_64")]
        Algorithm::Int8Amx(_) => "int8 AMX",
        #[cfg(target_arch = "x86_64")]
        Algorithm::Bf16Amx(_) => "bf16 AMX",
    }
}

/// Formats that nobody has: known axes, put together in other ways.
pub(super) fn made_up_formats() -> Vec<QuantFormat> {
    let uint = Element::Uint(Bits::Four);
    vec![
        QuantFormat::made_up(Element::E2m1, Scale::Float, ZeroPoint::None, 64),
        QuantFormat::made_up(Element::E2m1, Scale::Float, ZeroPoint::Bias, 32),
        QuantFormat::made_up(Element::E2m1, Scale::E8m0, ZeroPoint::None, 16),
        QuantFormat::made_up(Element::E2m1, Scale::E4m3, ZeroPoint::None, 32),
        QuantFormat::made_up(Element::E4m3, Scale::Float, ZeroPoint::None, 16),
        QuantFormat::made_up(Element::E4m3, Scale::E4m3, ZeroPoint::None, 32),
        QuantFormat::made_up(Element::E4m3, Scale::E8m0, ZeroPoint::None, 64),
        QuantFormat::made_up(uint, Scale::Float, ZeroPoint::None, 32),
        QuantFormat::made_up(uint, Scale::Float, ZeroPoint::Bias, 16),
        QuantFormat::made_up(uint, Scale::Float, ZeroPoint::Bias, 96),
        QuantFormat::made_up(uint, Scale::E8m0, ZeroPoint::None, 32),
    ]
}

fn check_algorithm(algorithm: Algorithm, isa: &InstructionSet, weight: &Weight, m: usize, rng: &mut StdRng) {
    let x: Vec<f32> = (0..m * weight.k).map(|_| rng.random_range(-1.0..1.0)).collect();
    let bias: Vec<f32> = (0..weight.n).map(|_| rng.random_range(-1.0..1.0)).collect();
    let name = (name(algorithm), isa.name(), weight.format, weight.n, weight.k, m);
    let want = matmul_in_f64(&weight.dequantized(), weight.k, &x, Some(&bias));
    let in_a_row = if matches!(algorithm, Algorithm::F32Tiles) { weight.k } else { 0 };
    match run(algorithm, isa, &weight.view(), &x, Some(&bias), Digits::EXACT) {
        Ok(got) => assert_close::<f32>(name, &got, &want, in_a_row),
        Err(error) => panic!("{name:?}: {error:?}"),
    }
}

#[test]
fn every_algorithm_agrees_with_f64_for_every_format_that_it_supports() {
    let mut used = std::collections::BTreeSet::new();
    for isa in isa::tested() {
        let mut rng = StdRng::seed_from_u64(21);
        for algorithm in algorithms(isa) {
            for (n, k) in [(1usize, 128usize), (3, 64), (7, 96), (17, 160), (17, 384), (2, 1056), (33, 256)] {
                for format in all_formats() {
                    if !k.is_multiple_of(format.granularity()) || !algorithm.supports(format) {
                        continue;
                    }
                    used.insert((isa.name(), name(algorithm)));
                    let weight = Weight::random(format, n, k, &mut rng);
                    for m in [1, 2, 3, 8, 9, 17, 33] {
                        check_algorithm(algorithm, isa, &weight, m, &mut rng);
                    }
                }
            }
        }
    }
    let all = isa::tested().iter().flat_map(|isa| algorithms(isa).into_iter().map(|a| (isa.name(), name(a))));
    assert_eq!(used, all.collect());
}

const MS: [usize; 10] = [1, 2, 3, 8, 9, 16, 17, 31, 32, 100];

#[test]
fn the_table_has_an_algorithm_for_every_format_and_m() {
    for isa in isa::tested() {
        for format in all_formats().chain(made_up_formats()) {
            for m in MS {
                let algorithm = choose(isa, m, format, Digits::EXACT);
                assert!(algorithm.supports(format), "{} {format} m={m}: {algorithm:?}", isa.name());
            }
        }
    }
}

/// The table as it stands in the documentation of `dispatch`.
#[test]
fn the_table_is_the_documented_one() {
    for isa in isa::tested() {
        for format in all_formats() {
            for m in MS {
                let in_f32 = if m < 32 { "f32 GEMV" } else { "f32 tiles" };
                let (one, more) = match format {
                    QuantFormat::MXFP8 => ("FP8 GEMV", "bf16 AMX"),
                    _ if format.element() == Element::E4m3 => ("FP8 GEMV", in_f32),
                    QuantFormat::NVFP4 => ("int8 GEMV", "bf16 AMX"),
                    QuantFormat::MXFP4 => ("int8 GEMV", "bf16 AMX"),
                    _ if format.element().uint().is_some() => match format.group_size() {
                        16 => ("int8 GEMV", in_f32),
                        _ => ("int8 GEMV", "int8 AMX"),
                    },
                    _ if matches!(format.element(), Element::Iq4Nl | Element::Iq(_)) => {
                        ("int8 GEMV", if format.group_size() == 16 { in_f32 } else { "int8 AMX" })
                    }
                    _ => (in_f32, in_f32),
                };
                let is_few_on_amx = more == "int8 AMX" && format.bits() > 2;
                let has_room_in_avx2 = format.element() != Element::Iq4Nl;
                let want = match (isa.name(), m) {
                    ("avx2", 1) if one == "int8 GEMV" && has_room_in_avx2 => "int8 GEMV, AVX2",
                    ("neondotprod" | "neoni8mm", 1) if one == "int8 GEMV" => "int8 GEMV, NEON",
                    ("neoni8mm", 9..32) if one == "int8 GEMV" => "int8 I8MM, few",
                    ("neoni8mm", 32..) if one == "int8 GEMV" => "int8 I8MM, many",
                    ("avx512vnni" | "avx512amx", 1) => one,
                    ("avx512amx", 2..17) if is_few_on_amx => "int8 AMX, few",
                    ("avx512amx", _) => more,
                    ("avx512vnni", 9..32) if one == "int8 GEMV" => "int8 VNNI, few",
                    ("avx512vnni", 32..) if one == "int8 GEMV" => "int8 VNNI, many",
                    _ => in_f32,
                };
                assert_eq!(
                    name(choose(isa, m, format, Digits::EXACT)),
                    want,
                    "{} {format} m={m}",
                    isa.name()
                );
                let want = match (isa.name(), m) {
                    ("neondotprod" | "neoni8mm", 2..5) if one == "int8 GEMV" => "int8 GEMV, NEON",
                    ("neondotprod", 5..32) if one == "int8 GEMV" => "int8 dot, few",
                    ("neondotprod", 32..) if one == "int8 GEMV" => "int8 dot, many",
                    ("neoni8mm", 5..32) if one == "int8 GEMV" => "int8 I8MM, few",
                    ("avx2", 2..5) if one == "int8 GEMV" && has_room_in_avx2 => "int8 GEMV, AVX2",
                    ("avx512vnni", 2..5) if one == "int8 GEMV" => one,
                    ("avx512amx", 2) if is_few_on_amx => one,
                    ("avx512vnni", 5..32) if one == "int8 GEMV" => "int8 VNNI, few",
                    _ => want,
                };
                let has_room_in_panels = has_room_in_avx2 && format.element().uint() != Some(Bits::Eight);
                for count in [1, 2] {
                    let want = match (isa.name(), m, count) {
                        ("avx2", 32.., 1) if one == "int8 GEMV" && has_room_in_panels => "int8 AVX2, many",
                        _ => want,
                    };
                    let fewer = Digits { count, strict: false };
                    assert_eq!(name(choose(isa, m, format, fewer)), want, "{} {format} m={m}", isa.name());
                }
            }
        }
    }
}

#[test]
fn a_format_without_a_fast_kernel_is_multiplied_in_f32() {
    for isa in isa::tested() {
        let mut rng = StdRng::seed_from_u64(22);
        for format in made_up_formats() {
            let mut weight = Weight::random(format, 7, 384, &mut rng);
            if format.element() == Element::E4m3 {
                // No NaN.
                weight.words.iter_mut().for_each(|word| *word &= 0xBFBF_BFBF);
            }
            for m in MS {
                let algorithm = choose(isa, m, format, Digits::EXACT);
                let in_f32 = if m < 32 { "f32 GEMV" } else { "f32 tiles" };
                assert_eq!(name(algorithm), in_f32, "{} {format} m={m}", isa.name());
                check_algorithm(algorithm, isa, &weight, m, &mut rng);
            }
            let got: Vec<f32> = dequantize_with(isa, &weight.view());
            let want = weight.dequantized();
            assert!(got.iter().zip(&want).all(|(got, want)| got == want), "{} {format}", isa.name());
        }
    }
}

/// An infinity is no fixed-point number: the fast kernel says so, and dispatch multiplies in f32.
#[test]
fn what_a_fast_kernel_cannot_represent_is_multiplied_in_f32() {
    for isa in isa::tested() {
        let mut rng = StdRng::seed_from_u64(23);
        for format in formats_for(256) {
            let weight = Weight::random(format, 5, 256, &mut rng);
            for m in [1, 3, 20, 40] {
                let mut x = vec![1f32; m * 256];
                x[m * 256 - 2] = f32::INFINITY;
                let algorithm = choose(isa, m, format, Digits::EXACT);
                let is_f32 = matches!(algorithm, Algorithm::F32Gemv | Algorithm::F32Tiles);
                let ran = run::<f32>(algorithm, isa, &weight.view(), &x, None, Digits::EXACT).is_ok();
                assert_eq!(ran, is_f32, "{} {format} m={m}: {algorithm:?}", isa.name());
                let y: Vec<f32> = matmul_with(isa, &weight.view(), &x, None);
                assert!(y[(m - 1) * 5..].iter().all(|y| !y.is_finite()), "{} {format} m={m}", isa.name());
                assert!(y[..(m - 1) * 5].iter().all(|y| y.is_finite()), "{} {format} m={m}", isa.name());
            }
        }
    }
}

/// x prepared once, weights in parts: the bits of the whole matmul, without tiles that take whole outputs, wherever parts begin and end.
#[test]
fn parts_of_several_weights_share_a_prepared_x() {
    for isa in isa::tested() {
        let mut rng = StdRng::seed_from_u64(24);
        for format in formats_for(640) {
            let weights = [37, 18].map(|n| Weight::random(format, n, 640, &mut rng));
            for (m, infinite) in [(1, false), (2, false), (5, false), (16, false), (1, true), (3, true)] {
                let mut x: Vec<f32> = (0..m * 640).map(|_| rng.random_range(-1.0..1.0)).collect();
                if infinite {
                    x[7] = f32::INFINITY;
                }
                let prepared = prepare(isa, format, 640, &x, Digits::EXACT);
                assert_eq!(prepared.m(), m);
                let of_whole = match name(choose(isa, m, format, Digits::EXACT)) {
                    "int8 AMX, few" => *isa,
                    _ => isa.without_tiles(),
                };
                for weight in &weights {
                    let whole: Vec<f32> = matmul_with(&of_whole, &weight.view(), &x, None);
                    for part in [1, 5, 16, weight.n] {
                        let mut got = vec![0f32; weight.n * m];
                        for (index, out) in got.chunks_mut(part * m).enumerate() {
                            prepared.rows(&weight.view(), index * part, out);
                        }
                        let turned: Vec<f32> =
                            (0..m * weight.n).map(|at| got[at % weight.n * m + at / weight.n]).collect();
                        assert_same_bits((isa.name(), format, m, part), &turned, &whole);
                    }
                }
            }
        }
    }
}

/// Integers are exact, and what follows is the same: vectors and tiles give the same bits, with any number of digits.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[test]
fn vectors_and_tiles_give_the_same_bits() {
    for isa in isa::tested() {
        let mut rng = StdRng::seed_from_u64(25);
        let (vectors, tiles) = match isa {
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512Amx(isa) => {
                (Algorithm::Int8Many(Int8Gemm::new(isa.vnni)), Algorithm::Int8Amx(Int8Gemm::new(*isa)))
            }
            #[cfg(target_arch = "aarch64")]
            InstructionSet::NeonI8mm(isa) => (
                Algorithm::Int8ManyDot(Int8Gemm::new(isa.dotprod)),
                Algorithm::Int8ManyI8mm(Int8Gemm::new(*isa)),
            ),
            _ => continue,
        };
        let mut compared = 0;
        for format in all_formats().filter(|format| tiles.supports(*format)) {
            let (n, k) = (37, 3 * format.granularity().max(128));
            let weight = Weight::random(format, n, k, &mut rng);
            for (m, count) in [(2, 3), (9, 1), (17, 2), (50, 3)] {
                let mut x: Vec<f32> = (0..m * k).map(|_| rng.random_range(-1.0..1.0)).collect();
                x[k + 5] = 1e4; // an outlier
                let digits = Digits { count, strict: true };
                let bits = |algorithm| run::<f32>(algorithm, isa, &weight.view(), &x, None, digits).unwrap();
                assert_same_bits((format, m, count), &bits(tiles), &bits(vectors));
                compared += 1;
            }
        }
        assert!(compared > 0, "{}", isa.name());
    }
}

/// x prepared for several weights, one after the other, in memory that has other numbers: the bits of each alone.
#[test]
fn weights_of_any_formats_share_many_rows_of_x() {
    for isa in isa::tested() {
        let mut rng = StdRng::seed_from_u64(26);
        for (m, infinite) in [(3, false), (40, false), (40, true)] {
            let mut x: Vec<f32> = (0..m * 256).map(|_| rng.random_range(-1.0..1.0)).collect();
            if infinite {
                x[7] = f32::INFINITY;
            }
            let mut shared = ManyRows::new(isa, 256, (&x).into(), ActivationPrecision::Exact);
            let mut out = vec![7.; 11];
            for format in formats_for(256) {
                for n in [5, 33] {
                    let weight = Weight::random(format, n, 256, &mut rng);
                    let bias: Vec<f32> = (0..n).map(|_| rng.random_range(-1.0..1.0)).collect();
                    shared.matmul(&weight.view(), Some(&bias), &mut out);
                    let alone: Vec<f32> = matmul_with(isa, &weight.view(), &x, Some(&bias));
                    let bits = |all: &[f32]| {
                        all.iter().map(|x| if x.is_nan() { f32::MAX } else { *x }).collect::<Vec<f32>>()
                    };
                    assert_same_bits((isa.name(), format, m, infinite), &bits(&out), &bits(&alone));
                }
            }
        }
    }
}

/// Which rows are multiplied together depends on the CPU, results do not. Rows end within a block.
#[cfg(target_arch = "x86_64")]
#[test]
fn rows_in_any_order_have_the_same_bits() {
    let with_vnni = |isa: &InstructionSet| {
        let InstructionSet::Avx512Vnni(isa) = isa else { return None };
        Some(*isa)
    };
    let Some(isa) = isa::tested().iter().find_map(with_vnni) else { return };
    let kernels = Int8GemvVnni::all(isa);
    let mut rng = StdRng::seed_from_u64(36);
    let mut checked = 0;
    for format in formats_for(8448).filter(|format| kernels[0].supports(*format)) {
        let is_of_super_blocks = format.scale() == Scale::SuperBlock;
        // Quarters of several passes and a rest, and too few rows for any.
        for (n, m) in [(7, 1), (39, 1), (39, 3)] {
            let k = 8192 + if is_of_super_blocks { SUPER_BLOCK } else { format.group_size().max(32) };
            let weight = Weight::random(format, n, k, &mut rng);
            let mut x: Vec<f32> = (0..m * k).map(|_| rng.random_range(-1.0..1.0)).collect();
            x[77] = 1e3;
            for count in 1..=3 {
                let digits = Digits { count, strict: true };
                let of_all = kernels.map(|kernel| {
                    let mut out = vec![0f32; (n - 2) * m];
                    kernel.prepare(format, k, &x, digits).unwrap().rows(&weight.view(), 2, &mut out);
                    out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                });
                assert!(
                    of_all.iter().all(|bits| *bits == of_all[0]),
                    "{format}, {n} rows, {m} of x, {count} digits"
                );
            }
        }
        checked += 1;
    }
    assert!(checked > 10, "{checked} formats");
}
