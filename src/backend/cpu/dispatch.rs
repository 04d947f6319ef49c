//! Which algorithm multiplies a weight: the one place that decides.
//!
//! | instruction set | rows of x (M) | affine, symmetric | MXFP4 | NVFP4 | MXFP8 | every other format |
//! |---|---|---|---|---|---|---|
//! | `portable`, `neon`, `avx512` | 1 to 31 | f32 GEMV | f32 GEMV | f32 GEMV | f32 GEMV | f32 GEMV |
//! | | 32 and more | f32 tiles | f32 tiles | f32 tiles | f32 tiles | f32 tiles |
//! | `neondotprod` | 1 | int8 GEMV | int8 GEMV | int8 GEMV | f32 GEMV | f32 GEMV |
//! | ·, three digits | 2 to 31 | f32 GEMV | f32 GEMV | f32 GEMV | f32 GEMV | f32 GEMV |
//! | · | 32 and more | f32 tiles | f32 tiles | f32 tiles | f32 tiles | f32 tiles |
//! | ·, one or two | 2 to 4 | int8 GEMV | int8 GEMV | int8 GEMV | f32 GEMV | f32 GEMV |
//! | · | more, to 31 | int8 dot | int8 dot | int8 dot | f32 GEMV | f32 GEMV |
//! | · | 32 and more | int8 dot | int8 dot | int8 dot | f32 tiles | f32 tiles |
//! | `neoni8mm` | 1 | int8 GEMV | int8 GEMV | int8 GEMV | f32 GEMV | f32 GEMV |
//! | ·, three digits | 2 to 8 | f32 GEMV | f32 GEMV | f32 GEMV | f32 GEMV | f32 GEMV |
//! | ·, one or two | 2 to 4 | int8 GEMV | int8 GEMV | int8 GEMV | f32 GEMV | f32 GEMV |
//! | | more, to 31 | int8 I8MM | int8 I8MM | int8 I8MM | f32 GEMV | f32 GEMV |
//! | | 32 and more | int8 I8MM | int8 I8MM | int8 I8MM | f32 tiles | f32 tiles |
//! | `avx2` | 1 | int8 GEMV | int8 GEMV | int8 GEMV | f32 GEMV | f32 GEMV |
//! | ·, three digits | 2 to 31 | f32 GEMV | f32 GEMV | f32 GEMV | f32 GEMV | f32 GEMV |
//! | ·, one or two | 2 to 4 | int8 GEMV | int8 GEMV | int8 GEMV | f32 GEMV | f32 GEMV |
//! | · | more, to 31 | f32 GEMV | f32 GEMV | f32 GEMV | f32 GEMV | f32 GEMV |
//! | | 32 and more | f32 tiles | f32 tiles | f32 tiles | f32 tiles | f32 tiles |
//! | ·, one | 32 and more | int8 AVX2 | int8 AVX2 | int8 AVX2 | f32 tiles | f32 tiles |
//! | `avx512vnni` | 1 | int8 GEMV | int8 GEMV | int8 GEMV | FP8 GEMV | f32 GEMV |
//! | ·, three digits | 2 to 8 | f32 GEMV | f32 GEMV | f32 GEMV | f32 GEMV | f32 GEMV |
//! | ·, one or two | 2 to 4 | int8 GEMV | int8 GEMV | int8 GEMV | f32 GEMV | f32 GEMV |
//! | | more, to 31 | int8 VNNI | int8 VNNI | int8 VNNI | f32 GEMV | f32 GEMV |
//! | | 32 and more | int8 VNNI | int8 VNNI | int8 VNNI | f32 tiles | f32 tiles |
//! | `avx512amx` | 1 | int8 GEMV | int8 GEMV | int8 GEMV | FP8 GEMV | f32 GEMV |
//! | ·, one or two | 2 | int8 GEMV | bf16 AMX | bf16 AMX | bf16 AMX | f32 GEMV |
//! | | else, to 16 | int8 AMX, few | bf16 AMX | bf16 AMX | bf16 AMX | f32 GEMV |
//! | | more, to 31 | int8 AMX | bf16 AMX | bf16 AMX | bf16 AMX | f32 GEMV |
//! | | 32 and more | int8 AMX | bf16 AMX | bf16 AMX | bf16 AMX | f32 tiles |
//!
//! Digits are those of activations in integer kernels ([`Digits`]). GGML's K and IQ types are columns of affine formats; those with
//! groups of 16 without AMX. Where few rows have a kernel of their own on AMX, codes of one and two bits take int8 AMX.
//! IQ4 types have no integer kernel on AVX2, codes of eight bits none for 32 rows and
//! more. FP8 with float scales is MXFP8's, without AMX, too.
//!
//! The instruction set, M and the digits name the candidates, the fastest first; each kernel says which formats it supports. The last
//! candidate is always an f32 one, which supports every format: a format without a fast kernel is slow, never wrong. A fast
//! kernel that cannot represent some activations or scales ([`NotRepresentable`]) leaves the matmul to f32, too.
//!
//! The gradient of x, `dy * weight`, has one algorithm for every instruction set, M and format: f32 tiles
//! ([`f32::gemm_backward`]). A gradient spans too many magnitudes for integers.

use super::super::precision::ActivationPrecision;
#[cfg(target_arch = "x86_64")]
use super::bf16::gemm_amx::Bf16Amx;
use super::f32;
#[cfg(target_arch = "x86_64")]
use super::f32::fp8_gemv::Fp8Gemv;
use super::fast_kernel::{
    matmul_by_rows, Digits, FastKernel, NotRepresentable, PreparedMany, PreparedX, RowKernel,
};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::int8::gemm::Int8Gemm;
#[cfg(target_arch = "aarch64")]
use super::int8::gemv_neon::Int8GemvNeon;
#[cfg(target_arch = "x86_64")]
use super::int8::{few_amx::Int8FewAmx, gemv_avx2::Int8GemvAvx2, gemv_vnni::Int8GemvVnni};
#[cfg(target_arch = "aarch64")]
use super::isa::neon::{NeonDotprod, NeonI8mm};
use super::isa::InstructionSet;
#[cfg(target_arch = "x86_64")]
use super::isa::{amx_tile::Amx, avx2::Avx2, avx512::Avx512Vnni};
use super::matrix::PackedMatrix;
use super::tasks::{self, Threads};
use crate::format::Real;
use crate::QuantFormat;
use std::borrow::Cow;

/// How a weight is multiplied. A fast algorithm holds its kernel, which proves that the CPU has the instructions.
#[derive(Clone, Copy, Debug)]
pub(super) enum Algorithm {
    /// Packed weights as they are, in f32, with up to eight rows of x in each pass over them.
    F32Gemv,
    /// Tiles of weights, dequantized into f32, for the `gemm` crate.
    F32Tiles,
    /// Integer codes times fixed-point activations, with VNNI.
    #[cfg(target_arch = "x86_64")]
    Int8GemvVnni(Int8GemvVnni),
    /// The same with AVX2.
    #[cfg(target_arch = "x86_64")]
    Int8GemvAvx2(Int8GemvAvx2),
    /// The same with NEON.
    #[cfg(target_arch = "aarch64")]
    Int8GemvNeon(Int8GemvNeon),
    /// The same for a few rows of x, and for many, with NEON's dot products, and with its products of matrices.
    #[cfg(target_arch = "aarch64")]
    Int8FewDot(Int8Gemm<NeonDotprod>),
    #[cfg(target_arch = "aarch64")]
    Int8ManyDot(Int8Gemm<NeonDotprod>),
    #[cfg(target_arch = "aarch64")]
    Int8FewI8mm(Int8Gemm<NeonI8mm>),
    #[cfg(target_arch = "aarch64")]
    Int8ManyI8mm(Int8Gemm<NeonI8mm>),
    /// The same with VNNI.
    #[cfg(target_arch = "x86_64")]
    Int8Few(Int8Gemm<Avx512Vnni>),
    #[cfg(target_arch = "x86_64")]
    Int8Many(Int8Gemm<Avx512Vnni>),
    /// The same for many, with AVX2.
    #[cfg(target_arch = "x86_64")]
    Int8ManyAvx2(Int8Gemm<Avx2>),
    /// E4M3 elements in f32, in fewer AVX-512 instructions.
    #[cfg(target_arch = "x86_64")]
    Fp8Gemv(Fp8Gemv),
    /// Integer codes times fixed-point activations, on AMX: a few rows of x, and more.
    #[cfg(target_arch = "x86_64")]
    Int8FewAmx(Int8FewAmx),
    #[cfg(target_arch = "x86_64")]
    Int8Amx(Int8Gemm<Amx>),
    /// bf16 weights times activations split into three bf16, on AMX.
    #[cfg(target_arch = "x86_64")]
    Bf16Amx(Bf16Amx),
}

/// What runs an algorithm.
enum Runner<'a> {
    F32Gemv,
    F32Tiles,
    #[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
    Rows(&'a dyn RowKernel),
    #[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
    Whole(&'a dyn FastKernel),
}

impl Algorithm {
    fn runner(&self) -> Runner<'_> {
        match self {
            Self::F32Gemv => Runner::F32Gemv,
            Self::F32Tiles => Runner::F32Tiles,
            #[cfg(target_arch = "x86_64")]
            Self::Int8GemvVnni(kernel) => Runner::Rows(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Int8GemvAvx2(kernel) => Runner::Rows(kernel),
            #[cfg(target_arch = "aarch64")]
            Self::Int8GemvNeon(kernel) => Runner::Rows(kernel),
            #[cfg(target_arch = "aarch64")]
            Self::Int8FewDot(kernel) => Runner::Rows(kernel),
            #[cfg(target_arch = "aarch64")]
            Self::Int8ManyDot(kernel) => Runner::Whole(kernel),
            #[cfg(target_arch = "aarch64")]
            Self::Int8FewI8mm(kernel) => Runner::Rows(kernel),
            #[cfg(target_arch = "aarch64")]
            Self::Int8ManyI8mm(kernel) => Runner::Whole(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Int8Few(kernel) => Runner::Rows(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Int8Many(kernel) => Runner::Whole(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Int8ManyAvx2(kernel) => Runner::Whole(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Fp8Gemv(kernel) => Runner::Rows(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Int8FewAmx(kernel) => Runner::Rows(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Int8Amx(kernel) => Runner::Whole(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Bf16Amx(kernel) => Runner::Whole(kernel),
        }
    }

    /// Whether the algorithm computes with weights of this format.
    pub(super) fn supports(&self, format: QuantFormat) -> bool {
        match self.runner() {
            Runner::F32Gemv | Runner::F32Tiles => true,
            Runner::Rows(kernel) => kernel.supports(format),
            Runner::Whole(kernel) => kernel.supports(format),
        }
    }
}

/// Ranges of M that algorithms differ in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RowsOfX {
    One,
    /// So few that it does not pay to dequantize tiles.
    Few,
    Many,
}

/// The largest M of the f32 GEMV.
pub(super) const MAX_FEW: usize = 31;

/// The largest M with which weights are rows of matrix tiles, as they lie in memory: with more, panels of them take less time.
#[cfg(target_arch = "x86_64")]
const FEW_OF_AMX: usize = 16;

impl RowsOfX {
    fn of(m: usize) -> Self {
        match m {
            0..=1 => Self::One,
            2..=MAX_FEW => Self::Few,
            _ => Self::Many,
        }
    }

    /// The algorithm for every format.
    fn in_f32(self) -> Algorithm {
        match self {
            Self::One | Self::Few => Algorithm::F32Gemv,
            Self::Many => Algorithm::F32Tiles,
        }
    }
}

/// The table above.
#[cfg_attr(
    not(any(target_arch = "x86_64", target_arch = "aarch64")),
    allow(unused_variables, reason = "digits are those of integer kernels")
)]
pub(super) fn choose(isa: &InstructionSet, m: usize, format: QuantFormat, digits: Digits) -> Algorithm {
    let rows = RowsOfX::of(m);
    let candidates: &[Algorithm] = match isa {
        InstructionSet::Portable(_) => &[],
        #[cfg(target_arch = "aarch64")]
        InstructionSet::Neon(_) => &[],
        #[cfg(target_arch = "aarch64")]
        InstructionSet::NeonDotprod(isa) => match (digits.count, rows, m) {
            (_, RowsOfX::One, _) | (1 | 2, _, ..=4) => &[Algorithm::Int8GemvNeon(Int8GemvNeon::new(*isa))],
            // Three digits take as many instructions as f32, about.
            (1 | 2, RowsOfX::Few, _) => &[Algorithm::Int8FewDot(Int8Gemm::new(*isa))],
            (1 | 2, RowsOfX::Many, _) => &[Algorithm::Int8ManyDot(Int8Gemm::new(*isa))],
            _ => &[],
        },
        #[cfg(target_arch = "aarch64")]
        InstructionSet::NeonI8mm(isa) => match (digits.count, rows, m) {
            (_, RowsOfX::One, _) | (1 | 2, _, ..=4) => {
                &[Algorithm::Int8GemvNeon(Int8GemvNeon::new(isa.dotprod))]
            }
            (3.., RowsOfX::Few, ..=8) => &[],
            (_, RowsOfX::Few, _) => &[Algorithm::Int8FewI8mm(Int8Gemm::new(*isa))],
            (_, RowsOfX::Many, _) => &[Algorithm::Int8ManyI8mm(Int8Gemm::new(*isa))],
        },
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2(isa) => match (digits.count, rows, m) {
            (_, RowsOfX::One, _) | (1 | 2, _, ..=4) => &[Algorithm::Int8GemvAvx2(Int8GemvAvx2::new(*isa))],
            // Two digits gain little, three take more time than f32.
            (1, RowsOfX::Many, _) => &[Algorithm::Int8ManyAvx2(Int8Gemm::new(*isa))],
            _ => &[],
        },
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512(_) => &[],
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512Vnni(isa) => match rows {
            RowsOfX::One => &[
                Algorithm::Int8GemvVnni(Int8GemvVnni::new(*isa)),
                Algorithm::Fp8Gemv(Fp8Gemv::new(isa.avx512)),
            ],
            RowsOfX::Few => match (digits.count, m) {
                // Unpacked panels do not pay yet, and three digits take as much time as f32.
                (1 | 2, ..=4) => &[Algorithm::Int8GemvVnni(Int8GemvVnni::new(*isa))],
                (3.., ..=8) => &[],
                _ => &[Algorithm::Int8Few(Int8Gemm::new(*isa))],
            },
            RowsOfX::Many => &[Algorithm::Int8Many(Int8Gemm::new(*isa))],
        },
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512Amx(isa) => match rows {
            // Tiles would be nearly empty, and unpacking for them costs more than multiplying.
            RowsOfX::One => &[
                Algorithm::Int8GemvVnni(Int8GemvVnni::new(isa.vnni)),
                Algorithm::Fp8Gemv(Fp8Gemv::new(isa.vnni.avx512)),
            ],
            RowsOfX::Few => match (digits.count, m) {
                // Vectors take no longer for two rows, of which all is prepared sooner.
                (1 | 2, ..=2) if Int8FewAmx::new(*isa).supports(format) => {
                    &[Algorithm::Int8GemvVnni(Int8GemvVnni::new(isa.vnni))]
                }
                (_, ..=FEW_OF_AMX) => &[
                    Algorithm::Int8FewAmx(Int8FewAmx::new(*isa)),
                    Algorithm::Bf16Amx(Bf16Amx::new(*isa)),
                    Algorithm::Int8Amx(Int8Gemm::new(*isa)),
                ],
                _ => &[Algorithm::Bf16Amx(Bf16Amx::new(*isa)), Algorithm::Int8Amx(Int8Gemm::new(*isa))],
            },
            RowsOfX::Many => {
                &[Algorithm::Bf16Amx(Bf16Amx::new(*isa)), Algorithm::Int8Amx(Int8Gemm::new(*isa))]
            }
        },
    };
    candidates.iter().copied().find(|algorithm| algorithm.supports(format)).unwrap_or(rows.in_f32())
}

/// `x * weight^T + bias` with the algorithm that the table chooses.
pub(super) fn matmul<T: Real>(
    isa: &InstructionSet,
    matrix: &PackedMatrix,
    x: &[T],
    bias: Option<&[f32]>,
    precision: ActivationPrecision,
) -> Vec<T> {
    let m = x.len() / matrix.k;
    if m == 0 {
        return Vec::new();
    }
    let digits = Digits::of::<T>(precision);
    match run(choose(isa, m, matrix.format, digits), isa, matrix, x, bias, digits) {
        Ok(output) => output,
        Err(NotRepresentable) => in_f32(isa, matrix, x, bias),
    }
}

/// `x * weight^T + bias` without a fast kernel.
fn in_f32<T: Real>(isa: &InstructionSet, matrix: &PackedMatrix, x: &[T], bias: Option<&[f32]>) -> Vec<T> {
    match RowsOfX::of(x.len() / matrix.k) {
        RowsOfX::One | RowsOfX::Few => f32_gemv(isa, matrix, x, bias),
        RowsOfX::Many => f32::gemm::matmul(f32::kernels(isa), matrix, x, bias),
    }
}

/// Rows of x that several weights multiply, one whole output after another: prepared once for each format of theirs.
pub(super) struct ManyRows<'a> {
    isa: &'a InstructionSet,
    x: Cow<'a, [f32]>,
    k: usize,
    digits: Digits,
    /// None where x cannot be represented.
    prepared: Vec<(QuantFormat, Option<Box<dyn PreparedMany>>)>,
}

impl<'a> ManyRows<'a> {
    /// Rows of `k` numbers.
    pub(super) fn new(
        isa: &'a InstructionSet,
        k: usize,
        x: Cow<'a, [f32]>,
        precision: ActivationPrecision,
    ) -> Self {
        Self { isa, x, k, digits: Digits::of::<f32>(precision), prepared: Vec::new() }
    }

    /// `x * weight^T + bias`, `[M, N]`, in place of what `out` has.
    ///
    /// # Panics
    /// If the weight has another K.
    pub(super) fn matmul(&mut self, matrix: &PackedMatrix, bias: Option<&[f32]>, out: &mut Vec<f32>) {
        assert_eq!(matrix.k, self.k, "x is for another weight");
        let m = self.x.len() / self.k.max(1);
        if m == 0 {
            return out.clear();
        }
        let algorithm = choose(self.isa, m, matrix.format, self.digits);
        let Runner::Whole(kernel) = algorithm.runner() else {
            // What it had is given back first: footprints have room for one output.
            *out = Vec::new();
            let ran = run(algorithm, self.isa, matrix, &self.x, bias, self.digits);
            *out = ran.unwrap_or_else(|NotRepresentable| in_f32(self.isa, matrix, &self.x, bias));
            return;
        };
        let known = self.prepared.iter().position(|(format, _)| *format == matrix.format);
        let index = known.unwrap_or_else(|| {
            let prepared = kernel.prepare(matrix.format, self.k, &self.x, self.digits);
            self.prepared.push((matrix.format, prepared.ok()));
            self.prepared.len() - 1
        });
        let prepared = self.prepared.get(index).and_then(|(_, prepared)| prepared.as_ref());
        // All of it is written.
        out.resize(m * matrix.rows, 0.);
        match prepared.map(|prepared| prepared.matmul(matrix, out)) {
            Some(Ok(())) => add_bias(bias, out),
            Some(Err(NotRepresentable)) | None => {
                *out = Vec::new();
                *out = in_f32(self.isa, matrix, &self.x, bias);
            }
        }
    }
}

/// Adds the bias to each row of an output.
fn add_bias(bias: Option<&[f32]>, output: &mut [f32]) {
    let Some(bias) = bias.filter(|bias| !bias.is_empty()) else { return };
    const ROWS_AT_ONCE: usize = 16;
    tasks::for_each(output.chunks_mut(ROWS_AT_ONCE * bias.len()), |_, rows| {
        for row in rows.chunks_exact_mut(bias.len()) {
            row.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
        }
    });
}

/// `x * weight^T + bias` with this algorithm.
///
/// # Errors
/// If a fast kernel cannot represent the activations or scales.
pub(super) fn run<T: Real>(
    algorithm: Algorithm,
    isa: &InstructionSet,
    matrix: &PackedMatrix,
    x: &[T],
    bias: Option<&[f32]>,
    digits: Digits,
) -> Result<Vec<T>, NotRepresentable> {
    match algorithm.runner() {
        Runner::F32Gemv => Ok(f32_gemv(isa, matrix, x, bias)),
        Runner::F32Tiles => Ok(f32::gemm::matmul(f32::kernels(isa), matrix, x, bias)),
        Runner::Rows(kernel) => {
            let prepared = kernel.prepare(matrix.format, matrix.k, &widened(x), digits)?;
            Ok(matmul_by_rows(&*prepared, matrix, bias))
        }
        Runner::Whole(kernel) => {
            let mut output = vec![0.; x.len() / matrix.k * matrix.rows];
            let prepared = kernel.prepare(matrix.format, matrix.k, &widened(x), digits)?;
            prepared.matmul(matrix, &mut output)?;
            add_bias(bias, &mut output);
            Ok(T::round_all(output))
        }
    }
}

/// `x * weight^T + bias` with the f32 GEMV.
fn f32_gemv<T: Real>(isa: &InstructionSet, matrix: &PackedMatrix, x: &[T], bias: Option<&[f32]>) -> Vec<T> {
    let prepared = f32::gemv::prepare(f32::kernels(isa), matrix.k, x, Threads::All);
    matmul_by_rows(&*prepared, matrix, bias)
}

/// A few rows of x, prepared for weights of one format and one K, by the kernel that the table chooses for them or by
/// the f32 GEMV: for threads that share out the rows of several weights among themselves.
pub(super) struct Prepared<'a> {
    format: QuantFormat,
    k: usize,
    x: Box<dyn PreparedX + 'a>,
}

/// Prepares `x`, a few rows of `k` numbers, on this thread alone.
pub(super) fn prepare<'a>(
    isa: &'a InstructionSet,
    format: QuantFormat,
    k: usize,
    x: &[f32],
    digits: Digits,
) -> Prepared<'a> {
    let choose = |isa: &InstructionSet| choose(isa, x.len() / k.max(1), format, digits);
    let algorithm = match choose(isa) {
        whole if matches!(whole.runner(), Runner::Whole(_)) => choose(&isa.without_tiles()),
        algorithm => algorithm,
    };
    let fast = match algorithm.runner() {
        Runner::Rows(kernel) => kernel.prepare(format, k, x, digits).ok(),
        Runner::F32Gemv | Runner::F32Tiles | Runner::Whole(_) => None,
    };
    let x = fast.unwrap_or_else(|| f32::gemv::prepare(f32::kernels(isa), k, x, Threads::This));
    Prepared { format, k, x }
}

impl Prepared<'_> {
    /// Rows of x.
    pub(super) fn m(&self) -> usize {
        self.x.m()
    }

    /// Multiplies rows of a weight, from `first_row` on, with all rows of x, on this thread alone. `out` is `[rows, M]`;
    /// its length sets the number of rows. A row has the same bits whatever rows are multiplied with it.
    ///
    /// # Panics
    /// If the weight has another format or K, or fewer rows.
    pub(super) fn rows(&self, matrix: &PackedMatrix, first_row: usize, out: &mut [f32]) {
        assert!(matrix.format == self.format && matrix.k == self.k, "x is prepared for another weight");
        let m = self.m();
        if m > 0 && !out.is_empty() {
            assert!(out.len().is_multiple_of(m) && first_row + out.len() / m <= matrix.rows, "no such rows");
            self.x.rows(matrix, first_row, out);
        }
    }
}

/// Products of x with some columns of a dense matrix: the router of experts, which is small.
pub(super) use f32::gemm::dense_columns;

/// `dy * weight`, the gradient of x: `dy` is `[M, N]`, the output `[M, K]`.
pub(super) fn matmul_backward<T: Real>(isa: &InstructionSet, matrix: &PackedMatrix, dy: &[T]) -> Vec<T> {
    match dy.is_empty() {
        true => Vec::new(),
        false => f32::gemm_backward::matmul(f32::kernels(isa), matrix, dy),
    }
}

/// `x` in f32.
pub(super) fn widened<T: Real>(x: &[T]) -> Vec<f32> {
    const AT_ONCE: usize = 1 << 16;
    let mut all = vec![0f32; x.len()];
    tasks::for_each(all.chunks_mut(AT_ONCE).zip(x.chunks(AT_ONCE)), |_, (to, from)| T::widen(from, to));
    all
}
