//! What dispatch needs of kernels: of those that are faster than the ones in f32 and take some formats only, and of those
//! for a few rows of x.

use super::super::precision::ActivationPrecision;
use super::matrix::PackedMatrix;
use super::output::{in_parts, round_row, rows_per_task};
use crate::format::Real;
use crate::QuantFormat;

/// The kernel cannot represent these activations or scales: an infinity, a NaN, or magnitudes too far apart. The f32
/// kernels can.
#[derive(Clone, Copy, Debug)]
pub(super) struct NotRepresentable;

/// How many signed digits of eight bits an activation has in the integer kernels, and what else they may lose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Digits {
    /// One, two or three.
    pub(super) count: usize,
    /// Whether activations that digits express badly are left to f32, however many they are.
    pub(super) strict: bool,
}

impl Digits {
    /// As good as f32.
    #[cfg_attr(not(test), allow(dead_code))]
    pub(super) const EXACT: Self = Self { count: 3, strict: true };

    /// What a precision means for activations of a type. Three digits keep 23 bits of the largest number that meets a
    /// group of weights, where f32 keeps 24 of each. A bf16 has eight, so that two digits, 15 bits, lose nothing of
    /// numbers down to 2^-7 of the largest, and less than 2^-16 of the largest where they lose something: far below the
    /// rounding of the output to bf16. An f16 has eleven, for which this does not hold.
    pub(super) fn of<T: Real>(precision: ActivationPrecision) -> Self {
        match precision {
            ActivationPrecision::Exact if T::DTYPE == candle_core::DType::BF16 => {
                Self { count: 2, strict: true }
            }
            ActivationPrecision::Exact => Self { count: 3, strict: true },
            ActivationPrecision::Bits16 => Self { count: 2, strict: false },
            ActivationPrecision::Bits8 => Self { count: 1, strict: false },
        }
    }
}

/// A kernel for whole outputs, in two steps: it prepares x once, for every weight that x meets, and then multiplies such
/// weights, both by all threads.
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
pub(super) trait FastKernel {
    /// Whether the kernel computes with weights of this format.
    fn supports(&self, format: QuantFormat) -> bool;

    /// Prepares `x`, rows of `k` numbers, for weights of a supported format.
    ///
    /// # Errors
    /// If the kernel cannot represent the activations.
    fn prepare(
        &self,
        format: QuantFormat,
        k: usize,
        x: &[f32],
        digits: Digits,
    ) -> Result<Box<dyn PreparedMany>, NotRepresentable>;
}

/// Rows of x, prepared for any weight of one format and one K.
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
pub(super) trait PreparedMany: Send + Sync {
    /// Writes `x * weight^T`, `[M, N]`.
    ///
    /// # Errors
    /// If the kernel cannot represent the scales.
    ///
    /// # Panics
    /// If `out` has another length.
    fn matmul(&self, matrix: &PackedMatrix, out: &mut [f32]) -> Result<(), NotRepresentable>;
}

/// A kernel for a few rows of x, in two steps: it prepares x once, for every weight that x meets, and then multiplies any
/// rows of such a weight.
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
pub(super) trait RowKernel {
    /// Whether the kernel computes with weights of this format.
    fn supports(&self, format: QuantFormat) -> bool;

    /// Prepares `x`, rows of `k` numbers, for weights of a supported format, on this thread alone.
    ///
    /// # Errors
    /// If the kernel cannot represent the activations.
    fn prepare(
        &self,
        format: QuantFormat,
        k: usize,
        x: &[f32],
        digits: Digits,
    ) -> Result<Box<dyn PreparedX>, NotRepresentable>;
}

/// Rows of x, prepared for the rows of any weight of one format and one K.
pub(super) trait PreparedX: Send + Sync {
    /// Rows of x.
    fn m(&self) -> usize;

    /// Multiplies rows of the weight, from `first_row` on, with all rows of x, on this thread alone. `out` is
    /// `[rows, M]`; its length sets the number of rows, which the weight has. A row has the same bits whatever rows
    /// are multiplied with it.
    fn rows(&self, matrix: &PackedMatrix, first_row: usize, out: &mut [f32]);
}

/// Writes what `dot` gives for each of `m` rows of x, one after the other, to `out`, `[rows, m]`.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) fn each_row_of_x(m: usize, out: &mut [f32], mut dot: impl FnMut(usize, &mut [f32])) {
    if m == 1 {
        return dot(0, out);
    }
    let mut sums = vec![0f32; out.len() / m.max(1)];
    for index in 0..m {
        dot(index, &mut sums);
        out.iter_mut().skip(index).step_by(m).zip(&sums).for_each(|(out, sum)| *out = *sum);
    }
}

/// `x * weight^T + bias`, `[M, N]`, by all threads, each of which takes some rows of the weight at a time.
pub(super) fn matmul_by_rows<T: Real>(
    prepared: &dyn PreparedX,
    matrix: &PackedMatrix,
    bias: Option<&[f32]>,
) -> Vec<T> {
    let m = prepared.m();
    let rows_of_task = rows_per_task((m, matrix.rows, matrix.k));
    in_parts((m, matrix.rows), (m, rows_of_task), |mut part| {
        let mut sums = vec![0f32; part.rows() * m];
        prepared.rows(matrix, part.first_row, &mut sums);
        let bias = bias.and_then(|bias| bias.get(part.first_row..));
        for (index, slots) in part.slots.iter_mut().enumerate() {
            round_row(&sums, (index, m), bias, slots);
        }
    })
}
